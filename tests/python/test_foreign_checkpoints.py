"""Checkpoints to and from plain models with torch.optim.Muon and AdamW, by names."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_model import Additive, backward, build, different, everything, train
from ranks import run_ranks
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

LAYOUTS = [None, "(2,2)", "ddp"]
KELLER = (3.4445, -4.7750, 2.0315)


def plain(seed=0):
    """The model with torch's own optimizers, in one process."""
    torch.manual_seed(seed)
    model = Additive()
    muon = [p for n, p in model.named_parameters() if "up_proj.weight" in n]
    rest = [p for n, p in model.named_parameters() if "up_proj.weight" not in n]
    return model, [
        torch.optim.Muon(muon, lr=0.05, weight_decay=0.2, momentum=0.9, nesterov=False),
        torch.optim.AdamW(rest, lr=4e-3, betas=(0.8, 0.9)),
    ]


def train_plain(model, optimizers, steps):
    for step in steps:
        backward(model, step, 0, 1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def plain_values(model, optimizers):
    found = {n: v.clone() for n, v in model.state_dict().items()}
    for name, p in model.named_parameters():
        for optimizer in optimizers:
            for key, value in optimizer.state.get(p, {}).items():
                found[f"{name}:{key}"] = value.clone()
    return found


def take_theirs(rank, layout, sharded, file):
    """torch's checkpoint into owners; returns all values and the options in force."""
    ranks = 1 if layout is None else 4
    called, model, optimizer = build(layout, seed=1)
    if sharded:
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
        # Options of dmuon's own are not in it: they stay as they are.
        dcp.load(state, checkpoint_id=sharded, planner=DefaultLoadPlanner(allow_partial_load=True))
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
    else:
        weights, state = torch.load(file, weights_only=True)
        set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
        # Without full_state_dict: that asks for groups with the very same options.
        set_optimizer_state_dict(model, optimizer, state)
    values = everything(model, optimizer)
    train(called, optimizer, range(5, 6), rank, ranks)
    groups = {
        g["name"]: {k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups
    }
    return values, groups


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sharded", [True, False], ids=["dcp", "full"])
def test_a_checkpoint_of_torchs_muon_and_adamw_loads_by_names(layout, sharded, tmp_path):
    model, optimizers = plain()
    train_plain(model, optimizers, range(5))
    weights, state = get_state_dict(model, optimizers)
    torch.save((weights, state), tmp_path / "file")
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "sharded")
    folder = str(tmp_path / "sharded") if sharded else None
    results = run_ranks(
        1 if layout is None else 4,
        take_theirs, layout, folder, str(tmp_path / "file"),
        backend=None if layout is None else "dmuon",
    )  # fmt: skip
    for values, groups in results:
        assert different(values, plain_values(model, optimizers)) == []
        muon, adamw = groups["muon"], groups["adamw"]
        assert (muon["lr"], muon["weight_decay"], muon["momentum"]) == (0.05, 0.2, 0.9)
        assert muon["nesterov"] is False and tuple(muon["ns_coefficients"]) == KELLER
        assert muon["ns_mode"] == "fast" and muon["algorithm"] == "muon"
        assert (adamw["lr"], tuple(adamw["betas"])) == (4e-3, (0.8, 0.9))


def give_ours(rank, layout, folder):
    ranks = 1 if layout is None else 4
    called, model, optimizer = build(layout, ns_coefficients=KELLER)
    train(called, optimizer, range(5), rank, ranks)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    dcp.save(state, checkpoint_id=folder)
    return everything(model, optimizer)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_torchs_muon_and_adamw_go_on_from_our_checkpoint(layout, tmp_path):
    expected = run_ranks(
        1 if layout is None else 4,
        give_ours, layout, str(tmp_path),
        backend=None if layout is None else "dmuon",
    )[0]  # fmt: skip
    model, optimizers = plain(seed=1)
    train_plain(model, optimizers, range(1))  # torch's optimizers have no state before
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizers)))
    dcp.load(state, checkpoint_id=tmp_path, planner=DefaultLoadPlanner(allow_partial_load=True))
    set_state_dict(
        model, optimizers, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    assert different(plain_values(model, optimizers), expected) == []
    assert optimizers[0].param_groups[0]["lr"] == 0.02
    train_plain(model, optimizers, range(5, 6))


# --- what does not fit ---------------------------------------------------------------------------


def optimizers_state():
    model, optimizers = plain()
    train_plain(model, optimizers, range(2))
    return get_state_dict(model, optimizers)[1]


def spoil(what):
    """A checkpoint with a fault, and what the error must say."""
    state = optimizers_state()
    if what == "shape":  # would be broadcast
        state["state"]["layers.1.up_proj.weight"]["momentum_buffer"] = torch.ones(1, 6)
        return state, ["layers.1.up_proj.weight", "momentum_buffer", "(1, 6)", "(5, 6)"]
    if what == "number of rows":
        state["state"]["table.weight"]["exp_avg_sq"] = torch.ones(13, 6)
        return state, ["table.weight", "exp_avg_sq", "(13, 6)", "(14, 6)"]
    if what == "algorithm":
        state["state"]["layers.1.up_proj.weight"] = state["state"]["table.weight"]
        return state, ["layers.1.up_proj.weight", "exp_avg", "momentum_buffer"]
    group = state["param_groups"][1]
    if what == "L2":
        group.update(decoupled_weight_decay=False, weight_decay=0.1)
        return state, ["adamw", "decoupled_weight_decay"]
    if what == "momentum":
        state["param_groups"][0]["momentum"] = 1.5
        return state, ["momentum", "1.5"]
    group[what] = True
    return state, ["adamw", what + "=True"]


@pytest.mark.parametrize(
    "what", ["shape", "number of rows", "algorithm", "L2", "amsgrad", "maximize", "momentum"]
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(what):
    _, model, optimizer = build(None)
    train(model, optimizer, range(1), 0, 1)
    before = everything(model, optimizer)
    options = [dict(group) for group in optimizer.param_groups]
    state, words = spoil(what)
    with pytest.raises((ValueError, RuntimeError)) as error:
        set_optimizer_state_dict(model, optimizer, state)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert different(everything(model, optimizer), before) == []
    assert [dict(group) for group in optimizer.param_groups] == options
    train(model, optimizer, range(1, 2), 0, 1)


def test_hooks_may_replace_what_is_loaded():
    _, model, optimizer = build(None)
    train(model, optimizer, range(1), 0, 1)
    _, other, second = build(None, seed=1)
    doubled = {
        "param_groups": optimizer.state_dict()["param_groups"],
        "state": {
            i: {k: 2 * v for k, v in s.items()} for i, s in optimizer.state_dict()["state"].items()
        },
    }
    second.register_load_state_dict_pre_hook(lambda *_: doubled)
    second.load_state_dict(optimizer.state_dict())
    for p, q in zip(model.parameters(), other.parameters()):
        for key, value in optimizer.state[p].items():
            assert torch.equal(second.state[q][key], 2 * value), key


def test_a_plain_number_of_steps_and_a_momentum_not_yet_there_load():
    _, model, optimizer = build(None)
    train(model, optimizer, range(3), 0, 1)
    state = optimizer.state_dict()
    state["state"] = {i: dict(s) for i, s in state["state"].items()}
    for values in state["state"].values():
        if "step" in values:
            values["step"] = 3  # as torch had it before 1.12
        else:
            values["momentum_buffer"] = None  # as some have it before the first gradient
    _, other, second = build(None, seed=1)
    second.load_state_dict(state)
    assert all(second.state[p].get("step", 3) == 3 for p in other.parameters())
    train(other, second, range(1), 0, 1)


def test_torchs_own_options_do_not_stay_in_the_groups():
    _, model, optimizer = build(None)
    keys = [set(group) for group in optimizer.param_groups]
    set_optimizer_state_dict(model, optimizer, optimizers_state())
    assert [set(group) for group in optimizer.param_groups] == keys
