"""Loading an optimizer's state: whether it fits, and into the tensors that are there."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from ._owned_tensor import OwnedTensor

# What torch's Muon and AdamW keep in their groups, and dmuon has no use for.
_TORCHS_OPTIONS = {
    "muon": ("eps",),
    "adamw": (
        "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused",
        "decoupled_weight_decay",
    ),
}  # fmt: skip
_OWN_STATE = {"muon": "momentum_buffer", "adamw": "exp_avg"}


def take_options(group: dict[str, Any], own: dict[str, Any]) -> None:
    """Completes a loaded group by the options that it lacks, as one of torch's does.

    Raises:
        ValueError: it asks for what dmuon's AdamW does not do.
    """
    for key, value in own.items():
        group.setdefault(key, value)
    if group["algorithm"] == "adamw":
        decoupled = group.get("decoupled_weight_decay", True) or not float(group["weight_decay"])
        refused = [key for key in ("amsgrad", "maximize") if group.get(key)]
        if refused or not decoupled:
            raise ValueError(
                f"dmuon: the loaded group {group.get('name')!r} was trained with "
                f"{refused[0] + '=True' if refused else 'decoupled_weight_decay=False'}, which "
                "dmuon's AdamW does not do; set the option in the state dict's group, or load the "
                "weights alone"
            )
    for key in _TORCHS_OPTIONS[group["algorithm"]]:
        if key not in own:
            group.pop(key, None)


def check_state(loaded: dict[str, Any], state: dict[str, Any], name: str, algorithm: str) -> None:
    """Raises ValueError, naming the parameter, unless ``loaded`` can go into ``state``."""
    if loaded and _OWN_STATE[algorithm] not in loaded:
        raise ValueError(
            f"dmuon: the loaded state of parameter {name!r} is {sorted(loaded)}, without "
            f"{_OWN_STATE[algorithm]!r}: another algorithm's, but the parameter is in a group of "
            f'"{algorithm}". Give it to the same algorithm as before, or load the weights alone'
        )
    for key, value in loaded.items():
        old = state.get(key)
        if not isinstance(old, torch.Tensor) or not isinstance(value, torch.Tensor):
            continue
        if value.shape != old.shape:
            raise ValueError(
                f"dmuon: the loaded {key!r} of parameter {name!r} has shape {tuple(value.shape)}; "
                f"needed is {tuple(old.shape)}"
            )


def copy_state(loaded: dict[str, Any], state: dict[str, Any]) -> None:
    """Puts values into the tensors that are there, whose owners and shards stay."""
    for key, value in loaded.items():
        old = state.get(key)
        if not isinstance(old, torch.Tensor):
            state[key] = value
        elif isinstance(value, torch.Tensor):
            ours = isinstance(old, OwnedTensor) or isinstance(value, DTensor)
            if isinstance(old, DTensor) and not ours:
                value = distribute_tensor(
                    value.to(old.device), old.device_mesh, old.placements, src_data_rank=None
                )
            old.copy_(value)
        elif value is not None:  # a plain number of steps; None: no gradient has come yet
            old.fill_(value)
