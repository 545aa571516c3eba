"""optimizer.clip_grad_norm_: torch's own function, each gradient once, in one all-reduce."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from models import LAYOUTS, Net, distribute, full
from ranks import run_ranks

import dmuon


def backward(model, rank):
    g = torch.Generator().manual_seed(rank)
    (model(torch.randn(5, 4, generator=g)) * 3).pow(2).mean().backward()


ORDERS = [2.0, 1.0, 3.0, math.inf]


def clip(rank, layout, norm_type, max_norm):
    """The norm and the largest error of a gradient against torch's function in one process."""
    torch.manual_seed(0)
    alone = Net()
    for r in range(4):
        backward(alone, r)
    for p in alone.parameters():
        p.grad /= 4
    alone_norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), max_norm, norm_type)
    expected = {n: p.grad for n, p in alone.named_parameters()}

    torch.manual_seed(0)
    model, _ = distribute(Net(), layout)
    inner = getattr(model, "module", model)
    optimizer = dmuon.Muon(inner, lr=0.02)
    backward(model, rank)
    calls = []
    all_reduce = dist.all_reduce

    def counted(tensor, *args, **kwargs):
        calls.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        norm = optimizer.clip_grad_norm_(max_norm, norm_type)
    finally:
        dist.all_reduce = all_reduce
    got = {n: full(p.grad) for n, p in inner.named_parameters()}
    error = max((got[n] - expected[n]).abs().max().item() for n in expected)
    norms = [torch.empty_like(norm) for _ in range(4)]
    dist.all_gather(norms, norm)
    return norm.item(), alone_norm.item(), error, calls, len({n.item() for n in norms})


def clip_in_all_ways(rank, layout):
    return [clip(rank, layout, order, limit) for order in ORDERS for limit in (0.1, 1e6)]


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_norm_and_gradients_are_those_of_one_process(layout):
    for results in run_ranks(4, clip_in_all_ways, layout):
        for norm, expected, error, calls, different in results:
            assert norm == pytest.approx(expected, rel=1e-5)
            assert error < 1e-6
            assert calls == [1]  # one scalar
            assert different == 1


class Ones(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 5, bias=False)])

    def forward(self, x):
        return self.layers[0](x)


def forty_ones(rank, layout):
    model, _ = distribute(Ones(), layout, predicate=lambda n, p: True)
    optimizer = dmuon.Muon(getattr(model, "module", model), lr=0.02)
    model(torch.ones(1, 8)).sum().backward()
    return optimizer.clip_grad_norm_(1.0).item(), optimizer.clip_grad_norm_(1.0).item()


@pytest.mark.parametrize("layout", ["(4)", "(2,2)", "(4,1)"])
def test_forty_ones_have_the_norm_of_forty_ones(layout):
    for first, second in run_ranks(4, forty_ones, layout):
        assert first == pytest.approx(math.sqrt(40), rel=1e-6)
        assert second == pytest.approx(1.0, rel=1e-5)


def not_finite(rank):
    model, _ = distribute(Net(), "(2,2)")
    optimizer = dmuon.Muon(model, lr=0.02)
    backward(model, rank)
    weight = model.layers[1].up_proj.weight
    if weight.is_owner:
        weight.grad._local_tensor[0, 0] = math.nan
    before = full(model.layers[0].up_proj.weight.grad)
    try:
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        same = torch.equal(before, full(model.layers[0].up_proj.weight.grad))
        return str(error), same
    return "no error", False


def test_a_norm_that_is_not_finite_is_refused_on_all_ranks_if_asked():
    for message, unchanged in run_ranks(4, not_finite):
        assert "norm of order 2.0 is nan" in message
        assert unchanged


def some_or_none(rank):
    model, _ = distribute(Net(), "(4)")
    optimizer = dmuon.Muon(model, lr=0.02)
    nothing = optimizer.clip_grad_norm_(1.0).item()
    backward(model, rank)
    whole = [full(p.grad).double().norm() for p in model.layers[0].parameters()]
    part = dmuon.clip_grad_norm_(model.layers[0].parameters(), 1e9).item()
    return nothing, part, torch.stack(whole).norm().item()


def test_any_parameters_will_do_and_none():
    for nothing, part, expected in run_ranks(4, some_or_none):
        assert nothing == 0
        assert part == pytest.approx(expected, rel=1e-5)


def test_a_bad_order_is_refused():
    weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match="norm_type must be positive"):
        dmuon.clip_grad_norm_([weight], 1.0, 0.0)
    weight.grad = torch.full((2, 2), 3.0)
    assert dmuon.clip_grad_norm_([weight], 1.0).item() == 6.0
    assert torch.allclose(weight.grad, torch.full((2, 2), 0.5))
