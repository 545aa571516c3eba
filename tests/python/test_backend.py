"""The backend "dmuon" as torch.distributed sees it, and the owner collectives from Python."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

import dmuon

DTYPES = [
    torch.int64,
    torch.bool,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
]


def value(rank, dtype, n=6):
    base = torch.arange(n) + rank
    return (base % 2 == 0) if dtype is torch.bool else base.to(dtype)


def standard_collectives(rank, subgroup):
    group = dist.new_group([0, 2, 3]) if subgroup else dist.group.WORLD
    if subgroup and rank == 1:
        return []
    me, n = dist.get_rank(group), dist.get_world_size(group)
    bad = []

    def check(name, got, expected):
        if got.dtype != expected.dtype or not torch.equal(got, expected):
            bad.append((name, got, expected))

    for dtype in DTYPES:
        total = torch.stack([value(r, dtype) for r in range(n)])
        total = total.any(0) if dtype is torch.bool else total.sum(0).to(dtype)
        t = value(me, dtype)
        dist.all_reduce(t, group=group)
        check(f"all_reduce {dtype}", t, total)
        t = value(me, dtype)
        dist.broadcast(t, group=group, group_src=n - 1)
        check(f"broadcast {dtype}", t, value(n - 1, dtype))
        t = value(me, dtype)
        dist.reduce(t, group=group, group_dst=1)
        if me == 1:
            check(f"reduce {dtype}", t, total)
        outs = [torch.empty_like(t) for _ in range(n)]
        dist.all_gather(outs, value(me, dtype), group=group)
        for r in range(n):
            check(f"all_gather {dtype}", outs[r], value(r, dtype))
        out = torch.empty(6 * n, dtype=dtype)
        dist.all_gather_into_tensor(out, value(me, dtype), group=group)
        check(f"all_gather_into {dtype}", out, torch.cat([value(r, dtype) for r in range(n)]))
        if dtype is not torch.bool:
            inputs = torch.cat([value(me, dtype) + k for k in range(n)])
            out = torch.empty(6, dtype=dtype)
            dist.reduce_scatter_tensor(out, inputs, group=group)
            check(f"reduce_scatter {dtype}", out, sum(value(r, dtype) + me for r in range(n)))
        sends = [me + 1] * n
        out = torch.empty(sum(r + 1 for r in range(n)), dtype=dtype)
        dist.all_to_all_single(
            out,
            value(me, dtype, (me + 1) * n),
            output_split_sizes=[r + 1 for r in range(n)],
            input_split_sizes=sends,
            group=group,
        )
        expected = torch.cat(
            [value(r, dtype, (r + 1) * n)[me * (r + 1) : (me + 1) * (r + 1)] for r in range(n)]
        )
        check(f"all_to_all {dtype}", out, expected)
        gathered = [torch.empty(6, dtype=dtype) for _ in range(n)] if me == 0 else None
        dist.gather(value(me, dtype), gathered, group=group, group_dst=0)
        for r in range(n if me == 0 else 0):
            check(f"gather {dtype}", gathered[r], value(r, dtype))
        out = torch.empty(6, dtype=dtype)
        parts = [value(r, dtype) for r in range(n)] if me == 0 else None
        dist.scatter(out, parts, group=group, group_src=0)
        check(f"scatter {dtype}", out, value(me, dtype))
        out = torch.empty(6, dtype=dtype)
        requests = [
            dist.isend(value(me, dtype), group=group, group_dst=(me + 1) % n),
            dist.irecv(out, group=group, group_src=(me - 1) % n),
        ]
        for request in requests:
            request.wait()
        check(f"send/recv {dtype}", out, value((me - 1) % n, dtype))
        empty = torch.empty(0, dtype=dtype)
        dist.broadcast(empty, group=group, group_src=0)

    for op, expected in (
        (dist.ReduceOp.AVG, sum(float(r) for r in range(n)) / n),
        (dist._make_nccl_premul_sum(0.5), sum(float(r) for r in range(n)) / 2),
        (dist.ReduceOp.MAX, n - 1.0),
    ):
        t = torch.full((3,), float(me))
        dist.all_reduce(t, op=op, group=group)
        check(f"all_reduce {op}", t, torch.full((3,), expected))
        out = torch.empty(2)
        dist.reduce_scatter_tensor(out, torch.full((2 * n,), float(me)), op=op, group=group)
        check(f"reduce_scatter {op}", out, torch.full((2,), expected))
    try:
        dist.all_reduce(torch.ones(2, dtype=torch.int64), op=dist.ReduceOp.AVG, group=group)
        bad.append("AVG on integers")
    except (RuntimeError, ValueError, TypeError) as error:
        if "AVG" not in str(error) and "avg" not in str(error):
            bad.append(("AVG on integers", str(error)))

    a, b = torch.full((2,), float(me)), torch.full((3,), float(me))
    with dist._coalescing_manager(group=group, device=torch.device("cpu")):
        dist.all_reduce(a, group=group)
        dist.all_reduce(b, group=group)
    check("coalesced", torch.cat([a, b]), torch.full((5,), float(sum(range(n)))))

    strided = torch.arange(12.0).reshape(3, 4).t().contiguous().t() * (me == 0)
    try:
        dist.broadcast(strided, group=group, group_src=0)
        check("strided broadcast", strided.contiguous(), torch.arange(12.0).reshape(3, 4))
    except RuntimeError as error:
        if "contiguous" not in str(error):
            bad.append(("strided", str(error)))

    objects = [None] * n
    dist.all_gather_object(objects, {"rank": me}, group=group)
    if objects != [{"rank": r} for r in range(n)]:
        bad.append(objects)
    box = [{"from": me}]
    dist.broadcast_object_list(box, group=group, group_src=0)
    if box != [{"from": 0}]:
        bad.append(box)
    dist.barrier(group=group)
    return bad


@pytest.mark.parametrize("subgroup", [False, True], ids=["world", "subgroup"])
def test_standard_collectives(subgroup):
    for bad in run_ranks(4, standard_collectives, subgroup):
        assert bad == []


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def ddp(rank):
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Tiny())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    t = torch.full((3,), float(rank))
    work = dist.all_reduce(t, async_op=True)
    future = work.get_future().wait()
    work.wait()  # Gloo completes the future just before the work itself
    outcome = torch.equal(future[0], torch.full((3,), 6.0)), work.is_completed()
    return [p.detach().clone() for p in model.parameters()], outcome


def test_ddp_over_the_backend_and_futures():
    torch.manual_seed(0)
    reference = Tiny()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        for rank in range(4):
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + rank))
            (reference(x).pow(2).mean() / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights, outcome in run_ranks(4, ddp):
        assert outcome == (True, True)
        for got, expected in zip(weights, reference.parameters()):
            assert torch.allclose(got, expected, atol=1e-6)


def meshes(rank):
    import os

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    names = {dist.get_backend(mesh.get_group(d)) for d in ("replicate", "shard")}
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
    return names, t.tolist(), threads[-1] - threads[2], files[-1] - files[2]


def test_meshes_subgroups_and_twenty_create_destroy_cycles():
    for rank, (names, t, threads, files) in enumerate(run_ranks(4, meshes)):
        assert names == {"dmuon"}
        assert t == ([2.0, 2.0] if rank in (0, 2) else [float(rank)] * 2)
        assert threads <= 0 and files <= 0


def mixed_backend(rank):
    t = torch.ones(2)
    dist.all_reduce(t)
    return t.tolist()


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:dmuon", "cpu:dmuon", "dmuon"])
def test_per_device_backend_strings(backend):
    assert run_ranks(2, mixed_backend, backend=backend) == [[2.0, 2.0]] * 2


def test_importing_touches_no_cuda_and_registers_the_name():
    code = (
        "import torch, dmuon, torch.distributed as dist;"
        "assert not torch.cuda.is_initialized();"
        "assert 'dmuon' in dist.Backend.backend_list"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- owner collectives ---------------------------------------------------------------------------


def owner_collectives(rank):
    tensors = [torch.full((i,), float(rank + i)) for i in (0, 1, 5, 1000)]
    owners = [3, 0, 2, 2]
    before = [t.clone() for t in tensors]
    work = dmuon.reduce_to_owners(tensors, owners, async_op=True)
    work.wait()
    good = [work.is_completed()]
    for i, (t, o) in enumerate(zip(tensors, owners)):
        if o == rank:
            expected = torch.full_like(t, (6 + 4 * t.numel()) / 4)
            good.append(torch.equal(t, expected))
        else:
            good.append(torch.equal(t, before[i]))
    dmuon.broadcast_from_owners(tensors, owners)
    good += [torch.equal(t, torch.full_like(t, (6 + 4 * t.numel()) / 4)) for t in tensors]
    half = [torch.full((3,), 1.0 + rank, dtype=torch.bfloat16)]
    dmuon.reduce_to_owners(half, [1], op=dist.ReduceOp.SUM)
    good.append(rank != 1 or half[0].tolist() == [10.0] * 3)
    return good


def test_owner_collectives_from_python():
    for good in run_ranks(4, owner_collectives):
        assert all(good), good


def bad_owner_collectives(rank):
    cases = {
        "owner": lambda: dmuon.reduce_to_owners([torch.ones(2)], [7]),
        "dtype": lambda: dmuon.reduce_to_owners([torch.ones(2, dtype=torch.int32)], [0]),
        "strides": lambda: dmuon.broadcast_from_owners([torch.ones(4, 4).t()[1:]], [0]),
        "shapes": lambda: dmuon.reduce_to_owners([torch.ones(2 + (rank == 1))], [0]),
        "owners": lambda: dmuon.reduce_to_owners([torch.ones(2)], [int(rank == 2)]),
        "op": lambda: dmuon.reduce_to_owners([torch.ones(2)], [0], op=dist.ReduceOp.MAX),
    }
    messages = {}
    for name, call in cases.items():
        try:
            call()
            messages[name] = "no error"
        except (RuntimeError, ValueError) as error:
            messages[name] = str(error)
    t = [torch.ones(2)]
    dmuon.reduce_to_owners(t, [0], op=dist.ReduceOp.SUM)  # the group still works
    return messages, rank != 0 or t[0].tolist() == [4.0, 4.0]


def test_bad_owner_collectives_fail_on_every_rank_with_values():
    for messages, works in run_ranks(4, bad_owner_collectives):
        assert works
        assert "7" in messages["owner"] and "reduce_to_owners" in messages["owner"]
        assert "Int" in messages["dtype"] or "int" in messages["dtype"]
        assert "contiguous" in messages["strides"]
        assert "[3]" in messages["shapes"] and "[2]" in messages["shapes"]
        assert "rank 1" in messages["shapes"]
        assert "owner" in messages["owners"] and "2" in messages["owners"]
        assert "MAX" in messages["op"]


def wrong_backend(rank):
    try:
        dmuon.reduce_to_owners([torch.ones(2)], [0])
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_another_backend_is_named():
    for message in run_ranks(2, wrong_backend, backend="gloo"):
        assert "gloo" in message and "dmuon" in message


def absent(rank):
    if rank == 2:
        import time

        time.sleep(6)
        return "absent"
    try:
        dmuon.reduce_to_owners([torch.ones(4)], [0])
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_rank_that_does_not_take_part_is_named_within_the_time_out():
    for rank, message in enumerate(run_ranks(4, absent, timeout=2.0)):
        if rank != 2:
            assert "reduce_to_owners" in message and "rank 2" in message, message
