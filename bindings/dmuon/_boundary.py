"""Which parameters are dedicated by default, and which unit each belongs to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn as nn

Predicate = Callable[[str, nn.Parameter], bool]
BoundaryPredicate = Callable[[str, nn.Module], bool]

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
# Matrices that are tables or classifiers rather than linear maps between hidden states; Muon's
# authors leave them to AdamW.
_NOT_MUONS = ("embed", "lm_head", "head", "classifier", "score", "router", "gate", "wte", "wpe")


def ancestors(model: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    """(name, module) from the module at ``path`` up to the model itself, whose name is ''."""
    chain = [("", model)]
    module = model
    walked = ""
    for part in path.split(".") if path else []:
        module = module._modules[part]  # type: ignore[assignment]
        walked = f"{walked}.{part}" if walked else part
        chain.append((walked, module))
    return chain[::-1]


def is_block(model: nn.Module, path: str) -> bool:
    """Whether the module at ``path`` is an element of a ModuleList, ModuleDict or Sequential."""
    parent = path.rpartition(".")[0]
    return bool(path) and isinstance(model.get_submodule(parent), _CONTAINERS)


def default_predicate(model: nn.Module) -> Predicate:
    """2-D weights of the hidden layers: inside a block, more than one row and column, neither an
    embedding (nor tied to one) nor a head, router or gate by name."""
    tables = {
        id(p)
        for m in model.modules()
        if isinstance(m, (nn.Embedding, nn.EmbeddingBag))
        for p in m.parameters(recurse=False)
    }

    def predicate(name: str, parameter: nn.Parameter) -> bool:
        path, _, leaf = name.rpartition(".")
        if parameter.ndim != 2 or min(parameter.shape) < 2 or id(parameter) in tables:
            return False
        if "bias" in leaf or any(
            part == word or part.startswith("embed") or part.endswith("_embed")
            for part in path.split(".")
            for word in _NOT_MUONS
        ):
            return False
        return any(is_block(model, n) for n, _ in ancestors(model, path) if n)

    return predicate


def unit_of(
    model: nn.Module,
    name: str,
    predicate: BoundaryPredicate | None,
    strict: bool,
) -> str:
    """The name of the module whose unit parameter ``name`` belongs to.

    Without a predicate: the nearest ancestor of the module that holds the parameter which is an
    element of a container; failing that the holder itself. Not a single expert: which experts run
    differs between ranks, and all ranks must bring a unit's weights; then the block around them, or
    the module that holds the experts. With one: the nearest module, the holder
    included, for which ``predicate(name, module)`` is true; failing that the holder, or a
    ValueError if ``strict``.
    """
    holder = name.rpartition(".")[0]
    parent = holder.rpartition(".")[0]
    if isinstance(model.get_submodule(parent), nn.MultiheadAttention):
        holder = parent  # it reads out_proj.weight itself and never calls out_proj
    chain = ancestors(model, holder)
    if predicate is None:
        blocks = [n for n, _ in chain[1:] if is_block(model, n)]
        shared = [n for n in blocks if not _is_expert(n)]
        # Without any block around: the module that has the list of experts.
        outside = blocks[-1].rpartition(".")[0].rpartition(".")[0] if blocks else holder
        return shared[0] if shared else outside
    for candidate, module in chain:
        if predicate(candidate, module):
            return candidate
    if strict:
        raise ValueError(
            f"dmuon: no ancestor of parameter {name!r} satisfies hook_boundary_predicate "
            f"{_describe(predicate)}; candidates were {[n or '<model>' for n, _ in chain]}. "
            "Widen the predicate, or pass hook_boundary_strict=False to use the module that holds "
            "the parameter"
        )
    return holder


def _is_expert(path: str) -> bool:
    container = path.rpartition(".")[0].rpartition(".")[2]
    return "expert" in container.lower()


def _describe(predicate: Any) -> str:
    return getattr(predicate, "__qualname__", None) or repr(predicate)
