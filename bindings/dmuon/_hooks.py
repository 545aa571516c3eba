"""The forward hooks that modules carry: which module's forward a unit's weights come and go with.

``torch.compile`` traces what stands in the hooks below a block, so that a block is one graph, and
the same graph for every block like it: nothing there may differ from unit to unit. What a unit does
at its block's ends is kept out, as FSDP2 keeps its own hooks out. Imported at first use, since it
brings Dynamo with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
import torch.nn as nn


def register_unit(unit: Any, block: nn.Module, inner: Iterable[nn.Module]) -> None:
    """``unit``'s weights come with a forward of ``block``, or of an ``inner`` module outside it."""
    block.register_forward_pre_hook(MethodType(pre_block, unit), with_kwargs=True)
    block.register_forward_hook(MethodType(post_block, unit), always_call=True)
    for module in inner:
        module.register_forward_pre_hook(MethodType(_pre_inner, unit), with_kwargs=True)


def register_model(runtime: Any, model: nn.Module) -> None:
    """Tells ``runtime`` of the forwards of ``model``."""
    model.register_forward_pre_hook(MethodType(_pre_model, runtime))
    model.register_forward_hook(MethodType(_post_model, runtime))


def pre_block(unit: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """The start of a forward of the block; returns changed (args, kwargs) or None."""
    unit.depth += 1
    return _enter(unit, args, kwargs) if unit.depth == 1 else None


def post_block(unit: Any, module: nn.Module, args: Any, output: Any) -> Any:
    """The end of it; returns a changed output or None."""
    if unit.depth == 0:  # a hook before the pre-forward hook failed
        return None
    unit.depth -= 1
    return _leave(unit, output) if unit.depth == 0 else None


def _pre_inner(unit: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return _open(unit, module, args, kwargs) if unit.depth == 0 else None


@torch.compiler.disable(reason="a hook of dmuon")
def _enter(unit: Any, args: Any, kwargs: Any) -> Any:
    return unit.enter(args, kwargs)


@torch.compiler.disable(reason="a hook of dmuon")
def _leave(unit: Any, output: Any) -> Any:
    return unit.leave(output)


@torch.compiler.disable(reason="a hook of dmuon")
def _open(unit: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """An inner module's forward stands for the block's, until it ends."""
    if module not in unit.openers:
        # Not on all inner modules from the start: Dynamo compiles again for every module whose
        # forward hook is always called.
        module.register_forward_hook(MethodType(_close, unit), always_call=True)
        unit.openers.add(module)
    unit.opener = module
    return pre_block(unit, module, args, kwargs)


def _close(unit: Any, module: nn.Module, args: Any, output: Any) -> Any:
    if unit.opener is not module:
        return None
    unit.opener = None
    return post_block(unit, module, args, output)


@torch.compiler.disable(reason="a hook of dmuon")
def _pre_model(runtime: Any, module: nn.Module, args: Any) -> None:
    runtime.pre_forward_model()


@torch.compiler.disable(reason="a hook of dmuon")
def _post_model(runtime: Any, module: nn.Module, args: Any, output: Any) -> None:
    runtime.post_forward_model(output)
