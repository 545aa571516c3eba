"""fp64 reference for fused weights and for the variants of Muon; written from the formulas, nothing
here calls dmuon."""

from __future__ import annotations

import math

import torch
from reference import YOU, orthogonalize, ratio


def matrices(w: torch.Tensor):
    """Every matrix in a tensor, as (index, shape to see it in)."""
    if w.ndim == 3:
        return [((i,), tuple(w.shape[1:])) for i in range(w.shape[0])]
    return [((), (w.shape[0], math.prod(w.shape[1:])))]


def block_slices(shape, dim, sizes):
    start = 0
    for size in sizes:
        cut = [slice(None)] * len(shape)
        cut[dim] = slice(start, start + size)
        yield tuple(cut)
        start += size


class Reference:
    """One parameter in fp64: every matrix of every block by itself, element by element formulas.

    v is kept per (block, matrix): a column for "normuon", a matrix for "adamuon".
    """

    def __init__(
        self, w, lr=0.02, mu=0.95, nesterov=True, wd=0.0, steps=YOU, adjust="original",
        blocks=None, variant="none", beta2=0.95, cautious=False,
    ):  # fmt: skip
        self.w = w.detach().double().clone(memory_format=torch.contiguous_format)
        self.buf = torch.zeros_like(self.w)
        self.lr, self.mu, self.nesterov, self.wd = lr, mu, nesterov, wd
        self.steps, self.adjust = steps, adjust
        self.variant, self.beta2, self.cautious = variant, beta2, cautious
        shape = self.w.shape
        self.cuts = [tuple(slice(None) for _ in shape)]
        if blocks is not None:
            self.cuts = list(block_slices(shape, *blocks))
        self.v: dict = {}

    def step(self, g):
        g = g.detach().double()
        self.buf = self.mu * self.buf + (1 - self.mu) * g
        u = (1 - self.mu) * g + self.mu * self.buf if self.nesterov else self.buf
        for b, cut in enumerate(self.cuts):
            for index, shape in matrices(self.w[cut]):
                w = self.w[cut][index].reshape(shape)
                new = self.update(w, u[cut][index].reshape(shape), (b, index))
                self.w[cut][index].copy_(new.reshape(self.w[cut][index].shape))

    def update(self, w, u, key):
        m, n = w.shape
        x = orthogonalize(u.sign() if self.variant == "adamuon" else u, self.steps)
        if self.variant == "normuon":
            v = self.v.get(key, torch.zeros(m, 1, dtype=torch.float64))
            v = self.beta2 * v + (1 - self.beta2) * (x * x).mean(dim=1, keepdim=True)
            scaled = x / (v.sqrt() + 1e-8)
            x, self.v[key] = scaled * x.norm() / scaled.norm(), v
        if self.variant == "adamuon":
            v = self.v.get(key, torch.zeros(m, n, dtype=torch.float64))
            v = self.beta2 * v + (1 - self.beta2) * x * x
            scaled = x / (v.sqrt() + 1e-8)
            x, self.v[key] = scaled * math.sqrt(min(m, n)) / scaled.norm(), v
        decays = (x * w >= 0).double() if self.cautious else 1.0
        return w - self.lr * self.wd * decays * w - self.lr * ratio(m, n, self.adjust) * x
