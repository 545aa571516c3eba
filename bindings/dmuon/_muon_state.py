"""What ``dmuon.Muon`` keeps per parameter, and the tensors behind dedicated ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from . import _C
from ._muon_options import dtype_of
from ._owned_tensor import OwnedTensor

HALF = (torch.float16, torch.bfloat16)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part: all of it or nothing, for a dedicated parameter."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def like(p: torch.Tensor, local: torch.Tensor, shape: Any = None) -> torch.Tensor:
    """``local`` as a state of ``p``: of the same owner, for a dedicated one."""
    if not isinstance(p, OwnedTensor):
        return local
    if shape is None:
        return p.like(local)
    return OwnedTensor.build(local, p._view, p._owner, shape)


def fit_muon_state(
    state: dict[str, Any], p: torch.Tensor, group: dict[str, Any], blocks: Any
) -> None:
    """Gives a parameter the state that its group's options need; keeps the values it has."""
    local = local_part(p).detach()
    wide = torch.float32 if p.dtype in HALF else p.dtype
    dtype = dtype_of(group["momentum_dtype"], "momentum_dtype") or wide
    buffer = state.get("momentum_buffer")
    if buffer is None:
        state["momentum_buffer"] = like(p, torch.zeros_like(local, dtype=dtype))
    elif buffer.dtype != dtype:
        state["momentum_buffer"] = like(p, local_part(buffer).to(dtype))
    if p.dtype in HALF and "master" not in state:
        state["master"] = like(p, local.to(wide, copy=True))

    shape = tuple(_C.second_moment_shape(group["variant"], list(p.shape), blocks))
    moment = state.get("second_momentum_buffer")
    if not shape:
        state.pop("second_momentum_buffer", None)
    elif moment is None or tuple(moment.shape) != shape:
        whole = not isinstance(p, OwnedTensor) or p.is_owner
        zeros = torch.zeros(shape if whole else (0, *shape[1:]), dtype=wide, device=local.device)
        state["second_momentum_buffer"] = like(p, zeros, shape)
    if dtype == torch.bfloat16:  # counts the draws of stochastic rounding
        state.setdefault("step", torch.zeros((), dtype=torch.float32))
    else:
        state.pop("step", None)


def init_adamw_state(state: dict[str, Any], p: torch.Tensor) -> None:
    """AdamW's state, under torch's names."""
    state["step"] = torch.zeros((), dtype=torch.float32)
    state["exp_avg"] = torch.zeros_like(p, requires_grad=False)
    state["exp_avg_sq"] = torch.zeros_like(p, requires_grad=False)


def owned_states(named: Iterable[tuple[str, dict[str, Any]]]) -> list[OwnedTensor]:
    """What lies on its owner alone, of the states of parameters by name.

    Raises:
        RuntimeError: there are others of which no rank has the whole.
    """
    found = []
    for name, values in named:
        for key, value in values.items():
            if isinstance(value, OwnedTensor):
                found.append(value)
            elif isinstance(value, DTensor):
                raise RuntimeError(
                    f"dmuon: consolidate_state_dict is for DDP, but {key!r} of parameter {name!r} "
                    f"is sharded as {value.placements}; use torch.distributed.checkpoint, or "
                    "get_optimizer_state_dict with full_state_dict=True, on all ranks"
                )
    return found
