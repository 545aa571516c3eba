"""Stock state dicts and checkpoints of dedicated models: complete, exact, safe, undisturbed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_model import (
    Additive,
    Reordered,
    backward,
    batch,
    build,
    different,
    everything,
    outputs,
    train,
)
from checks import Checks
from models import distribute, full, make_mesh
from ranks import run_ranks
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dmuon

LAYOUTS = ["(2,2)", "ddp"]
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def full_state(rank, layout, folder):
    """Saved as one file from rank 0, loaded by rank 0 and sent from there."""
    checks = Checks((layout, rank))
    called, model, optimizer = build(layout, halves=(1,))
    train(called, optimizer, range(3), rank, 4)
    before = everything(model, optimizer)
    weights, state = get_state_dict(model, optimizer, options=FULL)
    path = f"{folder}/{layout}"
    if rank == 0:
        checks.true("keys", list(weights) == list(Additive().state_dict()))
        checks.true("names", set(state["state"]) == {n for n, _ in model.named_parameters()})
        checks.true("plain", not any(isinstance(v, DTensor) for v in weights.values()))
        flat = {f"{n}:{k}": v for n, values in state["state"].items() for k, v in values.items()}
        checks.true("values", different({**weights, **flat}, before) == [])
        torch.save((weights, state), path)
    else:
        checks.true("nothing", weights == {} and state == {})

    called, other, other_optimizer = build(layout, seed=1, halves=(1,))
    train(called, other_optimizer, range(7, 8), rank, 4)
    weights, state = torch.load(path, weights_only=True) if rank == 0 else ({}, {})
    set_model_state_dict(other, weights, options=BROADCAST)
    set_optimizer_state_dict(other, other_optimizer, state, options=BROADCAST)
    checks.true("loaded", different(everything(other, other_optimizer), before) == [])
    called, other, other_optimizer = build(layout, seed=2, halves=(1,))
    weights, state = torch.load(path, weights_only=True)  # everyone reads it
    options = StateDictOptions(full_state_dict=True)
    set_state_dict(
        other,
        other_optimizer,
        model_state_dict=weights,
        optim_state_dict=state,
        options=options,
    )
    checks.true("read by all", different(everything(other, other_optimizer), before) == [])
    return checks.bad


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_full_state_is_one_safe_file_that_any_rank_can_send(layout, tmp_path):
    assert run_ranks(4, full_state, layout, str(tmp_path)) == [[]] * 4


def untouched(rank, layout):
    checks = Checks((layout, rank))
    called, model, optimizer = build(layout, halves=(1,))
    straight, straight_model, straight_optimizer = build(layout, halves=(1,))
    names = {n for n, _ in model.named_parameters()}
    before = everything(model, optimizer)
    for _ in range(2):
        state = get_optimizer_state_dict(model, optimizer)
        checks.true("names", set(state["state"]) == names)
        checks.true("steps", all(s.get("step", 0) == 0 for s in state["state"].values()))
    keys = {n: sorted(s) for n, s in state["state"].items()}
    everyone = [None] * 4
    dist.all_gather_object(everyone, keys)
    checks.true("the same on all ranks", all(k == keys for k in everyone))
    checks.true("unchanged", different(everything(model, optimizer), before) == [])
    checks.true("no gradients", all(p.grad is None for p in model.parameters()))
    train(called, optimizer, range(2), rank, 4)
    get_state_dict(model, optimizer)
    train(called, optimizer, range(2, 4), rank, 4)
    train(straight, straight_optimizer, range(4), rank, 4)
    after = everything(straight_model, straight_optimizer)
    checks.true("the run", different(everything(model, optimizer), after) == [])
    return checks.bad


@pytest.mark.parametrize("layout", LAYOUTS)
def test_asking_for_the_state_changes_neither_values_nor_the_run(layout):
    assert run_ranks(4, untouched, layout) == [[]] * 4


def one_rank_alone(rank, layout, folder):
    checks = Checks((layout, rank))
    called, model, optimizer = build(layout)
    train(called, optimizer, range(1), rank, 4)
    for name, thing in (("optimizer", optimizer), ("model", model)):
        if name == "model" and layout == "ddp":
            continue  # every rank has all of it; see test_saves_by_one_rank.py
        checks.refused(
            name, "full_state_dict", lambda t=thing: torch.save(t.state_dict(), f"{folder}/{rank}")
        )
    return checks.bad


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_state_that_is_right_on_its_owners_only_cannot_be_saved_by_one_rank(layout, tmp_path):
    assert run_ranks(4, one_rank_alone, layout, str(tmp_path)) == [[]] * 4


def keys(rank, layout):
    checks = Checks((layout, rank))
    called, model, optimizer = build(layout)
    plain = Additive()
    checks.true("state_dict", list(model.state_dict()) == list(plain.state_dict()))
    checks.true("get", list(get_model_state_dict(called)) == list(plain.state_dict()))
    weights = dict(get_model_state_dict(model))
    removed = weights.pop("layers.1.up_proj.weight")
    weights["layers.9.up_proj.weight"] = removed
    words = ("layers.1.up_proj.weight", "layers.9.up_proj.weight")
    for word in words:
        checks.refused("stock " + word, word, lambda: model.load_state_dict(weights))
        checks.refused("set " + word, word, lambda: set_model_state_dict(model, weights))
    found = model.load_state_dict(weights, strict=False)
    checks.true("missing", found.missing_keys == [words[0]])
    checks.true("unexpected", found.unexpected_keys == [words[1]])
    state = get_optimizer_state_dict(model, optimizer)
    del state["state"]["layers.1.up_proj.weight"]
    checks.refused("optimizer", words[0], lambda: set_optimizer_state_dict(model, optimizer, state))
    return checks.bad


@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_are_the_plain_models_and_missing_and_unexpected_ones_are_named(layout):
    assert run_ranks(4, keys, layout) == [[]] * 4


def asynchronous(rank, ranks, layout, folder, kind):
    checks = Checks((layout, rank))
    called, model, optimizer = build(layout, halves=(1,))
    group = dist.new_group(backend="dmuon")
    train(called, optimizer, range(2), rank, ranks)
    before, seen = everything(model, optimizer), outputs(called)
    saving = dcp.async_save(
        state_of(model, optimizer),
        checkpoint_id=folder,
        process_group=group,
        async_checkpointer_type=kind,
    )
    train(called, optimizer, range(2, 4), rank, ranks)
    saving.result()
    checks.true("trained on", different(everything(model, optimizer), before) != [])
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    load_state(model, optimizer, state)
    # The updates of the last step may still be on their way to the replicas.
    checks.true("values of the call", different(everything(model, optimizer), before) == [])
    checks.equal("everywhere", outputs(called), seen)
    return checks.bad


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_asynchronous_save_holds_the_values_of_its_call(layout, tmp_path):
    kind = AsyncCheckpointerType.THREAD
    assert run_ranks(4, asynchronous, 4, layout, str(tmp_path), kind) == [[]] * 4


def test_other_processes_may_write_an_asynchronous_save(tmp_path, monkeypatch):
    package = str(Path(dmuon.__file__).parents[1])  # for processes that are spawned
    monkeypatch.setenv("PYTHONPATH", package)
    kind = AsyncCheckpointerType.PROCESS
    assert run_ranks(2, asynchronous, 2, "(2)", str(tmp_path), kind) == [[]] * 2


def before_a_step(rank, layout):
    """bf16 weights that came after the optimizer was built, saved before it has updated them."""
    checks = Checks((layout, rank))
    given = {n: v + 1 for n, v in Additive(halves=(1,)).state_dict().items()}
    _, model, optimizer = build(layout, halves=(1,))
    set_model_state_dict(model, dict(given), options=StateDictOptions(full_state_dict=True))
    weights, state = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    name = "layers.1.up_proj.weight"
    checks.equal("master", full(state["state"][name]["master"]), given[name].float())

    called, other, second = build(layout, seed=1, halves=(1,))
    set_model_state_dict(other, weights)
    set_optimizer_state_dict(other, second, state)
    train(called, second, range(1), rank, 2)
    change = (full(other.layers[1].up_proj.weight) - given[name]).abs().max()
    checks.true("one step from them", change < 0.1)
    return checks.bad


@pytest.mark.parametrize("layout", ["(2)", "ddp 2"])
def test_masters_are_saved_as_those_of_the_weights_that_were_loaded(layout):
    assert run_ranks(2, before_a_step, layout) == [[]] * 2


def wider(rank, layout):
    """The state of bf16 parameters for fp32 ones."""
    checks = Checks((layout, rank))
    called, model, optimizer = build(layout, halves=(1,))
    train(called, optimizer, range(2), rank, 2)
    whole = StateDictOptions(full_state_dict=True)
    weights, state = get_state_dict(model, optimizer, options=whole)
    called, other, second = build(layout, seed=1)
    set_state_dict(other, second, model_state_dict=weights, optim_state_dict=state, options=whole)
    master = second.state[other.layers[1].up_proj.weight]["master"]
    checks.true("on its owner alone", isinstance(master, dmuon.OwnedTensor))
    checks.equal(
        "exact", full(master), full(optimizer.state[model.layers[1].up_proj.weight]["master"])
    )
    train(called, second, range(2, 3), rank, 2)
    return checks.bad


@pytest.mark.parametrize("layout", ["(2)", "ddp 2"])
def test_masters_go_to_their_owners_also_in_an_fp32_model(layout):
    assert run_ranks(2, wider, layout) == [[]] * 2


def accumulating(rank, layout, folder):
    """Saves between the micro-batches of a step."""
    checks = Checks((layout, rank))
    called, model, optimizer = build(layout)
    train(called, optimizer, range(2), rank, 4)
    before = everything(model, optimizer)
    backward(called, 2, rank, 4)
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    backward(called, 3, rank, 4)
    optimizer.step()
    end = everything(model, optimizer)

    called, model, optimizer = build(layout, seed=1)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    load_state(model, optimizer, state)
    after = everything(model, optimizer)
    checks.true("of the last step", different(after, before) == ["seen"])  # by the forward
    model.seen -= 1
    backward(called, 2, rank, 4)
    backward(called, 3, rank, 4)
    optimizer.step()
    checks.true("the step again", different(everything(model, optimizer), end) == [])
    return checks.bad


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_save_while_gradients_accumulate_is_the_state_of_the_last_step(layout, tmp_path):
    assert run_ranks(4, accumulating, layout, str(tmp_path)) == [[]] * 4


def in_place(rank, layout, folder):
    """``dcp.load`` and writes into a state dict, whose tensors are the model's own."""
    checks = Checks((layout, rank))
    called, model, optimizer = build(layout, halves=(1,))
    train(called, optimizer, range(2), rank, 4)
    before, seen = everything(model, optimizer), outputs(called)
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    train(called, optimizer, range(2, 4), rank, 4)
    outputs(called)  # nothing is on its way
    dcp.load(state_of(model, optimizer), checkpoint_id=folder)
    checks.equal("loaded everywhere", outputs(called), seen)
    checks.true("loaded", different(everything(model, optimizer), before) == [])

    name = "layers.0.up_proj.weight"
    weight = torch.arange(48.0).reshape(8, 6)
    model.state_dict()[name].copy_(weight)
    checks.equal("written", full(model.layers[0].up_proj.weight), weight)
    y = batch(0, 0, 1, 1)[0] @ weight.T + full(model.layers[0].up_proj.bias)
    checks.equal("written everywhere", outputs(called)[:, :8], y)
    return checks.bad


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_load_into_the_tensors_of_a_state_dict_reaches_all_replicas(layout, tmp_path):
    assert run_ranks(4, in_place, layout, str(tmp_path)) == [[]] * 4


