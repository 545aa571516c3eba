"""What is read from FSDP2's state: policy, mesh and gradient switches. Nothing is ever written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from ._boundary import ancestors


def param_groups(module: nn.Module) -> list[Any]:
    """FSDP2's parameter groups of a wrapped module; empty for any other."""
    if not isinstance(module, FSDPModule):
        return []
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.13 and later
    if groups is None:
        groups = [state._fsdp_param_group]
    return [g for g in groups if g is not None]


def named_sharded(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """``model.named_parameters()`` as they are at rest, also while FSDP2 has put whole ones in."""
    sharded = {
        id(whole): p.sharded_param
        for module in model.modules()
        for group in param_groups(module)
        for p in group.fsdp_params
        if (whole := getattr(p, "_unsharded_param", None)) is not None
    }
    return [(name, sharded.get(id(p), p)) for name, p in model.named_parameters()]


@dataclass
class Enclosing:
    """The fully_shard modules that a unit answers to."""

    policy: Any = None  # of the nearest wrapped module at or above the unit
    switches: Any = None  # the parameter group whose gradient switches count
    mesh: DeviceMesh | None = None

    @property
    def reduce(self) -> bool:
        return self.switches is None or bool(self.switches.reduce_grads)

    @property
    def all_reduce(self) -> bool:
        return self.switches is None or bool(self.switches.all_reduce_grads)

    @property
    def divide_factor(self) -> float | None:
        return None if self.switches is None else self.switches.gradient_divide_factor


def enclosing(model: nn.Module, path: str) -> Enclosing:
    """Looks at ``path`` and its ancestors, nearest first.

    A wrapped block all of whose parameters are dedicated has no parameter group to hold switches;
    then the next one above counts, or else any in the model (the switches are set recursively).
    """
    found = Enclosing()
    for _, module in ancestors(model, path):
        if not isinstance(module, FSDPModule):
            continue
        if found.policy is None:
            state: Any = module._get_fsdp_state()
            found.policy = state._mp_policy
        if found.switches is None:
            found.switches = next(iter(param_groups(module)), None)
    if found.switches is None:
        for module in model.modules():
            found.switches = next(iter(param_groups(module)), None)
            if found.switches is not None:
                break
    if found.switches is not None:
        found.mesh = found.switches.mesh_info.mesh
    return found
