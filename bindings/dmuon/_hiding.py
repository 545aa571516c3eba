"""Making torch's own ``fully_shard`` pass over dedicated parameters.

FSDP2 takes a module's parameters from ``named_parameters(recurse=False)``. A module that directly
holds dedicated parameters therefore gets, by a class swap as FSDP2 itself does, a view of that one
method that leaves them out, until FSDP2 has taken the module, the optimizer has been built or the
first forward has run. Everything else (``named_parameters()``, ``state_dict()``, ...) stays true.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.nn as nn

_NAMES = "_dmuon_hidden_names"
_swapped: dict[type, type] = {}


class DedicatedModule:
    """Mixed into the class of a module that directly holds dedicated parameters."""

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        named: Any = super().named_parameters(prefix, recurse, remove_duplicate)  # type: ignore[misc]
        hidden = self.__dict__.get(_NAMES)
        if recurse or not hidden or getattr(self, "_is_fsdp_managed_module", False):
            yield from named
            return
        for name, parameter in named:
            if name.rpartition(".")[2] not in hidden:
                yield name, parameter


def hide(module: nn.Module, name: str) -> None:
    """Leaves ``name`` out of ``module.named_parameters(recurse=False)`` for now."""
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