# --- other models --------------------------------------------------------------------------------

BLOCKS = {"layers.2.up_proj.weight": dmuon.Blocks(0, [7, 7])}


def save_blocks(rank, folder):
    torch.manual_seed(0)
    model, _ = distribute(Additive(), "(2,2)", blocks=BLOCKS)
    optimizer = dmuon.Muon(model, lr=0.02)
    train(model, optimizer, range(2), rank, 4)
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    half = everything(model, optimizer)
    train(model, optimizer, range(2, 4), rank, 4)
    return half, everything(model, optimizer)


def load_reordered(rank, folder):
    """The units are in another order, and one unit holds all."""
    torch.manual_seed(1)
    mesh = make_mesh("(2,2)")
    model = Reordered((8, 5, 14))
    dmuon.dedicate_params(
        model, mesh, blocks=BLOCKS, hook_boundary_predicate=lambda name, _: name == ""
    )
    fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(model, lr=0.02)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    load_state(model, optimizer, state)
    loaded = everything(model, optimizer)
    train(model, optimizer, range(2, 4), rank, 4)
    return loaded, everything(model, optimizer)


def test_other_units_in_another_order_go_on_bit_for_bit(tmp_path):
    half, end = run_ranks(4, save_blocks, str(tmp_path))[0]
    for loaded, final in run_ranks(4, load_reordered, str(tmp_path)):
        assert different({n: loaded[n] for n in half}, half) == []
        assert len(loaded) == len(half)
        matrices = [n for n in end if "up_proj.weight" in n]
        assert matrices and all(torch.equal(final[n], end[n]) for n in matrices)


