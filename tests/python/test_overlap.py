"""Weights that come ahead of their use, and updates published under what comes next: the same bits
as without, and no more traffic."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from models import Block, Net, distribute, full_weights
from ranks import run_ranks

import dmuon

STEPS = 20
SHARDED = ("(4)", "(2,2)")


class Skipping(nn.Module):
    """Blocks of which some are left out now and then, on all ranks alike."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block(rows, 6) for rows in (8, 5, 12, 7))
        self.skipped: set[int] = set()
        self.watch = None

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            if i not in self.skipped:
                x = layer(x)
                if self.watch:
                    self.watch()
        return x


def data(step, rank, width):
    g = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, width, generator=g)


def train(rank, layout, reshard, prefetch, replicate_async):
    """20 steps with accumulation, evaluations, and a change of the weights from outside."""
    torch.manual_seed(0)
    model, _ = distribute(Net(), layout, reshard_after_forward=reshard, prefetch=prefetch)
    inner = getattr(model, "module", model)
    optimizer = dmuon.Muon(inner, lr=0.02, adamw_lr=3e-3, replicate_async=replicate_async)
    losses = []
    for step in range(STEPS):
        if step % 5 == 3:
            with dmuon.no_sync(model):
                model(data(step, rank + 10, 4)).pow(2).mean().backward()
        loss = model(data(step, rank, 4)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 4 == 1:
            with torch.no_grad():
                losses.append(model(data(step, rank + 20, 4)).sum().item())
        if step == 10:
            with torch.no_grad():
                inner.layers[1].up_proj.weight.mul_(0.5)
    stats = dmuon.stats(inner)
    counts = [(u.unshards, u.reduces, u.publishes, u.published_parameters) for u in stats.units]
    return losses, full_weights(model), counts, sum(u.prefetches for u in stats.units), stats.bytes


def all_ways(rank, layout):
    """Every setting against none of it; returns what differs, and the prefetches by depth."""
    differ, prefetches = [], {}
    for reshard in (True, False):
        losses, weights, counts, none, sent = train(rank, layout, reshard, 0, False)
        assert none == 0
        depths = (0, 1, 3) if layout in SHARDED else (1,)
        for prefetch, later in list(itertools.product(depths, (False, True)))[1:]:
            way = train(rank, layout, reshard, prefetch, later)
            prefetches[reshard, prefetch] = way[3]
            same = way[0] == losses and all(torch.equal(way[1][n], weights[n]) for n in weights)
            if not same or way[2] != counts or way[4] != sent:
                differ.append((reshard, prefetch, later, same, way[2:], counts, sent))
    return differ, prefetches


@pytest.mark.parametrize("layout", ["(4)", "(2,2)", "(4,1)", "ddp"])
def test_prefetch_and_async_publish_change_no_bit_and_no_byte(transport, layout):
    for differ, prefetches in run_ranks(4, all_ways, layout, limit=180):
        assert differ == []
        for (_, depth), count in prefetches.items():
            assert (count > 0) == (depth > 0 and layout in SHARDED)


def prefetches_by_direction(rank):
    model, _ = distribute(Net(), "(4)", prefetch=1)
    optimizer = dmuon.Muon(model, lr=0.02)
    seen = []
    for step in range(3):
        loss = model(data(step, rank, 4)).pow(2).mean()
        forward = sum(u.prefetches for u in dmuon.stats(model).units)
        loss.backward()
        backward = sum(u.prefetches for u in dmuon.stats(model).units) - forward
        optimizer.step()
        optimizer.zero_grad()
        seen.append((forward - sum(sum(s) for s in seen), backward))
    return seen


def test_every_unit_but_the_first_comes_ahead_from_the_second_pass_on():
    assert run_ranks(4, prefetches_by_direction) == [[(0, 0), (2, 2), (2, 2)]] * 4


def skip_layers(rank, prefetch):
    torch.manual_seed(0)
    model, _ = distribute(Skipping(), "(2,2)", prefetch=prefetch)
    optimizer = dmuon.Muon(model, lr=0.02)
    runtime = model.__dict__["_dmuon_runtimes"][0]
    runtime.bind()
    units = [unit.core for unit in runtime.units]
    most = 0

    def watch():
        nonlocal most
        most = max(most, sum(unit.unsharded for unit in units))

    model.watch = watch
    losses, left = [], 0
    for step in range(12):
        model.skipped = {step % 4} if step % 3 else set()
        loss = model(data(step, rank, 6)).pow(2).mean()
        left += sum(unit.unsharded for unit in units)
        loss.backward()
        left += sum(unit.unsharded for unit in units)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        model.skipped = {3}
        with torch.no_grad():
            losses.append(model(data(step, rank, 6)).sum().item())
        left += sum(unit.unsharded for unit in units)
    return losses, full_weights(model), most, left


def skip_both_ways(rank):
    losses, weights, most, left = skip_layers(rank, 0)
    ahead_losses, ahead_weights, ahead_most, ahead_left = skip_layers(rank, 1)
    same = losses == ahead_losses and all(
        torch.equal(weights[n], ahead_weights[n]) for n in weights
    )
    return same, most, left, ahead_most, ahead_left


def test_weights_brought_for_nothing_are_freed_and_two_units_live_at_most():
    # Watched after a block's forward, when its own weights are freed already.
    for same, most, left, ahead_most, ahead_left in run_ranks(4, skip_both_ways):
        assert same
        assert (most, left) == (0, 0)
        assert (ahead_most, ahead_left) == (1, 0)


def forward_without_any_unit(rank):
    model, _ = distribute(Skipping(), "(4)")
    model.skipped = {0, 1, 2, 3}
    x = data(0, rank, 6).requires_grad_()
    y = model(x) * 1  # before the optimizer, and before any unit's first forward
    y.sum().backward()
    first = torch.equal(y, x) and torch.equal(x.grad, torch.ones_like(x))
    model.skipped = set()
    model(x).pow(2).mean().backward()
    return first


def test_a_first_forward_may_use_no_unit_at_all():
    assert run_ranks(4, forward_without_any_unit) == [True] * 4


def step_without_the_others(rank):
    model, _ = distribute(Net(), "(4,1)")
    optimizer = dmuon.Muon(model, lr=0.02, nonfinite="ignore")  # nothing to agree on
    store = dist.distributed_c10d._get_default_store()
    model(data(0, rank, 4)).pow(2).mean().backward()
    before = {name: weight.clone() for name, weight in full_weights(model).items()}
    # Each rank steps when the one before it has: a step that waited for the others' updates would
    # never end.
    if rank > 0:
        store.wait([f"stepped {rank - 1}"])
    optimizer.step()
    store.set(f"stepped {rank}", "")
    after = full_weights(model)  # who reads waits
    expected = model(data(1, rank, 4)).detach()
    with torch.no_grad():
        plain = Net()
        for name, parameter in plain.named_parameters():
            parameter.copy_(after[name])
        right = torch.allclose(plain(data(1, rank, 4)), expected, atol=1e-6)
    changed = all(not torch.equal(before[n], after[n]) for n in before if "layers" in n)
    return right, changed


def test_a_step_does_not_wait_for_the_updates_of_others():
    assert run_ranks(4, step_without_the_others) == [(True, True)] * 4


def refuse(rank):
    errors = []
    for value in (-1, True, 1.5, "2"):
        try:
            dmuon.dedicate_params(
                Net(), torch.distributed.init_device_mesh("cpu", (1,)), prefetch=value
            )
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_a_prefetch_that_is_no_number_of_units_is_refused():
    (errors,) = run_ranks(1, refuse)
    assert len(errors) == 4
    for error, value in zip(errors, ("-1", "True", "1.5", "'2'")):
        assert f"prefetch must be a number of units from 0 on, got {value}" in error
