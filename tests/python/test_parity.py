"""The same numbers on every layout: one process, DDP, FSDP2, HSDP; against fp64 and bit against
bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from models import LAYOUTS, Net, distribute, full, full_weights
from ranks import run_ranks
from reference import Muon, relative

import dmuon

LR, STEPS = 0.02, 20


class OneMatrix(nn.Module):
    """y = x W^T: the gradient of sum(y * t) with respect to W is t^T x, exactly."""

    def __init__(self, shape):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(shape[1], shape[0], bias=False)])
        with torch.no_grad():
            g = torch.Generator().manual_seed(7)
            self.layers[0].weight.copy_(torch.randn(shape, generator=g))

    def forward(self, x):
        return self.layers[0](x)


def batch(shape, step, rank, integers=False):
    g = torch.Generator().manual_seed(1000 * step + 10 * rank + 3)
    m, n = shape
    if integers:
        x = torch.randint(-3, 4, (4, n), generator=g).float()
        t = torch.randint(-3, 4, (4, m), generator=g).float()
    else:
        x, t = torch.randn(4, n, generator=g), torch.randn(4, m, generator=g)
    return x, t


def mean_gradient(shape, step, ranks=4, integers=False):
    pairs = [batch(shape, step, r, integers) for r in range(ranks)]
    return sum(t.double().T @ x.double() for x, t in pairs) / ranks


def train_one_matrix(rank, layout, shape, integers):
    model, _ = distribute(OneMatrix(shape), layout, predicate=lambda n, p: True)
    optimizer = dmuon.Muon(getattr(model, "module", model), lr=LR)
    gradients = []
    for step in range(STEPS):
        x, t = batch(shape, step, rank, integers)
        (model(x) * t).sum().backward()
        gradients.append(full(optimizer.param_groups[0]["params"][0].grad))
        optimizer.step()
        optimizer.zero_grad()
    return next(iter(full_weights(model).values())), gradients


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_matrix_follows_the_fp64_update_on_every_layout(layout):
    shape = (8, 6)
    reference = Muon(OneMatrix(shape).layers[0].weight.detach(), lr=LR)
    for step in range(STEPS):
        reference.step(mean_gradient(shape, step))
    for weight, gradients in run_ranks(4, train_one_matrix, layout, shape, False):
        for step, gradient in enumerate(gradients):
            # Muon does not see a wrong divisor: the reduced gradient itself is checked.
            assert relative(gradient, mean_gradient(shape, step)) < 1e-6
        assert relative(weight, reference.w) < 1e-5


def one_process(shape, integers):
    model = OneMatrix(shape)
    optimizer = dmuon.Muon(model, lr=LR)
    for step in range(STEPS):
        model.layers[0].weight.grad = mean_gradient(shape, step, integers=integers).float()
        optimizer.step()
        optimizer.zero_grad()
    return model.layers[0].weight.detach().clone()


def test_small_integer_gradients_give_the_same_bits_on_every_layout():
    shape = (8, 6)
    expected = one_process(shape, integers=True)
    for layout in LAYOUTS:
        for weight, _ in run_ranks(4, train_one_matrix, layout, shape, True):
            assert torch.equal(weight, expected), layout


# --- a whole model -----------------------------------------------------------------------------


def net_batch(step, rank):
    g = torch.Generator().manual_seed(77 * step + rank)
    return torch.randn(5, 4, generator=g), torch.randn(5, 3, generator=g)


def train_net(rank, layout, reshard):
    torch.manual_seed(0)
    model, _ = distribute(Net(), layout, reshard_after_forward=reshard)
    optimizer = dmuon.Muon(getattr(model, "module", model), lr=LR, adamw_lr=3e-3)
    losses = []
    for step in range(STEPS):
        x, y = net_batch(step, rank)
        loss = (model(x) - y).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, full_weights(model)


def train_net_alone():
    torch.manual_seed(0)
    model = Net()
    optimizer = dmuon.Muon(model, lr=LR, adamw_lr=3e-3)
    losses = []
    for step in range(STEPS):
        per_rank = [(model(x) - y).pow(2).mean() for x, y in (net_batch(step, r) for r in range(4))]
        (sum(per_rank) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in per_rank])
    return losses, {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("reshard", [True, False], ids=["Z3", "Z2"])
def test_losses_and_weights_agree_on_every_layout_over_20_steps(reshard):
    losses, weights = train_net_alone()
    for layout in LAYOUTS:
        for rank, (got, final) in enumerate(run_ranks(4, train_net, layout, reshard)):
            for step in range(STEPS):
                assert abs(got[step] - losses[step][rank]) <= 1e-5 * abs(losses[step][rank]), layout
            assert list(final) == list(weights)
            for name in weights:
                # Biases of tiny gradients go through AdamW's division: absolute there.
                error = (final[name] - weights[name]).abs().max().item()
                assert error <= 2e-5, (layout, name, error)


def both_modes(rank, layout):
    first = train_net(rank, layout, True)
    second = train_net(rank, layout, False)
    return first[0] == second[0], all(torch.equal(first[1][n], second[1][n]) for n in first[1])


@pytest.mark.parametrize("layout", ["(4)", "(2,2)"])
def test_resharding_or_keeping_changes_no_bit(layout):
    assert run_ranks(4, both_modes, layout) == [(True, True)] * 4


# --- shapes ------------------------------------------------------------------------------------


class ManyShapes(nn.Module):
    def __init__(self, shapes):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(n, m, bias=False) for m, n in shapes)
        g = torch.Generator().manual_seed(3)
        for layer in self.layers:
            with torch.no_grad():
                layer.weight.copy_(torch.randn(layer.weight.shape, generator=g))

    def forward(self, inputs):
        return [layer(x) for layer, x in zip(self.layers, inputs)]


SHAPES = [(1, 16), (16, 1), (3, 8), (2, 9), (1, 1), (6, 4), (5, 7), (10, 3), (18, 2)]


def train_shapes(rank, layout):
    model, _ = distribute(ManyShapes(SHAPES), layout, predicate=lambda n, p: True)
    optimizer = dmuon.Muon(getattr(model, "module", model), lr=LR)
    for step in range(3):
        pairs = [batch(s, 10 * i + step, rank) for i, s in enumerate(SHAPES)]
        outputs = model([x for x, _ in pairs])
        sum((y * t).sum() for y, (_, t) in zip(outputs, pairs)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_weights(model)


@pytest.mark.parametrize("layout", ["(4)", "(2,2)", "ddp"])
def test_any_shape_works_also_with_fewer_rows_than_ranks(layout):
    references = [Muon(layer.weight.detach(), lr=LR) for layer in ManyShapes(SHAPES).layers]
    for step in range(3):
        for i, (shape, reference) in enumerate(zip(SHAPES, references)):
            reference.step(mean_gradient(shape, 10 * i + step))
    for weights in run_ranks(4, train_shapes, layout):
        for weight, reference in zip(weights.values(), references):
            assert relative(weight, reference.w) < 1e-5, tuple(weight.shape)


def test_any_shape_works_without_assertions_too():
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import test_parity as t\n"
        "runs = t.run_ranks(4, t.train_shapes, '(2,2)')\n"
        "if __debug__ or [len(run) for run in runs] != [len(t.SHAPES)] * 4:\n"
        "    raise SystemExit('not run under -O, or incomplete')"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env=dict(os.environ, PYTHONOPTIMIZE="1")
    )


# --- special gradients ---------------------------------------------------------------------------


def zero_gradient(rank, layout):
    model = OneMatrix((4, 4))
    nn.init.ones_(model.layers[0].weight)
    model, _ = distribute(model, layout, predicate=lambda n, p: True)
    optimizer = dmuon.Muon(getattr(model, "module", model), lr=0.1, weight_decay=0.5)
    (model(torch.zeros(2, 4)) * 1.0).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    after_zero = next(iter(full_weights(model).values()))
    x, t = batch((4, 4), 1, rank)
    (model(x) * t).sum().backward()
    optimizer.step()
    return after_zero, next(iter(full_weights(model).values()))


@pytest.mark.parametrize("layout", ["(4)", "(2,2)", "ddp"])
def test_a_zero_gradient_decays_and_the_next_step_is_right(layout):
    reference = Muon(torch.ones(4, 4), lr=0.1, wd=0.5)
    reference.step(torch.zeros(4, 4))
    reference.step(mean_gradient((4, 4), 1))
    for after_zero, weight in run_ranks(4, zero_gradient, layout):
        assert torch.equal(after_zero, torch.full((4, 4), 0.95))
        assert relative(weight, reference.w) < 1e-5
