"""Whole weights between steps, for generation, evaluation and inspection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from ._runtime import runtimes_of
from ._unit import Unit


@contextmanager
def full_params(model: nn.Module) -> Iterator[None]:
    """Context: all dedicated weights of ``model`` are plain, whole tensors in their modules.

    They are brought once; forwards inside, as many as there are, bring and free nothing. FSDP2's
    own parameters are unsharded at the start, too (a forward inside reshards them as usual).
    Runs under ``torch.no_grad``; may be nested. Read only: a weight that was changed is an error at
    the end, since the change would be lost. A collective: every rank must enter.

    Raises:
        ValueError: ``model`` has no dedicated parameters.
        RuntimeError: a forward or backward is under way; gradients enabled for a forward inside, or
            a step of the optimizer inside; a weight was changed.
    """
    runtimes = runtimes_of(model)
    if not runtimes:
        raise ValueError(f"dmuon: {type(model).__name__} has no dedicated parameters")
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    held: list[Unit] = []
    changed: list[str] = []
    with torch.no_grad():
        try:
            for module in sharded:
                module.unshard()
            for runtime in runtimes:
                runtime.enter_forward()
                for unit in runtime.units:
                    unit.hold()
                    held.append(unit)
            yield
        finally:
            for unit in reversed(held):
                changed += unit.let_go()
            for module in sharded:
                module.reshard()
    if changed:
        raise RuntimeError(
            f"dmuon: {changed} changed inside full_params, and the change is lost: write to the "
            "parameter outside of it (p.copy_(tensor)), or use optimizer.edit_weight"
        )
