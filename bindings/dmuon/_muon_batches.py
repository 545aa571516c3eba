"""In which order and portions a step updates matrices."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from ._owned_tensor import OwnedTensor
from ._unit import Unit

#: An update takes at least so many elements at once, if they are there. On a GPU it goes through
#: matrices of equal shapes together; on a CPU one by one.
AT_ONCE = {"cpu": 1 << 14}
AT_ONCE_ELSEWHERE = 1 << 20


@dataclasses.dataclass
class Row:
    """A parameter in its place: group, index in the group, index in the optimizer."""

    group: dict[str, Any]
    index: int
    number: int
    p: torch.Tensor


@dataclasses.dataclass
class Batch:
    """What one call of the update takes; lists of equal length, or empty where not needed."""

    weights: list[torch.Tensor] = dataclasses.field(default_factory=list)
    gradients: list[torch.Tensor] = dataclasses.field(default_factory=list)
    momenta: list[torch.Tensor] = dataclasses.field(default_factory=list)
    moments: list[torch.Tensor] = dataclasses.field(default_factory=list)
    blocks: list[Any] = dataclasses.field(default_factory=list)
    streams: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    #: Of half-precision parameters: the parameter, its local part, its master.
    halves: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = dataclasses.field(
        default_factory=list
    )

    @property
    def worth_while(self) -> bool:
        """Whether there is enough for an update."""
        enough = AT_ONCE.get(self.weights[0].device.type, AT_ONCE_ELSEWHERE)
        return sum(weight.numel() for weight in self.weights) >= enough


def rows_by_unit(groups: list[dict[str, Any]]) -> Iterator[tuple[Unit | None, list[Row]]]:
    """The muon groups' parameters, unit by unit; first those of none.

    With replicas in forward order, so that the units that are used first are published first;
    without, in the order in which gradients arrive, which is the other way round.
    """
    found: dict[Unit | None, list[Row]] = {None: []}
    number = 0
    for group in groups:
        if group["algorithm"] == "muon":
            for index, p in enumerate(group["params"]):
                source = p._gradient_source()[0] if isinstance(p, OwnedTensor) else None
                unit = source if isinstance(source, Unit) else None
                found.setdefault(unit, []).append(Row(group, index, number + index, p))
        number += len(group["params"])
    yield None, found.pop(None)
    units = [unit for unit in found if unit is not None]
    units.sort(key=lambda u: u.index if u.runtime.view.shape[0] > 1 else -u.index)
    for unit in units:
        yield unit, found[unit]
