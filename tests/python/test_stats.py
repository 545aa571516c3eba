"""dmuon.stats between two moments and per step: bytes, dtypes, waits and what was hidden."""

from __future__ import annotations

import time

import pytest
import torch
from models import Net, distribute, make_mesh
from ranks import run_ranks
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import dmuon


def data(step, rank):
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def train(rank, steps_before, steps):
    torch.manual_seed(0)
    model, plan = distribute(Net(), "(2,2)")
    optimizer = dmuon.Muon(model, lr=0.02)

    def run(count):
        for step in range(count):
            model(data(step, rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    unused = dmuon.stats(model)
    run(steps_before)
    before = dmuon.stats(model)
    run(steps)
    after = dmuon.stats(model)
    return (
        unused,
        before,
        after,
        dmuon.step_traffic(plan, model.layers[0].up_proj.weight._view.slot),
    )


def test_stats_between_two_moments_are_those_of_the_steps_between():
    for unused, before, after, formula in run_ranks(4, train, 1, 4):
        assert (unused.steps, before.steps, after.steps) == (0, 1, 5)
        between = after - before
        each = between.per_step()
        assert between.steps == 4 and each.steps == 1
        assert {k: (c["bytes_sent"], c["bytes_received"]) for k, c in each.bytes.items()} == {
            **dict.fromkeys(each.bytes, (0, 0)),
            **formula,
        }
        assert each.orthogonalizations == after.owned
        assert sum(u.orthogonalizations for u in each.units) == after.owned
        for unit, whole, first in zip(each.units, after.units, before.units):
            assert (unit.unshards, unit.reduces, unit.publishes) == (2, 1, 1)
            assert unit.unshard_wait_s * 4 == pytest.approx(
                whole.unshard_wait_s - first.unshard_wait_s
            )
            for operation in ("unshard", "publish", "reduce"):
                assert 0 <= unit.hidden(operation) <= 1
                assert unit.in_flight_s[operation] < 60
        # Everything that moved belongs to a unit.
        for operation, keys in {
            "unshard": ["unshard/shard"],
            "reduce": ["reduce/shard", "reduce/replicate"],
            "publish": ["publish/replicate"],
        }.items():
            for k, way in enumerate(("bytes_sent", "bytes_received")):
                units = sum(u.bytes[operation]["float32"][k] for u in between.units)
                assert units == sum(between.bytes[key][way] for key in keys)
        assert (after - unused).units == after.units
        assert after.imbalance == max(after.balance) and sum(after.balance) == pytest.approx(4)
        for text in ("hidden: unshard", "steps 1,", "reduce/replicate"):
            assert text in str(each)
        with pytest.raises(ValueError, match="over 0 steps"):
            (after - after).per_step()


def by_dtype(rank):
    """Blocks of bf16 compute and fp32 sums in one model with a block of fp32."""
    model, mesh = Net(), make_mesh("(2,2)")
    dmuon.dedicate_params(model, mesh)
    half = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    for i, layer in enumerate(model.layers):
        fully_shard(layer, mesh=mesh, **({} if i == 1 else {"mp_policy": half}))
    fully_shard(model, mesh=mesh)
    model(data(0, rank)).square().mean().backward()
    dmuon.Muon(model, lr=0.02).step()
    return [{op: set(t) for op, t in u.bytes.items()} for u in dmuon.stats(model).units]


def test_bytes_are_told_apart_by_dtype():
    half = {"unshard": {"bfloat16"}, "reduce": {"float32"}, "publish": {"bfloat16"}}
    full = {operation: {"float32"} for operation in half}
    assert run_ranks(4, by_dtype) == [[half, full, half]] * 4


def late(rank):
    """Rank 1 comes late to the forward: the others wait for the weights, and nothing is hidden."""
    model = Net()
    dmuon.dedicate_params(model, make_mesh("(4)"), prefetch=0)
    model(data(0, rank))
    before = dmuon.stats(model)
    torch.distributed.barrier()
    if rank == 1:
        time.sleep(0.5)
    model(data(1, rank))
    return (dmuon.stats(model) - before).units[0]


def test_a_wait_for_a_late_rank_is_counted_and_not_hidden():
    for rank, unit in enumerate(run_ranks(4, late)):
        if rank != 1:
            assert unit.in_flight_s["unshard"] > 0.2 and unit.unshard_wait_s > 0.2
            assert unit.hidden("unshard") < 0.5
        assert unit.hidden("reduce") is None
        with pytest.raises(ValueError, match="got 'step'"):
            unit.hidden("step")


def other_model(rank):
    model, _ = distribute(Net(), "(4)")
    other, _ = distribute(Net(shapes=((8, 6),)), "(4)")
    for used in (model, other):
        used(torch.zeros(1, 4))
    with pytest.raises(ValueError, match="stats of different models"):
        dmuon.stats(model) - dmuon.stats(other)


def test_stats_of_different_models_have_no_difference():
    run_ranks(4, other_model)
