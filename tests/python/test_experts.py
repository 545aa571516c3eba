"""Experts in a list: which ones run, and which get gradients, differs between ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from checks import Checks
from models import distribute, full, full_weights
from ranks import run_ranks

import dmuon


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj = nn.Linear(6, 8, bias=False)
        self.down_proj = nn.Linear(8, 6, bias=False)

    def forward(self, x):
        return self.down_proj(torch.relu(self.up_proj(x)))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix_proj = nn.Linear(6, 6, bias=False)
        self.router = nn.Linear(6, 4, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x, route):
        y = self.mix_proj(x)
        weights = self.router(x).softmax(-1)
        for e, expert in enumerate(self.experts):
            if (route == e).any():  # an expert without tokens never runs
                y = y + expert(x) * (route == e)[:, None] * weights[:, e : e + 1]
        return x + y


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_in = nn.Linear(4, 6)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x, routes):
        x = self.embed_in(x)
        for layer, route in zip(self.layers, routes):
            x = layer(x, route)
        return x.pow(2).mean()


def batch(step, rank):
    """In every layer this rank's tokens go to two experts; expert 3 of layer 1 never has any."""
    g = torch.Generator().manual_seed(10 * step + rank)
    routes = torch.tensor([rank, (rank + step) % 4])[torch.randint(0, 2, (3, 5), generator=g)]
    routes[1][routes[1] == 3] = 0
    return torch.randn(5, 4, generator=g), routes


def train(rank, layout, reshard):
    torch.manual_seed(0)
    model, plan = distribute(Mixture(), layout, reshard_after_forward=reshard)
    optimizer = dmuon.Muon(model, lr=0.02, adamw_lr=1e-3, weight_decay=0.1)
    bad = Checks((rank, layout))
    bad.true("units", {e.unit for e in plan.entries} == {f"layers.{i}" for i in range(3)})
    alone = Mixture()
    alone.load_state_dict(full_weights(model))
    reference = dmuon.Muon(
        [
            {
                "params": [p for n, p in alone.named_parameters() if "proj" in n],
                "weight_decay": 0.1,
            },
            {
                "params": [p for n, p in alone.named_parameters() if "proj" not in n],
                "algorithm": "adamw",
                "lr": 1e-3,
            },
        ],
        lr=0.02,
    )
    for step in range(4):
        model(*batch(step, rank)).backward()
        for r in range(4):
            (alone(*batch(step, r)) / 4).backward()
        expected = dict(alone.named_parameters())
        for name, p in model.named_parameters():
            if isinstance(p, dmuon.OwnedTensor):
                want = expected[name].grad
                if want is None:
                    bad.true(f"{step} no gradient {name}", p.grad is None)
                else:
                    bad.true(f"{step} {name}", (full(p.grad) - want).abs().max() < 1e-6)
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
    for name, weight in full_weights(model).items():
        bad.true(name, (weight - expected[name]).abs().max() < 1e-5)
    return bad.bad


@pytest.mark.parametrize(
    ("layout", "reshard"), [("(4)", True), ("(2,2)", True), ("(2,2)", False), ("(4,1)", True)]
)
def test_experts_without_tokens_on_some_ranks_or_on_all(transport, layout, reshard):
    assert run_ranks(4, train, layout, reshard) == [[]] * 4


class OnlyExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.moe = nn.Module()
        self.moe.experts = nn.ModuleList(Expert() for _ in range(2))
        self.tail = nn.ModuleList([Expert()])


def test_a_unit_is_never_a_single_expert():
    def units(rank):
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        return sorted({e.unit for e in dmuon.dedicate_params(OnlyExperts(), mesh).entries})

    assert run_ranks(1, units) == [["moe", "tail.0"]]


def passed(rank):
    """In which order reductions are launched, seen from how long backward holds the weights."""
    torch.manual_seed(0)
    model, _ = distribute(Mixture(), "(4)", prefetch=0)
    units = model.__dict__["_dmuon_runtimes"][0].units
    free = []
    last = units[2]
    handle = model.layers[0].register_full_backward_hook(
        lambda *_: free.append((last.core.unsharded, last.core.counters["reduces"]))
    )
    model(*batch(0, rank)).backward()
    handle.remove()
    return free


def test_a_unit_with_unused_experts_is_reduced_once_backward_has_passed_it():
    assert run_ranks(4, passed) == [[(False, 1)]] * 4
