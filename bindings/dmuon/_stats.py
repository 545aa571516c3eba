"""``dmuon.stats``: what a model's dedicated units have done so far, on this rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch.nn as nn

from ._runtime import Runtime, runtimes_of
from ._sizing import ALIGNMENT, Traffic
from ._unit import Unit

OPERATIONS = ("unshard", "publish", "reduce")


@dataclasses.dataclass
class UnitStats:
    """One unit: how often it moved, its size, and the seconds that this rank has waited for it.

    ``prefetches``: how many of the unshards were started ahead of their use.
    ``orthogonalizations``: of the matrices that this rank owns. ``bytes``: by operation and dtype,
    e.g. ``bytes["reduce"]["float32"].sent``. ``in_flight_s``: seconds between the start of an
    operation and its end, by operation; empty on CUDA, where only the device sees the end.
    """

    name: str
    unsharded_bytes: int
    unshards: float
    reduces: float
    publishes: float
    published_parameters: float
    unshard_wait_s: float
    publish_wait_s: float
    reduce_wait_s: float
    prefetches: float
    orthogonalizations: float
    bytes: dict[str, dict[str, Traffic]] = dataclasses.field(default_factory=dict)
    in_flight_s: dict[str, float] = dataclasses.field(default_factory=dict)

    def hidden(self, operation: str) -> float | None:
        """The share of an operation's time in flight ("unshard", "publish" or "reduce") in which
        this rank did not wait for it; None if it never ran or its time is not known."""
        if operation not in OPERATIONS:
            raise ValueError(f"dmuon: operation must be one of {OPERATIONS}, got {operation!r}")
        seconds = self.in_flight_s.get(operation, 0.0)
        if seconds <= 0:
            return None
        waited: float = getattr(self, f"{operation}_wait_s")
        return max(0.0, 1.0 - waited / seconds)


@dataclasses.dataclass
class Stats:
    """Counts since ``dedicate_params``, on this rank; bytes are payload on the wire.

    ``after - before`` is what happened in between, ``per_step()`` its mean.
    ``balance``: the cost of what each slot owns over the mean of all, slots by row;
    ``imbalance`` is the largest.
    """

    steps: float
    matrices: int
    owned: int
    orthogonalizations: float
    imbalance: float
    bytes: dict[str, dict[str, float]]
    units: list[UnitStats]
    balance: list[float] = dataclasses.field(default_factory=list)

    def __sub__(self, before: Stats) -> Stats:
        """What happened since ``before``, earlier stats of the same model on the same rank."""
        names, known = [u.name for u in self.units], [u.name for u in before.units]
        if known and names != known:
            raise ValueError(f"dmuon: stats of different models: units {names} and {known}")
        earlier: list[UnitStats | None] = [*before.units] or [None] * len(names)
        return dataclasses.replace(
            self,
            steps=self.steps - before.steps,
            orthogonalizations=self.orthogonalizations - before.orthogonalizations,
            bytes=_merge(self.bytes, before.bytes, lambda a, b: a - b),
            units=[_change(u, e, lambda a, b: a - b) for u, e in zip(self.units, earlier)],
        )

    def per_step(self) -> Stats:
        """The same, divided by the steps.

        Raises:
            ValueError: there was no step.
        """
        if self.steps <= 0:
            raise ValueError(f"dmuon: per_step() of stats over {self.steps} steps")

        def divide(value: float, _: float) -> float:
            return value / self.steps

        return dataclasses.replace(
            self,
            steps=1,
            orthogonalizations=self.orthogonalizations / self.steps,
            bytes=_merge(self.bytes, {}, divide),
            units=[_change(u, None, divide) for u in self.units],
        )

    def __str__(self) -> str:
        balance = " ".join(f"{share:.2f}" for share in self.balance)
        lines = [
            f"steps {_count(self.steps)}, matrices {self.matrices} of which {self.owned} owned "
            f"here, orthogonalizations here {_count(self.orthogonalizations)}, "
            f"owner imbalance {self.imbalance:.3f} (cost by slot over the mean: {balance})",
            f"{'role':<18}{'calls':>8}{'sent MiB':>12}{'received MiB':>14}",
        ]
        for role, c in self.bytes.items():
            sent, received = c["bytes_sent"] / 2**20, c["bytes_received"] / 2**20
            lines.append(f"{role:<18}{_count(c['calls']):>8}{sent:>12.2f}{received:>14.2f}")
        width = max([len(u.name) for u in self.units] + [4]) + 2
        lines.append(
            f"{'unit':<{width}}{'MiB':>8}{'unshards':>10}{'ahead':>7}{'reduces':>9}{'publishes':>11}"
            f"{'waited ms: unshard':>20}{'publish':>9}{'reduce':>9}"
            f"{'hidden: unshard':>17}{'publish':>9}{'reduce':>9}"
        )
        for u in self.units:
            shares = [u.hidden(operation) for operation in OPERATIONS]
            hidden = ["-" if share is None else f"{share:.0%}" for share in shares]
            lines.append(
                f"{u.name:<{width}}{u.unsharded_bytes / 2**20:>8.2f}{_count(u.unshards):>10}"
                f"{_count(u.prefetches):>7}{_count(u.reduces):>9}{_count(u.publishes):>11}"
                f"{u.unshard_wait_s * 1e3:>20.1f}{u.publish_wait_s * 1e3:>9.1f}"
                f"{u.reduce_wait_s * 1e3:>9.1f}{hidden[0]:>17}{hidden[1]:>9}{hidden[2]:>9}"
            )
        return "\n".join(lines)


def stats(model: nn.Module) -> Stats:
    """Counters of a model's dedicated units on this rank; ``print`` it for a table.

    ``bytes`` has one entry per role: "unshard" (shard group), "reduce" (shard, then replicate
    group), "publish" (replicate group), and "full" (full_tensor, checkpoints); each with calls,
    bytes_sent and bytes_received. Waits for gradients and updates that are
    still on their way.

    >>> before = dmuon.stats(model)
    >>> train(model, steps=10)
    >>> print((dmuon.stats(model) - before).per_step())

    Raises:
        ValueError: ``model`` has no dedicated parameters.
    """
    runtimes = runtimes_of(model)
    if not runtimes:
        raise ValueError(f"dmuon: {type(model).__name__} has no dedicated parameters")
    totals: dict[str, dict[str, float]] = {}
    units: list[UnitStats] = []
    for runtime in runtimes:
        runtime.settle()  # bytes are counted at an operation's end
        counters = _counters(runtime)
        _add_bytes(totals, counters)
        if runtime.bound:
            units += [_unit_stats(unit, counters) for unit in runtime.units]
    entries = [(r, e) for r in runtimes for e in r.plan.entries]
    return Stats(
        steps=max(r.steps for r in runtimes),
        matrices=len(entries),
        owned=sum(e.owner == r.view.slot for r, e in entries),
        orthogonalizations=sum(u.orthogonalized for r in runtimes for u in r.units),
        imbalance=max(r.plan.imbalance for r in runtimes),
        bytes=totals,
        units=units,
        balance=_balance(max(runtimes, key=lambda r: r.plan.imbalance)),
    )


def _counters(runtime: Runtime) -> dict[str, dict[str, Any]]:
    """Of every role's channel and mesh dimension, under "role/dimension"."""
    roles: dict[str, Any] = {
        "unshard": runtime.unshard_channel,
        "reduce": runtime.reduce_channel,
        "publish": runtime.publish_channel,
        "full": runtime.view.collectives,
    }
    return {
        f"{role}/{dimension}": counters
        for role, channel in roles.items()
        for dimension, counters in channel.counters().items()
    }


