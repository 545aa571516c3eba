"""A checkpoint of any layout goes on bit for bit in any other."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_model import build, different, everything, outputs, train
from ranks import run_ranks
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

# name -> (ranks, name in models.LAYOUTS)
LAYOUTS = {
    "one process": (1, None),
    "(4)": (4, "(4)"),
    "(2,2)": (4, "(2,2)"),
    "(4,1)": (4, "(4,1)"),
    "(1,3)": (3, "(1,3)"),
    "ddp 2": (2, "ddp 2"),
}
HALVES = (1,)  # the block in bf16, with an fp32 master


def on(ranks):
    return [name for name, (count, _) in LAYOUTS.items() if count == ranks]


def backend(ranks):
    return "dmuon" if ranks > 1 else None


def state_of(model, optimizer):
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))


def save(rank, ranks, folder):
    """For every layout of so many ranks: saves after 5 steps; all values then, and after 10."""
    results = {}
    for name in on(ranks):
        called, model, optimizer = build(LAYOUTS[name][1], halves=HALVES)
        train(called, optimizer, range(5), rank, ranks)
        dcp.save(state_of(model, optimizer), checkpoint_id=f"{folder}/{name}")
        half, seen = everything(model, optimizer), outputs(called)
        train(called, optimizer, range(5, 10), rank, ranks)
        results[name] = half, seen, everything(model, optimizer)
    return results


def load(rank, ranks, folder):
    """Every checkpoint into every layout of so many ranks: values after the load and 5 steps on."""
    results = {}
    for name in on(ranks):
        for source in LAYOUTS:
            called, model, optimizer = build(LAYOUTS[name][1], seed=1, halves=HALVES)
            state = state_of(model, optimizer)
            dcp.load(state, checkpoint_id=f"{folder}/{source}")
            set_state_dict(
                model,
                optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
            loaded, seen = everything(model, optimizer), outputs(called)
            train(called, optimizer, range(5, 10), rank, ranks)
            results[source, name] = loaded, seen, everything(model, optimizer)
    return results


def check(got, expected, exactly, where):
    """Bits; of what AdamW has updated only if ``exactly``: torch's kernel rounds an element by its
    place in the shard."""
    for name in different(got, expected):
        assert name in got and name in expected, (where, name)
        of_muon = "up_proj.weight" in name
        assert not (exactly or of_muon), (where, name)
        assert torch.allclose(got[name], expected[name], rtol=1e-5, atol=1e-6), (where, name)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of the checkpoints, and what ``save`` gave for each layout."""
    folder, found = tmp_path_factory.mktemp("checkpoints"), {}
    for ranks in (1, 2, 3, 4):
        results = run_ranks(ranks, save, ranks, str(folder), backend=backend(ranks))
        for name in on(ranks):
            for result in results[1:]:
                assert different(results[0][name][0], result[name][0]) == [], name
            found[name] = results[0][name]
    return folder, found


def test_every_layout_has_the_same_bits_to_save(saved):
    one = saved[1]["one process"]
    for name, (half, _, end) in saved[1].items():
        check(half, one[0], False, name)
        check(end, one[2], False, name)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_five_steps_save_load_and_five_are_ten_straight_ones_from_any_layout(ranks, saved):
    folder, found = saved
    results = run_ranks(ranks, load, ranks, str(folder), backend=backend(ranks))
    assert set(results[0]) == {(source, target) for source in LAYOUTS for target in on(ranks)}
    for result in results:
        for (source, target), (loaded, seen, final) in result.items():
            half, half_seen, end = found[source]
            assert different(loaded, half) == [], (source, target)
            assert torch.allclose(seen, half_seen, rtol=1e-5, atol=1e-5), (source, target)
            check(final, end, source == target, (source, target))
