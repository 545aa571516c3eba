"""The engine and the optimizer on one GPU, against fp64 on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from reference import KELLER, YOU, Muon, orthogonalize, relative

import dmuon


def spectrum(m, n, low):
    """A matrix with singular values log-spaced from 1 to ``low``."""
    g = torch.Generator().manual_seed(m * 1000 + n)
    s = min(m, n)
    u = torch.linalg.qr(torch.randn(m, s, generator=g, dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(n, s, generator=g, dtype=torch.float64))[0]
    return (u * torch.logspace(0, torch.tensor(low).log10().item(), s, dtype=torch.float64)) @ v.T


@pytest.mark.parametrize(("m", "n"), [(64, 64), (64, 256), (256, 64), (127, 509), (1, 16)])
@pytest.mark.parametrize(("mode", "gate"), [("fast", 3e-2), ("accurate", 1e-2), ("exact", 1e-4)])
def test_half_precision_meets_its_gate_on_mid_conditioned_matrices(m, n, mode, gate):
    a = spectrum(m, n, 1e-3)
    x = dmuon.newton_schulz(a.float().cuda(), mode=mode)
    assert x.dtype == (torch.float32 if mode == "exact" else torch.float16)
    assert relative(x.cpu(), orthogonalize(a, YOU)) < gate


@pytest.mark.parametrize("scale", [1e-38, 1e-20, 1.0, 1e20, 1e37])
def test_any_scale_gives_the_same_result(scale):
    a = torch.randn(32, 96, generator=torch.Generator().manual_seed(0))
    x = dmuon.newton_schulz((a * scale).cuda(), mode="exact")
    assert relative(x.cpu(), orthogonalize(a)) < 1e-4


def test_zero_stays_zero_and_non_finite_input_is_not_hidden():
    assert dmuon.newton_schulz(torch.zeros(8, 4).cuda()).abs().sum().item() == 0
    bad = torch.ones(8, 4).cuda()
    bad[3, 2] = float("inf")
    assert torch.isnan(dmuon.newton_schulz(bad)).all()


def test_a_batch_is_its_matrices():
    a = torch.randn(5, 48, 32, generator=torch.Generator().manual_seed(0)).cuda()
    batch = dmuon.newton_schulz(a)
    for one, x in zip(a, batch):
        assert relative(x, dmuon.newton_schulz(one)) < 5e-3


def test_ten_steps_follow_the_fp64_update():
    g = torch.Generator().manual_seed(1)
    starts = [torch.randn(64, 32, generator=g) for _ in range(3)]
    weights = [nn.Parameter(w.cuda()) for w in starts]
    optimizer = dmuon.Muon(weights, lr=0.02, ns_coefficients="keller")
    references = [Muon(w, lr=0.02, steps=KELLER) for w in starts]
    for _ in range(10):
        for w, r in zip(weights, references):
            gradient = torch.randn(64, 32, generator=g)
            w.grad = gradient.cuda()
            r.step(gradient)
        optimizer.step()
    for w, r, start in zip(weights, references, starts):
        assert relative(w.detach().cpu() - start, r.w - start.double()) < 3e-2