def save_plain(rank, folder):
    called, model, optimizer = build("(2,2)")
    train(called, optimizer, range(2), rank, 4)
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    return everything(model, optimizer)


def load_other(rank, folder):
    """Into a model with one layer more, and into one with one less."""
    checks = Checks(rank)
    torch.manual_seed(1)
    model, _ = distribute(Additive(rows=(8, 5, 14, 6)), "(4)")
    optimizer = dmuon.Muon(model, lr=0.02)
    before = everything(model, optimizer)
    state = state_of(model, optimizer)
    try:
        dcp.load(state, checkpoint_id=folder)
        checks.true("missing", False)
    except CheckpointException as error:
        checks.true("named", "layers.3.up_proj.weight" in str(error))
    dcp.load(state, checkpoint_id=folder, planner=DefaultLoadPlanner(allow_partial_load=True))
    load_state(model, optimizer, state)
    more = everything(model, optimizer)
    new = [n for n in more if n.startswith("layers.3")]
    checks.true("new", bool(new) and all(torch.equal(more[n], before[n]) for n in new))
    train(model, optimizer, range(2, 3), rank, 4)

    torch.manual_seed(1)
    model, _ = distribute(Additive(rows=(8, 5)), "(4)")
    optimizer = dmuon.Muon(model, lr=0.02)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    load_state(model, optimizer, state)
    return checks.bad, {n: v for n, v in more.items() if n not in new}, everything(model, optimizer)


def test_new_parameters_are_named_and_stay_removed_ones_are_left_out(tmp_path):
    saved = run_ranks(4, save_plain, str(tmp_path))[0]
    for bad, more, less in run_ranks(4, load_other, str(tmp_path)):
        assert bad == []
        assert different(more, saved) == []
        assert different(less, {n: v for n, v in saved.items() if "layers.2" not in n}) == []


def state_of(model, optimizer):
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))


def load_state(model, optimizer, state):
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
