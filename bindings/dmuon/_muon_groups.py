"""Which parameters ``dmuon.Muon`` gives to which algorithm, and which it refuses."""

from __future__ import annotations

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from ._boundary import default_predicate
from ._owned_tensor import OwnedTensor
from ._runtime import _ORDER


def split_model(
    model: nn.Module,
) -> tuple[dict[int, str], list[nn.Parameter], list[nn.Parameter]]:
    """Names by ``id``, and the parameters for Muon and for AdamW, of a model.

    Raises:
        ValueError: sharded parameters without any dedicated one, or no matrix for Muon.
    """
    named = [(plain_name(n), p) for n, p in model.named_parameters() if p.requires_grad]
    names = {id(p): n for n, p in named}
    if any(isinstance(p, OwnedTensor) for _, p in named):
        muon: list[nn.Parameter] = [p for _, p in named if isinstance(p, OwnedTensor)]  # type: ignore[misc]
    else:
        sharded = next((n for n, p in named if isinstance(p, DTensor)), None)
        if sharded is not None:
            raise ValueError(
                f"dmuon: no parameter is dedicated, but {sharded!r} is sharded already; {_ORDER}"
            )
        test = default_predicate(model)
        muon = [p for n, p in named if test(n, p)]
        if not muon:
            raise ValueError(
                "dmuon: found no matrix for Muon inside the blocks of this "
                f"{type(model).__name__}; pass the parameters, or param_groups with "
                '"algorithm": "muon"'
            )
    chosen = {id(p) for p in muon}
    return names, muon, [p for _, p in named if id(p) not in chosen]


def plain_name(name: str) -> str:
    """Without what ``torch.compile`` and activation checkpointing put into names."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def check_parameter(p: torch.Tensor, name: str, algorithm: str) -> None:
    """Raises ValueError, naming the parameter and a way out, if ``algorithm`` cannot take it."""
    what = f"dmuon: parameter {name!r} {tuple(p.shape)} {p.dtype}"
    if not p.is_floating_point():
        raise ValueError(
            f"{what}: only floating-point parameters can be optimized; leave it out of the "
            "optimizer (requires_grad=False)"
            + (", or hold it as two real ones" if p.is_complex() else "")
        )
    if algorithm == "adamw":
        if isinstance(p, OwnedTensor):
            raise ValueError(f"{what} is dedicated and must be in a muon group")
        return
    if p.layout != torch.strided:
        raise ValueError(
            f"{what} has layout {p.layout}; Muon needs a dense matrix: use to_dense(), or another "
            "optimizer for it"
        )
    if p.ndim < 2:
        raise ValueError(f'{what} is not a matrix; put it in a group with "algorithm": "adamw"')
    if isinstance(p, DTensor) and not isinstance(p, OwnedTensor):
        raise ValueError(f"{what} is sharded as {p.placements} but not dedicated; {_ORDER}")


def check_gradient(p: torch.Tensor, name: str) -> None:
    """Raises ValueError for a gradient that is no dense one."""
    if p.grad is not None and p.grad.layout != torch.strided:
        raise ValueError(
            f"dmuon: the gradient of parameter {name!r} {tuple(p.shape)} has layout "
            f"{p.grad.layout}; dmuon needs dense gradients: sparse=False in an embedding, or "
            "another optimizer for it"
        )
