"""Muon's options on one GPU: blocks and variants in batches, and the random bits of the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from block_reference import Reference
from reference import relative

import dmuon
from dmuon import _C

CASES = [
    ((48, 32), {"blocks": (0, [32, 8, 8])}),
    ((48, 32), {"blocks": (0, [16, 16, 16])}),
    ((48, 32), {"blocks": (1, [8, 24]), "variant": "normuon"}),
    ((3, 32, 24), {"blocks": (1, [16, 16]), "variant": "adamuon"}),
    ((16, 8, 3, 3), {"variant": "normuon", "cautious": True}),
    ((48, 32), {"variant": "adamuon", "cautious": True}),
]


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize(("shape", "options"), CASES)
def test_blocks_and_variants_follow_the_reference(shape, options, copies):
    g = torch.Generator().manual_seed(1)
    starts = [torch.randn(shape, generator=g) for _ in range(copies)]
    weights = [nn.Parameter(w.cuda()) for w in starts]
    same = {"lr": 0.02, "wd": 0.1, **options}
    mine = {"lr": 0.02, "weight_decay": 0.1, "ns_mode": "exact", **options}
    if "blocks" in mine:
        mine["blocks"] = dmuon.Blocks(*mine["blocks"])
    optimizer = dmuon.Muon(weights, **mine)
    references = [Reference(w, **same) for w in starts]
    for _ in range(5):
        for w, r in zip(weights, references):
            gradient = torch.randn(shape, generator=g)
            w.grad = gradient.cuda()
            r.step(gradient)
        optimizer.step()
    for w, r in zip(weights, references):
        assert relative(w.detach().cpu(), r.w) < 1e-3


@pytest.mark.parametrize("size", [1, 7, 8, 1000003])
def test_stochastic_rounding_has_the_bits_of_the_cpu(size):
    x = torch.randn(size, generator=torch.Generator().manual_seed(0))
    for seed, parameter, step in [(0, 0, 0), (2**63 + 5, 9, 2**33 + 1)]:
        here = _C.round_stochastically(x, seed, parameter, step)
        there = _C.round_stochastically(x.cuda(), seed, parameter, step)
        assert torch.equal(there.cpu(), here)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_a_gradient_that_is_not_finite_is_found_and_none_is_changed(dtype):
    good = [torch.randn(300, 70, device="cuda").to(dtype) for _ in range(3)]
    kept = [g.clone() for g in good]
    assert _C.all_finite([*good, torch.ones(3)])
    assert all(torch.equal(g, k) for g, k in zip(good, kept))
    for value in (float("nan"), float("inf"), -float("inf")):
        bad = good[1].clone()
        bad[299, 69] = value
        assert not _C.all_finite([good[0], bad, good[2]])