def _add_bytes(totals: dict[str, dict[str, float]], counters: dict[str, dict[str, Any]]) -> None:
    for role, by_operation in counters.items():
        total = totals.setdefault(
            role, dict.fromkeys(("calls", "tensors", "bytes_sent", "bytes_received"), 0)
        )
        for key in total:
            total[key] += by_operation["reduce"][key] + by_operation["broadcast"][key]


def _unit_stats(unit: Unit, counters: dict[str, dict[str, Any]]) -> UnitStats:
    moved: dict[str, dict[str, Traffic]] = {}
    seconds: dict[str, float] = {}
    for role, by_operation in counters.items():
        operation = role.partition("/")[0]
        taken = 0.0
        for label, values in by_operation["by_label"].items():
            if not label.startswith(f"{unit.core.name}:{operation}"):
                continue
            taken += values["seconds"]
            by_dtype = moved.setdefault(operation, {})
            for dtype, (sent, received) in _typed(unit, operation, values).items():
                old = by_dtype.get(dtype, Traffic(0, 0))
                by_dtype[dtype] = Traffic(old.sent + sent, old.received + received)
        if taken:  # two stages of a mesh are in flight together, the second one longer
            seconds[operation] = max(taken, seconds.get(operation, 0.0))
    return UnitStats(
        unit.core.name,
        unit.core.unsharded_bytes,
        prefetches=unit.prefetches,
        orthogonalizations=unit.orthogonalized,
        bytes=moved,
        in_flight_s=seconds,
        **unit.core.counters,
    )


def _typed(unit: Unit, operation: str, values: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Bytes by dtype. An unshard moves whole blocks: those are split as the weights in them are."""
    if operation != "unshard":
        return {str(d).removeprefix("torch."): b for d, b in values["bytes_by_dtype"].items()}
    column = unit.runtime.view.slot[1]
    parts: dict[str, list[int]] = {}
    for entry, live in zip(unit.entries, unit.lives):
        size = -(-live.numel() * live.element_size() // ALIGNMENT) * ALIGNMENT
        part = parts.setdefault(str(live.dtype).removeprefix("torch."), [0, 0])
        part[entry.owner[1] != column] += size
    own, others = (sum(part[k] for part in parts.values()) for k in (0, 1))
    return {
        dtype: (
            values["bytes_sent"] * here // max(own, 1),
            values["bytes_received"] * there // max(others, 1),
        )
        for dtype, (here, there) in parts.items()
    }


def _balance(runtime: Runtime) -> list[float]:
    costs = runtime.plan.slot_costs
    mean = sum(costs) / len(costs)
    return [cost / mean for cost in costs]


Operation = Callable[[float, float], float]


def _merge(now: Any, before: Any, operation: Operation) -> Any:
    """``operation`` on every number of a nest of dicts and Traffic; what is not in ``before`` was
    0."""
    if isinstance(now, dict):
        before = before or {}
        return {key: _merge(value, before.get(key), operation) for key, value in now.items()}
    if isinstance(now, Traffic):
        return Traffic(*(operation(a, b) for a, b in zip(now, before or (0, 0))))
    return operation(now, before or 0)


def _change(unit: UnitStats, before: UnitStats | None, operation: Operation) -> UnitStats:
    values = dataclasses.asdict(before) if before is not None else {}
    changed = {
        field.name: _merge(getattr(unit, field.name), values.get(field.name), operation)
        for field in dataclasses.fields(unit)
        if field.name not in ("name", "unsharded_bytes")
    }
    return dataclasses.replace(unit, **changed)


def _count(value: float) -> str:
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.1f}"
