"""Owner collectives of CUDA tensors over NCCL: every mode, against the CPU's sums."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from gpu_ranks import SIZE, run_on_gpu

import dmuon

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# Even owners (padded), uneven ones, one owner, and no elements; one dtype, and all of them.
LISTS = {
    "even": ([(8, 4), (32,), (31,), (32,)], [0, 1, 2, 3], DTYPES[:1]),
    "skewed": ([(400, 3), (3,), (31,), (0,)], [0, 1, 3, 2], DTYPES[:1]),
    "one": ([(5,), (7,), (9,)], [2, 2, 2], DTYPES[2:3]),
    "large": ([(1024, 1024), (1024, 1023)], [1, 3], DTYPES[2:3]),
    "mixed": ([(5, 3), (100,), (0, 2), (17,), (), (33,), (64,)], [1, 3, 0, 1, 2, 1, 0], DTYPES),
}


def data(rank, i, shape, dtype, exact):
    g = torch.Generator().manual_seed(1000 * rank + i)
    if exact:
        return torch.randint(-8, 9, shape, generator=g).to(dtype)
    return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)


def tensors(rank, name, exact):
    shapes, owners, dtypes = LISTS[name]
    made = [data(rank, i, s, dtypes[i % len(dtypes)], exact) for i, s in enumerate(shapes)]
    return made, owners


def reduces(rank, exact):
    for name in LISTS:
        host, owners = tensors(rank, name, exact)
        device = [t.cuda() for t in host]
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            on_host = [t.clone() for t in host]
            on_device = [t.clone() for t in device]
            dmuon.reduce_to_owners(on_host, owners, op=op)
            dmuon.reduce_to_owners(on_device, owners, op=op)
            for i, (h, d) in enumerate(zip(on_host, on_device)):
                if owners[i] == rank:
                    assert torch.equal(h, d.cpu()), (name, op, i)
                else:
                    assert torch.equal(d, device[i]), f"{name}: input {i} was changed"


@pytest.mark.parametrize(
    "environment",
    [{}, {"DMUON_NCCL_DETERMINISTIC": "1"}, {"DMUON_NCCL_FP32_ACCUMULATION": "1"}],
    ids=["nccl", "deterministic", "fp32"],
)
def test_exact_sums_are_exact_in_every_mode(tmp_path, environment):
    run_on_gpu(tmp_path / "s", reduces, True, environment=environment)


def test_deterministic_sums_are_the_cpus_bit_for_bit(tmp_path):
    mode = {"DMUON_NCCL_DETERMINISTIC": "1", "DMUON_DEBUG": "1"}
    run_on_gpu(tmp_path / "s", reduces, False, environment=mode)


def broadcasts(rank):
    for name in LISTS:
        mine, owners = tensors(rank, name, False)
        device = [t.cuda() for t in mine]
        dmuon.broadcast_from_owners(device, owners)
        for i, t in enumerate(device):
            assert torch.equal(t.cpu(), tensors(owners[i], name, False)[0][i]), (name, i)
    flat = torch.full((4096,), float(rank), device="cuda")
    parts = list(flat.chunk(SIZE))
    dmuon.broadcast_from_owners(parts, list(range(SIZE)))
    assert flat.view(SIZE, -1).mean(1).tolist() == [0.0, 1.0, 2.0, 3.0]


def test_broadcasts_deliver_the_owners_bytes(tmp_path):
    run_on_gpu(tmp_path / "s", broadcasts)


def overlaps(rank):
    warm = torch.zeros(4, device="cuda")
    dmuon.reduce_to_owners([warm], [0])
    # The input is made behind long work on the caller's stream, and the host does not wait for it.
    torch.cuda.synchronize()
    busy = torch.ones(4096, 4096, device="cuda")
    begin = time.monotonic()
    for _ in range(200):
        busy = (busy @ busy).clamp_(0, 1)
    t = busy.mean().reshape(1) * (rank + 1)
    work = dmuon.reduce_to_owners([t], [0], op=dist.ReduceOp.SUM, async_op=True)
    issued = time.monotonic() - begin
    work.wait()
    after = t * 2  # ordered after the operation by wait() alone
    ordered = time.monotonic() - begin
    torch.cuda.synchronize()
    done = time.monotonic() - begin
    if rank == 0:
        assert after.item() == 20.0
    assert work.is_completed()
    # No test of speed: the host had come through before the device, by far.
    assert max(issued, ordered) < done


def test_the_host_goes_on_while_the_device_works(tmp_path):
    run_on_gpu(tmp_path / "s", overlaps)


def dies(rank):
    t = torch.ones(4, device="cuda")
    dmuon.reduce_to_owners([t], [0])
    torch.cuda.synchronize()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    work = dmuon.reduce_to_owners([t], [0], async_op=True)
    deadline = time.monotonic() + 60
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(RuntimeError, match=r"reduce_to_owners on group .* operation 1"):
        work.wait()
    torch.cuda.synchronize()  # its kernel has been ended
    with pytest.raises(RuntimeError, match="unusable"):
        dmuon.reduce_to_owners([t], [0])
    os._exit(0)  # torch's own NCCL group would wait for the dead rank


def test_a_killed_rank_ends_the_operation_of_the_others(tmp_path):
    run_on_gpu(tmp_path / "s", dies, timeout=8.0, killed=(3,))


def refuses(rank):
    t = torch.ones(4, 4, device="cuda")
    if rank == 1:
        with pytest.raises(ValueError, match="not contiguous"):
            dmuon.reduce_to_owners([t.t()[:2]], [0])
    else:
        work = dmuon.reduce_to_owners([t], [0], async_op=True)
        deadline = time.monotonic() + 40
        while not work.is_completed() and time.monotonic() < deadline:
            time.sleep(0.05)
        with pytest.raises(RuntimeError, match=r"rank 1 says.*not contiguous"):
            work.wait()
    dist.barrier()


def test_a_refusal_reaches_the_others_before_the_time_out(tmp_path):
    run_on_gpu(tmp_path / "s", refuses)
