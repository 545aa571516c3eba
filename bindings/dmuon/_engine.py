"""The orthogonalization engine by itself."""

from __future__ import annotations

import functools
from typing import Any

import torch

from . import _C
from ._muon_options import make_config


def newton_schulz(
    G: torch.Tensor,
    steps: int = 5,
    *,
    coefficients: Any = "you",
    mode: Any = "fast",
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Pushes the singular values of a matrix towards 1, keeping its singular vectors.

    With ``G = U S V^T``: returns ``U p(S / |G|_F) V^T``, ``p`` the composed polynomial of the
    steps.

    Args:
        G: (m, n) or (batch, m, n), floating point, any strides, any finite scale.
        steps: number of steps.
        coefficients: "keller" (K. Jordan), "you" (Y. You), "polar_express" (Amsel et al., 2025),
            "cans" (Grishina et al., 2025; both with safety factor 1.05), "deepseek" (for ten
            steps), or a list of (a, b, c), one per step, for x -> a x + b x^3 + c x^5.
        mode: how the Gram form restarts: "fast" (before step 2), "accurate" (before 1 and 3),
            "exact" (the direct form), or a list of steps. Where the direct form is cheaper it is
            taken.
        dtype: of the iteration; None: fp32 on CPU (fp64 for fp64), fp16 on CUDA.

    Returns:
        A new tensor of G's shape in the iteration's dtype. Zeros for zeros, NaN for non-finite
        input.

    Raises:
        RuntimeError, ValueError: a bad shape, dtype or option; coefficients that diverge or flip
            signs (with the place).
    """
    if not isinstance(coefficients, str):
        coefficients = tuple(tuple(float(x) for x in step) for step in coefficients)
    if not isinstance(mode, str):
        mode = tuple(int(i) for i in mode)
    return _C.newton_schulz(G.detach(), _config(coefficients, steps, mode, dtype))


# Checking a set of coefficients costs as much as orthogonalizing a small matrix.
_config = functools.lru_cache(maxsize=64)(make_config)
