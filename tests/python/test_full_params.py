"""full_params: whole weights between steps, brought once, and training as if nothing had been."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from models import Net, distribute, full_weights
from ranks import run_ranks

import dmuon


def data(step, rank):
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def generate(model, rank):
    """What a generation does: several forwards, each with the output of the one before."""
    x = data(0, rank)
    for _ in range(4):
        x = torch.tanh(model(x)[:, :1].expand(5, 4).contiguous())
    return x


def train(rank, layout, reshard, inside):
    torch.manual_seed(0)
    model, _ = distribute(Net(), layout, reshard_after_forward=reshard)
    inner = getattr(model, "module", model)
    optimizer = dmuon.Muon(inner, lr=0.02)
    seen = []
    for step in range(4):
        model(data(step, rank)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        weights = full_weights(model)
        if not inside:
            with torch.no_grad():
                seen.append(generate(model, rank))
            continue
        before = [u.unshards for u in dmuon.stats(inner).units]
        with dmuon.full_params(model):
            dedicated = [inner.layers[i].up_proj.weight for i in range(3)]
            assert all(type(w) is nn.Parameter for w in dedicated)
            for i, weight in enumerate(dedicated):
                assert torch.equal(weight, weights[f"layers.{i}.up_proj.weight"])
            with dmuon.full_params(model):
                seen.append(generate(model, rank))
            assert type(inner.layers[0].up_proj.weight) is nn.Parameter
        after = [u.unshards for u in dmuon.stats(inner).units]
        assert [b - a for a, b in zip(before, after)] == [1, 1, 1]
        assert isinstance(inner.layers[0].up_proj.weight, dmuon.OwnedTensor)
    return seen, full_weights(model)


def both(rank, layout, reshard):
    outside, outside_weights = train(rank, layout, reshard, False)
    inside, inside_weights = train(rank, layout, reshard, True)
    same = all(torch.equal(a, b) for a, b in zip(outside, inside))
    return same, all(torch.equal(outside_weights[n], inside_weights[n]) for n in outside_weights)


@pytest.mark.parametrize("reshard", [True, False], ids=["Z3", "Z2"])
@pytest.mark.parametrize("layout", ["(4)", "(2,2)", "ddp"])
def test_forwards_inside_give_the_same_bits_and_bring_the_weights_once(layout, reshard):
    assert run_ranks(4, both, layout, reshard) == [(True, True)] * 4


def messages(rank):
    model, _ = distribute(Net(), "(2,2)")
    optimizer = dmuon.Muon(model, lr=0.02)
    model(data(0, rank)).pow(2).mean().backward()
    before = full_weights(model)
    said = []

    def expect(body):
        try:
            with dmuon.full_params(model):
                body()
        except (RuntimeError, ValueError) as error:
            said.append(str(error))
        else:
            said.append("no error")
        assert isinstance(model.layers[1].down_proj.weight, dmuon.OwnedTensor)

    expect(lambda: model.layers[1].down_proj.weight.mul_(2))
    expect(optimizer.step)

    def forward_with_gradients():
        with torch.enable_grad():
            model(data(1, rank))

    expect(forward_with_gradients)

    def fail():
        raise ValueError("of its own")

    expect(fail)
    unchanged = all(torch.equal(before[n], w) for n, w in full_weights(model).items())
    optimizer.step()  # the gradients are still there
    loss = model(data(1, rank)).pow(2).mean()
    loss.backward()
    return said, unchanged


def test_what_would_be_lost_is_refused_and_the_model_goes_on():
    for said, unchanged in run_ranks(4, messages):
        assert "layers.1.down_proj.weight" in said[0] and "the change is lost" in said[0]
        assert "optimizer.step() inside full_params" in said[1]
        assert "a forward with gradients inside full_params" in said[2]
        assert said[3] == "of its own"
        assert unchanged


def test_a_model_without_dedicated_parameters_is_refused():
    refused = pytest.raises(ValueError, match="Linear has no dedicated parameters")
    with refused, dmuon.full_params(nn.Linear(2, 2)):
        pass
