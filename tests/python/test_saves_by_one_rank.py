"""Under DDP one rank may save alone, with ``torch.save``, as it does for any other model."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from checkpoint_model import Additive, build, different, everything, train
from checks import Checks
from models import full
from ranks import run_ranks

import dmuon

STEPS, MORE = 2, 4


def save_alone(rank, folder):
    """Rank 1 writes the weights, rank 2 the optimizer's state, while the others go on."""
    checks = Checks(rank)
    called, model, optimizer = build("ddp", halves=(1,))
    train(called, optimizer, range(STEPS), rank, 4)  # updates may still be on their way
    if rank == 1:
        torch.save(model.state_dict(), f"{folder}/weights")
        name, p = next((n, p) for n, p in model.named_parameters() if "up_proj.weight" in n)
        whole = torch.load(f"{folder}/weights", weights_only=True)[name]
        checks.equal("full_tensor on one rank", p.full_tensor(), whole)
    optimizer.consolidate_state_dict(to=2)
    if rank == 2:
        torch.save(optimizer.state_dict(), f"{folder}/state")
    else:
        refused(checks, "state of a rank that has not all", optimizer.state_dict(), folder, rank)
    saved = everything(model, optimizer)
    copied = copy.deepcopy(model.state_dict())
    train(called, optimizer, range(STEPS, MORE), rank, 4)
    refused(checks, "state of an earlier step", optimizer.state_dict(), folder, rank)
    old = {n: full(v) for n, v in copied.items() if torch.is_tensor(v)}
    checks.true("copies stay", different(old, {n: saved[n] for n in old}) == [])

    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    refused(checks, "weights that were changed since", model.state_dict(), folder, rank)
    return checks.bad, saved, everything(model, optimizer)


def refused(checks, what, state, folder, rank):
    checks.refused(
        what, "rests on its owner alone cannot be", lambda: torch.save(state, f"{folder}/{rank}")
    )


def test_one_rank_saves_alone_and_one_process_goes_on(tmp_path):
    results = run_ranks(4, save_alone, str(tmp_path))
    weights = torch.load(tmp_path / "weights", weights_only=True)
    state = torch.load(tmp_path / "state", weights_only=True)
    model = Additive(halves=(1,))
    model.load_state_dict(weights)
    optimizer = dmuon.Muon(model, lr=0.02, weight_decay=0.1, adamw_lr=3e-3)
    optimizer.load_state_dict(state)
    loaded = everything(model, optimizer)
    train(model, optimizer, range(STEPS, MORE), 0, 1)
    end = everything(model, optimizer)
    counters = {n for n in end if n == "seen"}
    for bad, saved, after in results:
        assert bad == []
        assert different(loaded, saved) == []
        for name in set(end) - counters:
            twice = 2 if ":" not in name else 1
            assert torch.equal(after[name], twice * end[name]), name


def not_under_fsdp(rank):
    checks = Checks(rank)
    called, model, optimizer = build("(2,2)")
    train(called, optimizer, range(1), rank, 4)
    message = "consolidate_state_dict is for DDP"
    checks.refused("sharded", message, optimizer.consolidate_state_dict)
    p = next(p for p in model.parameters() if isinstance(p, dmuon.OwnedTensor))
    checks.refused("storage", "cannot give its storage away", p.untyped_storage)
    checks.refused("pickle", "cannot be pickled", lambda: copy.copy(p))
    called, model, optimizer = build("ddp")
    checks.refused("no such rank", "got 4", lambda: optimizer.consolidate_state_dict(to=4))
    dist.barrier()
    return checks.bad


def test_what_no_rank_has_whole_is_refused():
    assert run_ranks(4, not_under_fsdp) == [[]] * 4


@pytest.mark.parametrize("layout", ["(2,2)", "(4,1)"])
def test_a_whole_tensor_is_brought_where_ranks_hold_parts(layout):
    """With fully_shard: on (4, 1) every rank has the weights as well."""
    expected = run_ranks(1, one_process)[0]
    for got in run_ranks(4, whole_tensors, layout):
        assert different(got, expected) == []


def one_process(rank):
    called, model, optimizer = build(None)
    train(called, optimizer, range(STEPS), 0, 1)
    return matrices(model)


def whole_tensors(rank, layout):
    called, model, optimizer = build(layout)
    train(called, optimizer, range(STEPS), rank, 4)
    return matrices(model)


def matrices(model):
    return {n: full(p) for n, p in model.named_parameters() if "up_proj.weight" in n}
