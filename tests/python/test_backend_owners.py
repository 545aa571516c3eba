"""Owner collectives from Python, on every transport."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from checks import Checks
from ranks import run_ranks
from transports import transport_of

import dmuon

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def part(rank, i, dtype, size):
    """Tensor i of a rank: small whole numbers, so that every sum is exact in every dtype."""
    return ((torch.arange(size) + 3 * rank + 5 * i) % 7).to(dtype)


def every_dtype(rank, kind):
    if kind == "detail":
        dist.set_debug_level(dist.DebugLevel.DETAIL)  # as TORCH_DISTRIBUTED_DEBUG does
    ranks = [0, 2, 3] if kind == "sub-group" else [0, 1, 2, 3]
    group = dist.group.WORLD if kind == "world" else dist.new_group(ranks)
    check = Checks(f"{kind}, rank {rank}")
    if rank not in ranks:
        return check.bad, None
    wrapped = type(group._get_backend(torch.device("cpu"))).__name__ == "_ProcessGroupWrapper"
    check.true("wrapped", wrapped == (kind == "detail"))
    me, n = dist.get_rank(group), dist.get_world_size(group)
    sizes, owners = (0, 1, 5, 1000, 70_000, 3), (1, 0, 2, 2, 2, 1)
    for dtype in FLOATS:
        mine = [part(me, i, dtype, size) for i, size in enumerate(sizes)]
        sums = [sum(part(r, i, torch.float64, k) for r in range(n)) for i, k in enumerate(sizes)]
        for op, divisor in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, n)):
            tensors = [t.clone() for t in mine]
            dmuon.reduce_to_owners(tensors, owners, group=group, op=op)
            for i, owner in enumerate(owners):
                expected = (sums[i] / divisor).to(dtype) if owner == me else mine[i]
                check.equal(f"reduce {op} {dtype} {i}", tensors[i], expected)
    for dtype in (torch.int64, torch.bool, torch.uint8, torch.complex64, *FLOATS):
        tensors = [part(me, i, dtype, size) for i, size in enumerate(sizes)]
        dmuon.broadcast_from_owners(tensors, owners, group=group)
        for i, owner in enumerate(owners):
            check.equal(f"broadcast {dtype} {i}", tensors[i], part(owner, i, dtype, sizes[i]))
    mixed = [part(me, i, dtype, 9) for i, dtype in enumerate(FLOATS)]
    dmuon.reduce_to_owners(mixed, [0, 0, 2, 1], group=group, op=dist.ReduceOp.SUM)
    for i, (dtype, owner) in enumerate(zip(FLOATS, [0, 0, 2, 1])):
        if owner == me:
            expected = sum(part(r, i, torch.float64, 9) for r in range(n)).to(dtype)
            check.equal(f"mixed {dtype}", mixed[i], expected)
    dmuon.reduce_to_owners([], [], group=group)
    matrix = part(me, 0, torch.float32, 12).reshape(3, 4)
    check.refused(
        "transpose", "contiguous", lambda: dmuon.reduce_to_owners([matrix.t()], [0], group=group)
    )
    offset = [part(me, 0, torch.float32, 12).reshape(3, 4)[1:]]  # contiguous, inside a larger one
    dmuon.broadcast_from_owners(offset, [1], group=group)
    check.equal("offset", offset[0], part(1, 0, torch.float32, 12).reshape(3, 4)[1:])
    return check.bad, transport_of(group)


@pytest.mark.parametrize("kind", ["world", "sub-group", "detail"])
def test_every_dtype_owner_and_size(transport, kind):
    for rank, (bad, used) in enumerate(run_ranks(4, every_dtype, kind)):
        assert bad == []
        assert used == (None if kind == "sub-group" and rank == 1 else transport)


def in_flight(rank):
    """Fifty operations before the first is waited for."""
    check = Checks(f"rank {rank}")
    started = []
    for i in range(50):
        t = [torch.full((1 + 37 * i,), float(rank + i))]
        if i % 3:
            work = dmuon.reduce_to_owners(t, [i % 4], op=dist.ReduceOp.SUM, async_op=True)
        else:
            work = dmuon.broadcast_from_owners(t, [i % 4], async_op=True)
        started.append((work, t[0]))
    for i, (work, t) in reversed(list(enumerate(started))):
        work.wait()
        expected = rank + i
        if i % 3 == 0:
            expected = i % 4 + i
        elif i % 4 == rank:
            expected = 6 + 4 * i
        check.equal(f"operation {i}", t, torch.full_like(t, float(expected)))
    return check.bad


def test_many_operations_in_flight(transport):
    for bad in run_ranks(4, in_flight):
        assert bad == []


def many_groups(rank):
    """First use of five groups, in another order on each rank, nothing waited for in between."""
    groups = {"world": [0, 1, 2, 3], "row0": [0, 1], "row1": [2, 3], "col0": [0, 2], "col1": [1, 3]}
    made = {name: dist.new_group(ranks) for name, ranks in groups.items()}
    mine = [name for name, ranks in groups.items() if rank in ranks]
    mine = mine[rank % len(mine) :] + mine[: rank % len(mine)]
    if rank >= 2:
        mine.reverse()
    started = []
    for name in mine:
        owned, summed = [torch.full((1000,), 1.0 + rank)], torch.full((5,), 1.0 + rank)
        work = dmuon.reduce_to_owners(
            owned, [1], group=made[name], op=dist.ReduceOp.SUM, async_op=True
        )
        started.append((name, work, owned[0]))
        started.append((name, dist.all_reduce(summed, group=made[name], async_op=True), summed))
    check = Checks(f"rank {rank}")
    for name, work, t in started:
        work.wait()
        expected = sum(1.0 + r for r in groups[name])
        if t.numel() == 1000 and groups[name][1] != rank:
            expected = 1.0 + rank
        check.equal(name, t, torch.full_like(t, expected))
    return check.bad


def test_first_use_of_many_groups_in_another_order_on_each_rank(transport):
    for bad in run_ranks(4, many_groups, timeout=10.0):  # a deadlock would end by the time-out
        assert bad == []


def bad_owner_collectives(rank):
    cases = {
        "owner": lambda: dmuon.reduce_to_owners([torch.ones(2)], [7]),
        "dtype": lambda: dmuon.reduce_to_owners([torch.ones(2, dtype=torch.int32)], [0]),
        "strides": lambda: dmuon.broadcast_from_owners([torch.ones(4, 4).t()[1:]], [0]),
        "shapes": lambda: dmuon.reduce_to_owners([torch.ones(2 + (rank == 1))], [0]),
        "dtypes": lambda: dmuon.broadcast_from_owners(
            [torch.ones(2, dtype=torch.float64 if rank == 3 else torch.float32)], [0]
        ),
        "counts": lambda: dmuon.reduce_to_owners(
            [torch.ones(2)] * (1 + (rank == 2)), [0] * (1 + (rank == 2))
        ),
        "order": lambda: (dmuon.broadcast_from_owners if rank == 1 else dmuon.reduce_to_owners)(
            [torch.ones(2)], [0]
        ),
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


def test_bad_owner_collectives_fail_on_every_rank_with_values(transport):
    for messages, works in run_ranks(4, bad_owner_collectives):
        assert works
        assert "7" in messages["owner"] and "reduce_to_owners" in messages["owner"]
        assert "Int" in messages["dtype"] or "int" in messages["dtype"]
        assert "contiguous" in messages["strides"]
        assert "[3]" in messages["shapes"] and "[2]" in messages["shapes"]
        assert "rank 1" in messages["shapes"]
        assert "rank 3" in messages["dtypes"]
        assert "Double" in messages["dtypes"] and "Float" in messages["dtypes"]
        assert "rank 2" in messages["counts"] and "2" in messages["counts"]
        assert "rank 1" in messages["order"]
        assert (
            "broadcast_from_owners" in messages["order"] and "reduce_to_owners" in messages["order"]
        )
        assert "owner" in messages["owners"] and "2" in messages["owners"]
        assert "MAX" in messages["op"]


def mismatched(rank, what):
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = dist.new_group([0, 1, 2, 3])
    t = torch.ones(4, 2) if rank == 1 and what == "shape" else torch.ones(3, 2)
    t = t.double() if rank == 1 and what == "dtype" else t
    try:
        dist.all_reduce(t, group=group)
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("what", ["shape", "dtype"])
def test_debug_mode_names_the_rank_whose_ordinary_collective_differs(transport, what):
    for message in run_ranks(4, mismatched, what):
        assert "Rank 1" in message, message
        for word in {"shape": ("[4, 2]", "[3, 2]"), "dtype": ("Double", "Float")}[what]:
            assert word in message, message


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
        time.sleep(6)
        return "absent"
    try:
        dmuon.reduce_to_owners([torch.ones(4)], [0])
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_rank_that_does_not_take_part_is_named_within_the_time_out(transport):
    for rank, message in enumerate(run_ranks(4, absent, timeout=2.0)):
        if rank != 2:
            assert "reduce_to_owners" in message and "rank 2" in message, message
