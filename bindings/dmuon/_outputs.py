"""The tensors in what modules take and return."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map


def register_pre_backward(output: Any, hook: Any) -> bool:
    """Hooks every tensor in ``output`` that requires a gradient; False if ``output`` holds objects
    that could not be looked into."""
    seen_all = True
    for leaf in _leaves(output):
        if isinstance(leaf, torch.Tensor):
            if leaf.requires_grad:
                leaf.register_hook(hook)
        elif leaf is not None and not isinstance(leaf, (bool, int, float, complex, str, bytes)):
            seen_all = False
    return seen_all


def _leaves(output: Any) -> Iterator[Any]:
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor) or leaf is None:
            yield leaf
        elif isinstance(leaf, Mapping):  # also those that pytree does not know
            yield from _leaves(list(leaf.values()))
        elif isinstance(leaf, (list, tuple)):
            yield from _leaves(list(leaf))
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from _leaves(getattr(leaf, field.name))
        else:
            yield leaf


def cast(values: Any, dtype: torch.dtype) -> Any:
    """``values`` with all floating-point tensors in another dtype."""
    return tree_map(
        lambda v: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v,
        values,
    )
