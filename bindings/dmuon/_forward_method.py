"""Methods other than ``forward`` that use a unit's weights."""

from __future__ import annotations

import functools
from typing import Any

import torch.nn as nn

from ._runtime import units_at


def register_forward_method(module: nn.Module, name: str) -> None:
    """Makes a method of ``module`` an entry like ``forward``: its unit's weights are there in it.

    For methods that read dedicated weights themselves, such as ``encode`` or ``get_features``; one
    that only calls submodules needs nothing. The counterpart of torch's
    ``register_fsdp_forward_method``, which is to be called as well where ``module`` also has
    parameters of ``fully_shard``, in either order.

    Args:
        module: a unit's block, a module that holds dedicated parameters, or one between them. Call
            ``dedicate_params`` first.
        name: of the method. It is replaced on this object alone.

    Raises:
        AttributeError: ``module`` has no such method.
        ValueError: ``module`` is not part of a unit.
    """
    method = getattr(module, name)
    if not callable(method):
        raise AttributeError(
            f"dmuon: {type(module).__name__}.{name} is no method but {type(method).__name__}"
        )
    if not units_at(module):
        raise ValueError(
            f"dmuon: this {type(module).__name__} is not part of a unit: call dedicate_params "
            "first, with a hook_boundary_predicate that takes it or a module above it"
        )

    from ._hooks import post_block, pre_block

    @functools.wraps(method)
    def entry(*args: Any, **kwargs: Any) -> Any:
        entered = []
        output = None
        try:
            for unit in units_at(module):
                entered.append(unit)
                changed = pre_block(unit, module, args, kwargs)
                if changed is not None:
                    args, kwargs = changed
            output = method(*args, **kwargs)
        finally:
            for unit in reversed(entered):
                changed = post_block(unit, module, args, output)
                output = output if changed is None else changed
        return output

    setattr(module, name, entry)
