"""Which units' weights to bring before they are needed: those that followed last time."""

from __future__ import annotations

from typing import Any


class Prefetch:
    """Learns in which order units are entered, by forwards and backwards apart.

    What it says depends on the order of the units alone, which must be the same on all ranks: so
    all ranks bring the same units at the same places. In the first pass it says nothing.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._followers: dict[str, dict[Any, Any]] = {"forward": {}, "backward": {}}
        self._previous: Any = None
        self._ahead: dict[Any, None] = {}  # brought and not yet used

    def begin(self) -> None:
        """A pass starts, or has ended: what is entered next follows nothing.

        Weights that were brought for nothing are freed.
        """
        self._previous = None
        self._keep([])

    def entered(self, direction: str, unit: Any) -> None:
        """``unit`` has its weights and is going to use them: brings those expected next."""
        if not self.depth:
            return
        self._ahead.pop(unit, None)
        followers = self._followers[direction]
        if self._previous is not None and self._previous is not unit:
            followers[self._previous] = unit
        self._previous = unit
        expected = []
        for _ in range(self.depth):
            unit = followers.get(unit)
            if unit is None:
                break
            expected.append(unit)
        self._keep(expected)
        for unit in expected:
            if unit.bring(direction):
                unit.prefetches += 1
                self._ahead[unit] = None

    def _keep(self, expected: list[Any]) -> None:
        for unit in [unit for unit in self._ahead if unit not in expected]:
            del self._ahead[unit]
            unit.release_unused()
