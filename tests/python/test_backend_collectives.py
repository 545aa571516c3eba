"""The ordinary collectives of torch.distributed over the backend "dmuon"."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from checks import Checks
from ranks import run_ranks

LIMIT = 240.0  # seconds; some hundred collectives take two on a quiet machine
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


def total(dtype, n, size=6):
    stack = torch.stack([value(r, dtype, size) for r in range(n)])
    return stack.any(0) if dtype is torch.bool else stack.sum(0).to(dtype)


def one_to_all_and_back(check, group, dtype, size):
    me, n = dist.get_rank(group), dist.get_world_size(group)
    mine, values = value(me, dtype, size), [value(r, dtype, size) for r in range(n)]
    t = mine.clone()
    dist.broadcast(t, group=group, group_src=n - 1)
    check.equal(f"broadcast {dtype} {size}", t, values[n - 1])
    t = mine.clone()
    dist.reduce(t, group=group, group_dst=1)
    if me == 1:
        check.equal(f"reduce {dtype} {size}", t, total(dtype, n, size))
    gathered = [torch.empty(size, dtype=dtype) for _ in range(n)] if me == 0 else None
    dist.gather(mine, gathered, group=group, group_dst=0)
    for r in range(n if me == 0 else 0):
        check.equal(f"gather {dtype} {size}", gathered[r], values[r])
    out = torch.empty(size, dtype=dtype)
    dist.scatter(out, values if me == 0 else None, group=group, group_src=0)
    check.equal(f"scatter {dtype} {size}", out, mine)


def all_to_all(check, group, dtype, size):
    me, n = dist.get_rank(group), dist.get_world_size(group)
    mine, values = value(me, dtype, size), [value(r, dtype, size) for r in range(n)]
    t = mine.clone()
    dist.all_reduce(t, group=group)
    check.equal(f"all_reduce {dtype} {size}", t, total(dtype, n, size))
    pair = [mine.clone(), value(me + 1, dtype, 3)]
    dist.all_reduce_coalesced(pair, group=group)
    check.equal(f"all_reduce_coalesced {dtype}", pair[0], total(dtype, n, size))
    shifted = torch.stack([value(r + 1, dtype, 3) for r in range(n)])
    shifted = shifted.any(0) if dtype is torch.bool else shifted.sum(0).to(dtype)
    check.equal(f"all_reduce_coalesced {dtype}", pair[1], shifted)
    outs = [torch.empty(size, dtype=dtype) for _ in range(n)]
    dist.all_gather(outs, mine, group=group)
    for r in range(n):
        check.equal(f"all_gather {dtype} {size}", outs[r], values[r])
    out = torch.empty(size * n, dtype=dtype)
    dist.all_gather_into_tensor(out, mine, group=group)
    check.equal(f"all_gather_into_tensor {dtype} {size}", out, torch.cat(values))
    out = torch.empty(size, dtype=dtype)
    dist.reduce_scatter_tensor(
        out, torch.cat([value(me + k, dtype, size) for k in range(n)]), group=group
    )
    parts = torch.stack([value(r + me, dtype, size) for r in range(n)])
    expected = parts.any(0) if dtype is torch.bool else parts.sum(0).to(dtype)
    check.equal(f"reduce_scatter_tensor {dtype} {size}", out, expected)
    # Rank r sends k + r elements to rank k.
    out = torch.empty(sum(me + r for r in range(n)), dtype=dtype)
    dist.all_to_all_single(
        out,
        value(me, dtype, sum(k + me for k in range(n))),
        output_split_sizes=[me + r for r in range(n)],
        input_split_sizes=[k + me for k in range(n)],
        group=group,
    )
    expected = []
    for r in range(n):
        begin = sum(k + r for k in range(me))
        expected.append(value(r, dtype, begin + me + r)[begin:])
    check.equal(f"all_to_all_single {dtype}", out, torch.cat(expected))
    out = torch.empty(size, dtype=dtype)
    for request in (
        dist.isend(mine, group=group, group_dst=(me + 1) % n),
        dist.irecv(out, group=group, group_src=(me - 1) % n),
    ):
        request.wait()
    check.equal(f"send and recv {dtype} {size}", out, values[(me - 1) % n])


def operations(check, group):
    me, n = dist.get_rank(group), dist.get_world_size(group)
    ranks = [float(r) for r in range(n)]
    for op, expected in (
        (dist.ReduceOp.AVG, sum(ranks) / n),
        (dist._make_nccl_premul_sum(0.5), sum(ranks) / 2),
        (dist.ReduceOp.MAX, n - 1.0),
        (dist.ReduceOp.MIN, 0.0),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            t = torch.full((3,), float(me), dtype=dtype)
            dist.all_reduce(t, op=op, group=group)
            check.equal(f"all_reduce {op}", t, torch.full((3,), expected).to(dtype))
            out = torch.empty(2, dtype=dtype)
            whole = torch.full((2 * n,), float(me), dtype=dtype)
            dist.reduce_scatter_tensor(out, whole, op=op, group=group)
            check.equal(f"reduce_scatter_tensor {op}", out, torch.full((2,), expected).to(dtype))
            t = torch.full((3,), float(me), dtype=dtype)
            dist.reduce(t, op=op, group=group, group_dst=0)
            if me == 0:
                check.equal(f"reduce {op}", t, torch.full((3,), expected).to(dtype))
    whole = torch.ones(2 * n, dtype=torch.int64)
    avg = dist.ReduceOp.AVG
    check.refused("AVG", "AVG", lambda: dist.all_reduce(whole, op=avg, group=group))
    check.refused(
        "AVG", "AVG", lambda: dist.reduce_scatter_tensor(whole[:2], whole, op=avg, group=group)
    )
    t = torch.full((3,), float(me + 1))
    dist.all_reduce(t, op=dist.ReduceOp.PRODUCT, group=group)
    check.equal("PRODUCT", t, torch.full((3,), float(math.factorial(n))))


def coalescing_managers(check, group):
    me, n = dist.get_rank(group), dist.get_world_size(group)
    device, everybody = torch.device("cpu"), float(sum(range(n)))
    a, b = torch.full((2,), float(me)), torch.full((3,), float(me))
    with dist._coalescing_manager(group=group, device=device):
        dist.all_reduce(a, group=group)
        dist.all_reduce(b, group=group)
    check.equal("coalesced all_reduce", torch.cat([a, b]), torch.full((5,), everybody))
    outs = [torch.empty(k) for k in (1, 4)]
    with dist._coalescing_manager(group=group, device=device, async_ops=True) as manager:
        for k, out in zip((1, 4), outs):
            dist.reduce_scatter_tensor(out, torch.arange(float(k * n)) + me, group=group)
    manager.wait()
    for k, out in zip((1, 4), outs):
        part = torch.arange(float(k * n))[me * k : (me + 1) * k]
        check.equal("coalesced reduce_scatter_tensor", out, n * part + everybody)
    outs = [torch.empty(k * n) for k in (1, 4)]
    with dist._coalescing_manager(group=group, device=device):
        for k, out in zip((1, 4), outs):
            dist.all_gather_into_tensor(out, torch.full((k,), float(me)), group=group)
    for k, out in zip((1, 4), outs):
        expected = torch.arange(float(n)).repeat_interleave(k)
        check.equal("coalesced all_gather_into_tensor", out, expected)


def functional_collectives(check, group):
    me, n = dist.get_rank(group), dist.get_world_size(group)
    mine = torch.full((2,), float(me))
    out = functional.all_reduce(mine, "avg", group)
    check.equal("functional all_reduce", functional.wait_tensor(out), torch.full((2,), (n - 1) / 2))
    out = functional.all_gather_tensor(mine, 0, group)
    expected = torch.arange(float(n)).repeat_interleave(2)
    check.equal("functional all_gather_tensor", functional.wait_tensor(out), expected)
    out = functional.reduce_scatter_tensor(torch.arange(float(n)) + me, "sum", 0, group)
    expected = torch.tensor([float(n * me + sum(range(n)))])
    check.equal("functional reduce_scatter_tensor", functional.wait_tensor(out), expected)


def objects(check, group):
    me, n = dist.get_rank(group), dist.get_world_size(group)
    everybody = [{"rank": r, "words": "x" * r} for r in range(n)]
    got = [None] * n
    dist.all_gather_object(got, everybody[me], group=group)
    check.true("all_gather_object", got == everybody)
    box = [everybody[me], me]
    dist.broadcast_object_list(box, group=group, group_src=n - 1)
    check.true("broadcast_object_list", box == [everybody[n - 1], n - 1])
    got = [None] * n if me == 0 else None
    dist.gather_object(everybody[me], got, group=group, group_dst=0)
    check.true("gather_object", got == (everybody if me == 0 else None))
    box = [None]
    dist.scatter_object_list(box, everybody if me == 0 else None, group=group, group_src=0)
    check.true("scatter_object_list", box == [everybody[me]])


def strided_inputs(check, group):
    me, n = dist.get_rank(group), dist.get_world_size(group)
    base = torch.arange(24.0).reshape(4, 6)
    views = {
        "transpose": lambda t: t.t(),
        "columns": lambda t: t[:, 1:4],
        "every second": lambda t: t[1::2, ::2],
        "offset": lambda t: t[2:],
    }
    for name, view in views.items():
        expected = view(n * base + sum(range(n)))
        whole = base + me
        dist.all_reduce(view(whole), group=group)
        check.true(f"all_reduce {name}", torch.equal(view(whole), expected))
        view(whole).copy_(view(base + me))
        check.true(f"around {name}", torch.equal(whole, base + me))  # nothing else was written
        whole = base + me
        dist.broadcast(view(whole), group=group, group_src=1)
        check.true(f"broadcast {name}", torch.equal(view(whole), view(base + 1)))
        outs = [view(torch.zeros(4, 6)) for _ in range(n)]
        dist.all_gather(outs, view(base + me), group=group)
        for r in range(n):
            check.true(f"all_gather {name}", torch.equal(outs[r], view(base + r)))
    # One of a pair strided, and only on one rank.
    out = torch.empty(4, 6 * n).t() if me == 0 else torch.empty(6 * n, 4)
    dist.all_gather_into_tensor(out, (base + me).t(), group=group)
    check.true("into strided", torch.equal(out, torch.cat([(base + r).t() for r in range(n)])))
    out = torch.empty(2, 12)[:, ::2]
    whole = torch.cat([base[:2] + k for k in range(n)]).t().contiguous().t() + me
    dist.reduce_scatter_tensor(out, whole, group=group)
    expected = n * (base[:2] + me) + sum(range(n))
    check.true("reduce_scatter_tensor strided", torch.equal(out, expected))
    overlapping = torch.zeros(1).expand(5)
    check.refused(
        "overlapping",
        "share one place in memory",
        lambda: dist.broadcast(overlapping, group=group, group_src=0),
    )


ALL = (operations, coalescing_managers, functional_collectives, objects, strided_inputs)


def standard_collectives(rank, kind):
    """``kind``: which group. Every check runs on all its ranks in the same order."""
    if kind == "detail":
        dist.set_debug_level(dist.DebugLevel.DETAIL)  # as TORCH_DISTRIBUTED_DEBUG does
    group = {
        "world": lambda: dist.group.WORLD,
        "sub-group": lambda: dist.new_group([0, 2, 3]),
        "detail": lambda: dist.new_group([0, 1, 2, 3]),
    }[kind]()
    check = Checks(f"{kind}, rank {rank}")
    if kind == "sub-group" and rank == 1:
        return check.bad
    wrapped = type(group._get_backend(torch.device("cpu"))).__name__ == "_ProcessGroupWrapper"
    check.true("wrapped", wrapped == (kind == "detail"))
    warnings.simplefilter("ignore", FutureWarning)  # what is deprecated must work while it is there
    for dtype in DTYPES:
        for size in (6, 0) if dtype in (torch.float32, torch.int64) else (6,):
            one_to_all_and_back(check, group, dtype, size)
            all_to_all(check, group, dtype, size)
    for part in ALL:
        part(check, group)
    dist.barrier(group=group)
    return check.bad


@pytest.mark.parametrize("kind", ["world", "sub-group", "detail"])
def test_standard_collectives(transport, kind):
    for bad in run_ranks(4, standard_collectives, kind, limit=LIMIT):
        assert bad == []
