"""OwnedTensor under torch's own operations, state dicts and checkpoints."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import Net, distribute, full, full_weights
from ranks import run_ranks
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import Replicate, Shard

import dmuon


def whole():
    torch.manual_seed(0)
    return Net().layers[0].up_proj.weight.detach()


def operations(rank, layout):
    torch.manual_seed(0)
    model, _ = distribute(Net(), layout)
    p = getattr(model, "module", model).layers[0].up_proj.weight
    w = whole()
    mesh = p.device_mesh
    checks = {
        "full_tensor": torch.equal(p.full_tensor(), w),
        "norm": torch.allclose(full(p.detach().norm()), w.norm()),
        "sum": torch.allclose(p.detach().sum().full_tensor(), w.sum(), atol=1e-6),
        "mean": torch.allclose(p.detach().mean().full_tensor(), w.mean(), atol=1e-7),
        "max": torch.equal(p.detach().max().full_tensor(), w.max()),
        "element-wise": torch.equal((p.detach() * 2 + 1).full_tensor(), w * 2 + 1),
        "same owner": torch.equal((p.detach() + p.detach()).full_tensor(), w + w),
        "matmul": torch.equal((p.detach() @ p.detach().t()).full_tensor(), w @ w.t()),
        "isfinite": bool(torch.isfinite(p.detach()).all().full_tensor()),
        "clone": isinstance(p.detach().clone(), dmuon.OwnedTensor),
        "zeros_like": torch.equal(torch.zeros_like(p.detach()).full_tensor(), torch.zeros(8, 6)),
        "to": p.detach().to(torch.bfloat16).dtype == torch.bfloat16,
        "redistribute": torch.equal(
            p.detach().redistribute(placements=[Replicate()] * mesh.ndim).to_local(), w
        ),
        "shard": torch.equal(
            p.detach()
            .redistribute(placements=[Replicate()] * (mesh.ndim - 1) + [Shard(0)])
            .full_tensor(),
            w,
        ),
    }
    with torch.no_grad():
        p.mul_(2.0)
        checks["in place"] = torch.equal(p.full_tensor(), 2 * w)
        p.copy_(w + 1)
        checks["copy whole"] = torch.equal(p.full_tensor(), w + 1)
        p.copy_(p.detach().redistribute(placements=[Replicate()] * mesh.ndim))
        checks["copy DTensor"] = torch.equal(p.full_tensor(), w + 1)
        p.fill_(3.0)
        checks["fill"] = torch.equal(p.full_tensor(), torch.full((8, 6), 3.0))
        p.normal_(generator=None)
        spread = p.full_tensor()
        checks["normal"] = bool(torch.isfinite(spread).all()) and spread.std() > 0.1
        before = p.full_tensor()
        try:
            p.cumsum_(0)
            checks["refused"] = False
        except NotImplementedError as error:
            checks["refused"] = "full_tensor" in str(error)
        checks["unchanged"] = torch.equal(p.full_tensor(), before)
        try:
            p.copy_(torch.zeros(3, 3))
            checks["bad shape"] = False
        except RuntimeError as error:
            checks["bad shape"] = "(8, 6)" in str(error) or "3" in str(error)
    return {k: v for k, v in checks.items() if not v}


@pytest.mark.parametrize("layout", ["(4)", "(2,2)", "ddp"])
def test_stock_operations_are_right(layout):
    assert run_ranks(4, operations, layout) == [{}] * 4


def changed_from_outside(rank, layout):
    model, _ = distribute(Net(), layout)
    inner = getattr(model, "module", model)
    x = torch.ones(2, 4)
    model(x)
    with torch.no_grad():
        for p in inner.parameters():
            p.fill_(0.25)
    return model(x).detach()


@pytest.mark.parametrize("layout", ["(4)", "(2,2)", "ddp"])
def test_the_next_forward_sees_weights_changed_from_outside(layout):
    reference = Net()
    for p in reference.parameters():
        torch.nn.init.constant_(p, 0.25)
    expected = reference(torch.ones(2, 4)).detach()
    for out in run_ranks(4, changed_from_outside, layout):
        assert torch.allclose(out, expected)


# --- state dicts ---------------------------------------------------------------------------------


def train(model, optimizer, steps, rank):
    for step in steps:
        g = torch.Generator().manual_seed(100 * step + rank)
        model(torch.randn(5, 4, generator=g)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def build(layout, seed=0):
    torch.manual_seed(seed)
    model, _ = distribute(Net(), layout)
    return model, dmuon.Muon(getattr(model, "module", model), lr=0.02)


def full_state(rank, layout):
    model, optimizer = build(layout)
    train(model, optimizer, range(2), rank)
    inner = getattr(model, "module", model)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(inner, options=options)
    keys = list(state)
    weights = full_weights(model)
    same = rank != 0 or all(torch.equal(state[n], w) for n, w in weights.items())

    other, _ = build(layout, seed=1)
    other_inner = getattr(other, "module", other)
    set_model_state_dict(
        other_inner,
        state if rank == 0 else {},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    loaded = full_weights(other)
    return (
        keys if rank == 0 else None,
        same,
        all(torch.equal(loaded[n], weights[n]) for n in weights),
    )


@pytest.mark.parametrize("layout", ["(4)", "(2,2)"])
def test_full_state_dict_and_broadcast_load(layout):
    results = run_ranks(4, full_state, layout)
    assert results[0][0] == list(Net().state_dict())
    assert all(same and loaded for _, same, loaded in results)


def resume(rank, layout, folder):
    model, optimizer = build(layout)
    train(model, optimizer, range(5), rank)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(state, checkpoint_id=folder)
    train(model, optimizer, range(5, 10), rank)

    second, second_optimizer = build(layout, seed=1)
    train(second, second_optimizer, range(1), rank)
    state = {
        "model": get_model_state_dict(second),
        "optimizer": get_optimizer_state_dict(second, second_optimizer),
    }
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(second, state["model"])
    set_optimizer_state_dict(second, second_optimizer, state["optimizer"])
    train(second, second_optimizer, range(5, 10), rank)
    a, b = full_weights(model), full_weights(second)
    return [n for n in a if not torch.equal(a[n], b[n])]


@pytest.mark.parametrize("layout", ["(4)", "(2,2)"])
def test_ten_steps_are_five_plus_save_load_and_five(layout, tmp_path):
    assert run_ranks(4, resume, layout, str(tmp_path)) == [[]] * 4


def untouched(rank):
    model, optimizer = build("(2,2)")
    before = full_weights(model)
    state = get_optimizer_state_dict(model, optimizer)
    same = all(torch.equal(before[n], w) for n, w in full_weights(model).items())
    steps = {float(s["step"]) for s in state["state"].values() if "step" in s}
    return same, steps, sorted(state["state"]) == sorted(before)


def test_asking_for_the_optimizer_state_changes_nothing():
    assert run_ranks(4, untouched) == [(True, {0.0}, True)] * 4
