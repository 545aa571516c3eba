"""torch.amp.GradScaler with Muon: plain parameters, and dedicated ones beside FSDP2's and DDP's."""

from __future__ import annotations

import pytest
import torch
from models import Net, distribute, full, full_weights
from ranks import run_ranks
from reference import relative

import dmuon


def batch(step, rank=0):
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model, step, rank=0):
    return model(batch(step, rank)).square().mean()


def fresh():
    torch.manual_seed(0)
    return Net()


def test_scaled_gradients_give_the_same_steps_and_an_overflow_gives_none():
    plain, scaled = fresh(), fresh()
    a, b = dmuon.Muon(plain, lr=0.02), dmuon.Muon(scaled, lr=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for step in range(4):
        loss_of(plain, step).backward()
        scaler.scale(loss_of(scaled, step)).backward()
        if step == 2:  # skipped by both
            scaled.layers[1].up_proj.weight.grad[0, 0] = float("inf")
        else:
            a.step()
        before = [p.detach().clone() for p in scaled.parameters()]
        scaler.step(b)
        scaler.update()
        if step == 2:
            assert all(torch.equal(p, q) for p, q in zip(scaled.parameters(), before))
            assert scaler.get_scale() == 2.0**11
        a.zero_grad()
        b.zero_grad()
    for p, q in zip(plain.parameters(), scaled.parameters()):
        assert torch.equal(p, q)  # powers of two lose nothing


def train(rank, layout, clip):
    model, _ = distribute(fresh(), layout)
    inner = getattr(model, "module", model)
    optimizer = dmuon.Muon(inner, lr=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    scales, skipped = [], []
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step, rank)).backward()
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(inner.parameters(), 0.5)
        weight = inner.layers[1].up_proj.weight
        if step == 2 and not clip and weight.is_owner:  # on one rank alone
            weight.grad._local_tensor[0, 0] = float("nan")
        before = full_weights(model)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        after = full_weights(model)
        skipped.append(all(torch.equal(after[n], before[n]) for n in after))
        momentum = full(optimizer.state[weight]["momentum_buffer"])
    return scales, skipped, full_weights(model), momentum


def train_alone(clip):
    model = fresh()
    optimizer = dmuon.Muon(model, lr=0.02)
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(4):
            (loss_of(model, step, rank) / 4).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if step != 2 or clip:
            optimizer.step()
    return {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize("layout", ["(2,2)", "ddp"])
def test_an_overflow_on_one_owner_makes_every_rank_skip(layout):
    expected = train_alone(clip=False)
    for scales, skipped, weights, momentum in run_ranks(4, train, layout, False):
        assert skipped == [False, False, True, False]
        assert scales == [2.0**12, 2.0**12, 2.0**11, 2.0**11]
        assert momentum.isfinite().all()
        for name, p in expected.items():
            assert (weights[name] - p).abs().max() < 2e-5, name


@pytest.mark.parametrize("layout", ["(4)"])
def test_unscale_clip_and_step(layout):
    expected = train_alone(clip=True)
    for _, skipped, weights, _ in run_ranks(4, train, layout, True):
        assert skipped == [False] * 4
        for name, p in expected.items():
            if "proj.weight" in name:
                assert relative(weights[name], p) < 1e-5, name
