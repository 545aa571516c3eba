"""``Blocks``: which matrices a fused weight holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from . import _C

#: How a group keeps them, so that a state dict is made of plain values: None, or (dim, sizes).
Plain = tuple[int, list[int]] | None


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A fused weight, cut along ``dim`` into matrices of their own.

    Each block is orthogonalized by itself and has its own learning-rate adjustment, as if it were
    a parameter. Of an expert stack (E, m, n), each of the E matrices is cut.

    >>> dmuon.Muon(model, blocks={"*.qkv_proj.weight": dmuon.Blocks(0, [4096, 1024, 1024])})
    >>> dmuon.Muon(model, blocks={"*.q_proj.weight": dmuon.Blocks(0, 128)})  # one per head

    Args:
        dim: the dimension to cut; negative ones count from the end.
        sizes: of the blocks, in order; they must add up to the parameter's size. Or one number: as
            many blocks of that size as fit (``head_dim``), as in ``torch.split``.
    """

    dim: int
    sizes: int | Sequence[int]

    def __post_init__(self) -> None:
        sizes = self.sizes
        one = isinstance(sizes, int)
        listed = [sizes] if one else list(sizes)  # type: ignore[arg-type,list-item]
        if isinstance(self.dim, bool) or not isinstance(self.dim, int):
            raise ValueError(f"dmuon: Blocks: dim must be an integer, got {self.dim!r}")
        if not listed or any(
            isinstance(s, bool) or not isinstance(s, int) or s <= 0 for s in listed
        ):
            raise ValueError(
                f"dmuon: Blocks: sizes must be positive integers (or one), got {sizes!r}"
            )
        object.__setattr__(self, "sizes", sizes if one else tuple(listed))

    def of(self, shape: Sequence[int]) -> tuple[int, list[int]]:
        """(dim, sizes) for a parameter of ``shape``.

        Raises:
            ValueError: dim is none of the shape's, or the sizes don't add up.
        """
        if not isinstance(self.sizes, int):
            plain = (self.dim, list(self.sizes))
        else:
            size = shape[self.dim] if -len(shape) <= self.dim < len(shape) else self.sizes
            if size % self.sizes:
                raise ValueError(
                    f"dmuon: blocks of size {self.sizes} don't divide dimension {self.dim} of the "
                    f"parameter of shape {tuple(shape)}, which is {size}"
                )
            plain = (self.dim, [self.sizes] * (size // self.sizes))
        _C.check_blocks(plain, list(shape))
        return plain


def resolve(spec: Any, name: str, parameter: torch.Tensor) -> Plain:
    """The blocks of one parameter.

    ``spec``: None; ``Blocks``; ``{"dim": 0, "sizes": [...]}``; ``(dim, sizes)``; a mapping from
    name patterns (``fnmatch``; the first that fits) to any of these; a callable ``(name,
    parameter)`` that returns one of these.

    Raises:
        ValueError: blocks that don't fit, naming the parameter.
    """
    if spec is None:
        return None
    if callable(spec):
        return resolve(spec(name, parameter), name, parameter)
    if isinstance(spec, Mapping):
        if set(spec) == {"dim", "sizes"}:
            spec = Blocks(spec["dim"], spec["sizes"])
        else:
            found = next((v for k, v in spec.items() if fnmatchcase(name, k)), None)
            return resolve(found, name, parameter)
    elif isinstance(spec, (list, tuple)) and len(spec) == 2:
        spec = Blocks(spec[0], spec[1])
    if not isinstance(spec, Blocks):
        raise ValueError(
            f"dmuon: blocks of parameter {name!r} must be dmuon.Blocks(dim, sizes), a mapping from "
            f"names to such, or a callable, got {spec!r}"
        )
    try:
        return spec.of(parameter.shape)
    except ValueError as error:
        raise ValueError(f"{error} (parameter {name!r})") from None


def resolve_group(spec: Any, names: list[str], params: list[torch.Tensor]) -> list[Plain] | None:
    """One entry per parameter of a group; None if there are no blocks in it.

    A list gives them one by one.
    """
    if isinstance(spec, list):
        if len(spec) != len(params):
            raise ValueError(
                f"dmuon: blocks has {len(spec)} entries for a group of {len(params)} parameters"
            )
        entries = [resolve(s, n, p) for s, n, p in zip(spec, names, params)]
    else:
        entries = [resolve(spec, n, p) for n, p in zip(names, params)]
    return entries if any(e is not None for e in entries) else None


def blocks_by_name(entries: list[Plain], names: list[str]) -> dict[str, list[Any]]:
    """A group's blocks for a state dict: parameters may be in another order where it is loaded."""
    return {name: list(entry) for name, entry in zip(names, entries) if entry is not None}


def check_used(spec: Any, names: list[str]) -> None:
    """Refuses a pattern that is no parameter's: most likely a typing error."""
    if not isinstance(spec, Mapping) or set(spec) == {"dim", "sizes"}:
        return
    for pattern in spec:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"dmuon: blocks: no Muon parameter is called {pattern!r}; they are {names}"
            )
