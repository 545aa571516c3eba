"""The backend "dmuon" as DDP, meshes and callers of torch.distributed see it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from checks import Checks
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from transports import transport_of

import dmuon


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def ddp(rank):
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Tiny(), bucket_cap_mb=1e-4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def test_ddp_over_the_backend(transport):
    torch.manual_seed(0)
    reference = Tiny()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        for rank in range(4):
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + rank))
            (reference(x).pow(2).mean() / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights in run_ranks(4, ddp):
        for got, expected in zip(weights, reference.parameters()):
            assert torch.allclose(got, expected, atol=1e-6)


def works(rank):
    check = Checks(f"rank {rank}")
    n = dist.get_world_size()
    calls = {
        "sum": lambda t: dist.all_reduce(t, async_op=True),
        "average": lambda t: dist.all_reduce(t, op=dist.ReduceOp.AVG, async_op=True),
        "owned": lambda t: dmuon.reduce_to_owners([t], [1], op=dist.ReduceOp.SUM, async_op=True),
        "broadcast": lambda t: dmuon.broadcast_from_owners([t], [2], async_op=True),
    }
    mean = sum(range(n)) / n
    for name, expected in {
        "sum": n * mean,
        "average": mean,
        "owned": 6.0,
        "broadcast": 2.0,
    }.items():
        t = torch.full((3,), float(rank))
        work = calls[name](t)
        (out,) = work.get_future().wait()
        check.true(f"{name} wait", work.wait())  # Gloo completes a future just before its work
        if name != "owned" or rank == 1:
            check.equal(f"{name} future", out, torch.full((3,), expected))
            check.equal(name, t, torch.full((3,), expected))
            check.equal(f"{name} result", work.result()[0], t)
        check.true(f"{name} is_completed", work.is_completed() and work.is_success())
        check.true(f"{name} exception", work.exception() is None)
    # The last rank calls something else: an error in the Work, and in its future, on all ranks.
    shape = 3 + (rank == n - 1)
    work = dmuon.reduce_to_owners([torch.ones(shape)], [0], async_op=True)
    check.refused("failed future", "[4]", lambda: work.get_future().wait())
    check.refused("failed wait", "[4]", work.wait)
    check.true("failed", work.is_completed() and not work.is_success())
    check.true("failed exception", work.exception() is not None)
    return check.bad


def test_works_and_futures_tell_outputs_and_errors(transport):
    for bad in run_ranks(4, works):
        assert bad == []


def meshes(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    names = {dist.get_backend(mesh.get_group(d)) for d in ("replicate", "shard")}
    transports = {transport_of(mesh.get_group(d)) for d in ("replicate", "shard")}
    row = [torch.full((2,), float(rank))]
    dmuon.reduce_to_owners(row, [1], group=mesh.get_group("shard"))
    group = dist.new_group([0, 2])
    t = torch.ones(2) * rank
    if rank in (0, 2):
        dist.all_reduce(t, group=group)
    threads, files = [], []
    for _ in range(20):
        g = dist.new_group([0, 1, 2, 3])
        x = [torch.ones(3)]
        dmuon.reduce_to_owners(x, [1], group=g, op=dist.ReduceOp.SUM)
        # Gloo's thread may drop the last reference to this tensor, and needs the GIL for that,
        # while the group is being destroyed.
        dist.all_reduce(torch.ones(3), group=g)
        dist.destroy_process_group(g)
        threads.append(len(os.listdir("/proc/self/task")))
        files.append(len(os.listdir("/proc/self/fd")))
    return names, transports, row[0].tolist(), t.tolist(), threads[2:], files[2:]


def test_meshes_subgroups_and_twenty_create_destroy_cycles(transport):
    for rank, result in enumerate(run_ranks(4, meshes)):
        names, transports, row, t, threads, files = result
        assert names == {"dmuon"} and transports == {transport}
        assert row == [{0: 0.0, 1: 0.5, 2: 2.0, 3: 2.5}[rank]] * 2
        assert t == ([2.0, 2.0] if rank in (0, 2) else [float(rank)] * 2)
        assert threads[-1] <= threads[0] and files[-1] <= files[0], (threads, files)


def silent(rank, done):
    """How long rank 0 waits for ranks that sleep, by group."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    own = dist.new_group(timeout=timedelta(seconds=1))
    if rank != 0:
        while not done.exists():
            time.sleep(0.1)
        return None
    waited = []
    for group in (own, *mesh.get_all_groups()):
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            dist.all_reduce(torch.ones(1), group=group)
        waited.append(time.monotonic() - begin)
    done.touch()
    return waited


def test_the_groups_of_a_mesh_take_over_the_default_group_s_time_out(tmp_path):
    own, *mesh = run_ranks(4, silent, tmp_path / "done", timeout=6.0)[0]
    assert 0.5 < own < 5.5
    assert len(mesh) == 2 and all(5.5 < seconds < 15 for seconds in mesh)


def mixed_backend(rank):
    t = torch.full((2,), 1.0 + rank)
    dist.all_reduce(t)
    owned = [torch.full((2,), 1.0 + rank)]
    try:
        dmuon.reduce_to_owners(owned, [1], op=dist.ReduceOp.SUM)
        said = transport_of()
    except RuntimeError as error:
        said = str(error)
    return t.tolist(), owned[0].tolist(), said


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:dmuon", "cpu:dmuon", "dmuon"])
def test_per_device_backend_strings(transport, backend):
    for rank, (t, owned, said) in enumerate(run_ranks(2, mixed_backend, backend=backend)):
        assert t == [3.0, 3.0]
        if "cpu:gloo" in backend:
            assert "gloo" in said and "dmuon" in said and owned == [1.0 + rank] * 2
        else:
            assert said == transport and owned == [3.0 if rank == 1 else 1.0] * 2


def test_importing_touches_no_cuda_and_registers_the_name():
    code = (
        "import torch, dmuon, torch.distributed as dist;"
        "assert not torch.cuda.is_initialized();"
        "assert 'dmuon' in dist.Backend.backend_list"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
