"""Making torch's own ``fully_shard`` pass over dedicated parameters.

FSDP2 takes a module's parameters from ``named_parameters(recurse=False)``. A module that directly
holds dedicated parameters therefore gets, by a class swap as FSDP2 itself does, a view of that one
method that leaves them out for FSDP2's own code, until that has taken the module or the first
forward has run. Everybody else, and everything else, sees them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch.nn as nn

_NAMES = "_dmuon_hidden_names"
_FSDP2 = "torch.distributed.fsdp."
_swapped: dict[type, type] = {}


class DedicatedModule:
    """Mixed into the class of a module that directly holds dedicated parameters."""

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        named: Any = super().named_parameters(prefix, recurse, remove_duplicate)  # type: ignore[misc]
        hidden = self.__dict__.get(_NAMES)
        if recurse or not hidden or getattr(self, "_is_fsdp_managed_module", False):
            return named
        if not sys._getframe(1).f_globals.get("__name__", "").startswith(_FSDP2):
            return named
        return (pair for pair in named if pair[0].rpartition(".")[2] not in hidden)


def hide(module: nn.Module, name: str) -> None:
    """Hides ``module``'s parameter ``name`` from FSDP2 for now."""
    cls = module.__class__
    if not issubclass(cls, DedicatedModule):
        if cls not in _swapped:
            _swapped[cls] = type(
                cls.__name__, (DedicatedModule, cls), {"__module__": cls.__module__}
            )
        module.__class__ = _swapped[cls]
    module.__dict__.setdefault(_NAMES, set()).add(name)


def reveal(module: nn.Module) -> None:
    """Ends the hiding; the class stays, since others may have swapped it further."""
    module.__dict__.pop(_NAMES, None)
