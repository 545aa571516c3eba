"""Independent fp64 references, written from the formulas; nothing here calls dmuon.

The singular value decomposition carries out the orthogonalization: with U S V^T of the matrix,
U p(S / |A|_F) V^T for the composed scalar polynomial p.
"""

from __future__ import annotations

import math

import torch

KELLER = [(3.4445, -4.7750, 2.0315)] * 5
YOU = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]


def composed(steps, x):
    for a, b, c in steps:
        x = a * x + b * x**3 + c * x**5
    return x


def orthogonalize(g: torch.Tensor, steps=YOU) -> torch.Tensor:
    """fp64; zero stays zero. 3-D: every slice by itself."""
    g = g.double()
    if g.ndim == 3:
        return torch.stack([orthogonalize(x, steps) for x in g])
    norm = g.norm()
    if norm == 0:
        return torch.zeros_like(g)
    u, s, vh = torch.linalg.svd(g / norm, full_matrices=False)
    return (u * composed(steps, s)) @ vh


def ratio(m: int, n: int, adjust: str) -> float:
    return {
        "original": math.sqrt(max(1.0, m / n)),
        "match_rms_adamw": 0.2 * math.sqrt(max(m, n)),
        "spectral_unclamped": math.sqrt(m / n),
        "none": 1.0,
    }[adjust]


class Muon:
    """Muon on one fp64 matrix (or stack of matrices)."""

    def __init__(self, w, lr=0.02, mu=0.95, nesterov=True, wd=0.0, steps=YOU, adjust="original"):
        self.w = w.double().clone()
        self.buf = torch.zeros_like(self.w)
        self.lr, self.mu, self.nesterov, self.wd = lr, mu, nesterov, wd
        self.steps, self.adjust = steps, adjust

    def step(self, g: torch.Tensor) -> None:
        g = g.double()
        self.buf = self.buf + (1 - self.mu) * (g - self.buf)
        u = g + self.mu * (self.buf - g) if self.nesterov else self.buf
        x = orthogonalize(u, self.steps)
        m, n = self.w.shape[-2:]
        self.w = self.w * (1 - self.lr * self.wd) - self.lr * ratio(m, n, self.adjust) * x


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """|a - b| / |b| in fp64, Frobenius."""
    a, b = a.detach().double(), b.detach().double()
    return ((a - b).norm() / b.norm().clamp_min(1e-300)).item()
