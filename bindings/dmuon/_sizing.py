"""What a step sends and how much memory it needs, from a plan alone: to size a job beforehand."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch

from . import _C

ALIGNMENT = 64  # bytes, of every parameter in a unit's unsharded buffer
_FP32 = 4


class Traffic(NamedTuple):
    """Payload bytes of one rank."""

    sent: float
    received: float


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """Bytes that the dedicated parameters need on one rank; ``print`` it for a table.

    Between steps there are ``weights`` (as they rest on their owner), ``columns`` (copies in the
    compute dtype on the owner's column), ``masters`` (fp32, of fp16 and bf16 parameters),
    ``momentum``, ``second_moment`` and ``workspace`` (of the orthogonalization). In a step come
    ``unsharded`` (whole weights, the most at a time), ``unit_gradients`` (whole, the largest
    unit's) and ``gradients`` (summed, on their owner, until ``zero_grad``). ``peak`` is the most of
    all at one time, which is less than the sum: units are freed as gradients arrive.
    """

    slot: tuple[int, int]
    weights: int
    columns: int
    masters: int
    momentum: int
    second_moment: int
    workspace: int
    unsharded: int
    unit_gradients: int
    gradients: int
    peak: int

    @property
    def at_rest(self) -> int:
        """Between ``zero_grad`` and the next forward."""
        return (
            self.weights
            + self.columns
            + self.masters
            + self.momentum
            + self.second_moment
            + self.workspace
        )

    def __str__(self) -> str:
        rows = {**dataclasses.asdict(self), "at_rest": self.at_rest}
        lines = [f"slot {rows.pop('slot')}, MiB"]
        lines += [f"{name.replace('_', ' '):<16}{v / 2**20:>12.2f}" for name, v in rows.items()]
        return "\n".join(lines)


class _Matrix(NamedTuple):
    """A parameter of a plan, with its sizes in bytes."""

    entry: _C.PlanEntry
    numel: int
    rest_item: int
    compute_item: int
    wire_item: int

    @property
    def compute(self) -> int:
        return self.numel * self.compute_item

    @property
    def wire(self) -> int:
        return self.numel * self.wire_item

    @property
    def rest(self) -> int:
        return self.numel * self.rest_item

    @property
    def aligned(self) -> int:
        return -(-self.compute // ALIGNMENT) * ALIGNMENT


def step_traffic(
    plan: _C.OwnershipPlan,
    slot: tuple[int, int],
    *,
    reshard_after_forward: bool = True,
    mp_policy: Any = None,
    frozen: Collection[str] = (),
) -> dict[str, Traffic]:
    """Payload bytes that the rank at ``slot`` moves in one step: a forward, a backward, an update.

    With N = R G ranks, P elements of b bytes: on average over ranks, each unshard and the reduce
    inside the shard groups (G - 1)/G P b; the reduce across replicas and the publish each
    (R - 1)/R P/G b. ``reshard_after_forward`` has two unshards, keeping the weights one. Frozen
    parameters are neither reduced nor published.

    Args:
        plan: as ``dedicate_params`` returns it; or ``OwnershipPlan([(name, unit, shape, bytes),
            ...], R, G)``, for ranks that need not be there.
        slot: (replicate, shard), the rank's coordinate.
        reshard_after_forward, mp_policy: as for ``dedicate_params``; of ``mp_policy``,
            ``param_dtype`` and ``reduce_dtype`` count.
        frozen: names of parameters that require no gradient.

    Returns:
        By the keys of ``Stats.bytes``, without what moves nothing.
    """
    replicas, shards = plan.mesh_shape
    row, column = _check_slot(plan, slot)
    legs = 2 if reshard_after_forward else 1
    totals: dict[str, list[int]] = {}

    def broadcast(key: str, size: int, owned: bool, ranks: int) -> None:
        total = totals.setdefault(key, [0, 0])
        total[0] += size * (ranks - 1) * owned
        total[1] += size * (not owned)

    for m in _matrices(plan, mp_policy):
        r, g = m.entry.owner
        if shards > 1:
            broadcast("unshard/shard", legs * m.aligned, g == column, shards)
        if m.entry.name in frozen:
            continue
        if shards > 1:
            broadcast("reduce/shard", m.wire, g == column, shards)
        if replicas > 1 and g == column:
            broadcast("reduce/replicate", m.wire, r == row, replicas)
            broadcast("publish/replicate", m.compute, r == row, replicas)
    # A reduction is a broadcast backwards: what its owner sends there, it receives here.
    return {
        key: Traffic(*(reversed(total) if key.startswith("reduce") else total))
        for key, total in totals.items()
    }


def step_memory(
    plan: _C.OwnershipPlan,
    slot: tuple[int, int] | None = None,
    *,
    reshard_after_forward: bool = True,
    prefetch: int = 1,
    mp_policy: Any = None,
    momentum_dtype: torch.dtype | None = None,
    variant: str = "none",
) -> StepMemory:
    """Bytes that the dedicated parameters need on a rank, at rest and in a step.

    Not in it: activations, what FSDP2 holds for its own parameters, and payload on its way (see
    ``DMUON_POOL_SLOTS``). The workspace is that of the CPU, where matrices are orthogonalized one
    by one. Units are taken in the order of their names, numbers as numbers.

    Args:
        plan: as for ``step_traffic``.
        slot: (replicate, shard); None: the one with the highest peak.
        reshard_after_forward, prefetch, mp_policy: as for ``dedicate_params``.
        momentum_dtype, variant: as for ``Muon``.
    """
    replicas, shards = plan.mesh_shape
    slots = [(r, g) for r in range(replicas) for g in range(shards)]
    if slot is not None:
        slots = [_check_slot(plan, slot)]
    matrices = _matrices(plan, mp_policy)
    momentum_item = _itemsize(momentum_dtype)
    found = []
    for at in slots:
        owned = [m for m in matrices if m.entry.owner == at]
        at_rest = {
            "weights": sum(m.rest for m in owned),
            "columns": sum(_column_copy(m, at, shards > 1) for m in matrices),
            "masters": sum(m.numel * _FP32 for m in owned if m.rest_item < _FP32),
            "momentum": sum(m.numel * (momentum_item or max(m.rest_item, _FP32)) for m in owned),
            "second_moment": sum(_second_moment(m, variant) for m in owned),
            "workspace": _workspace(owned),
        }
        in_step = _in_step(_units(matrices), at, shards > 1, reshard_after_forward, prefetch)
        in_step["peak"] += sum(at_rest.values())
        found.append(StepMemory(slot=at, **at_rest, **in_step))
    return max(found, key=lambda memory: memory.peak)


def _in_step(
    units: list[list[_Matrix]], slot: tuple[int, int], sharded: bool, reshard: bool, prefetch: int
) -> dict[str, int]:
    """The fields of ``StepMemory`` that a step adds; ``peak`` without what is there at rest."""
    whole = [sum(m.aligned for m in unit) if sharded else 0 for unit in units]
    gradients = [sum(m.compute for m in unit) for unit in units]
    reduced = [sum(m.rest for m in unit if m.entry.owner == slot) for unit in units]
    ahead = prefetch if sharded else 0
    in_forward, in_backward = [0], [0]
    for i in range(len(units)):
        in_forward.append(sum(whole[i : i + ahead + 1] if reshard else whole[: i + 1]))
        # Backward goes from the last unit down. A unit's last gradient comes while its weights are
        # there; the gradients of the units after it have been summed, those of others are gone.
        there = whole[max(i - ahead, 0) : i + 1] if reshard else whole[: i + 1]
        in_backward.append(sum(there) + gradients[i] + sum(reduced[i + 1 :]))
    return {
        "unsharded": max(in_forward),
        "unit_gradients": max([0, *gradients]),
        "gradients": sum(reduced),
        "peak": max([*in_forward, *in_backward, sum(reduced)]),
    }


def _check_slot(plan: _C.OwnershipPlan, slot: tuple[int, int]) -> tuple[int, int]:
    replicas, shards = plan.mesh_shape
    if not (0 <= slot[0] < replicas and 0 <= slot[1] < shards):
        raise ValueError(
            f"dmuon: slot {slot} is not on the plan's mesh: slots are (0, 0) to "
            f"({replicas - 1}, {shards - 1})"
        )
    return slot


def _itemsize(dtype: torch.dtype | None) -> int | None:
    return None if dtype is None else dtype.itemsize


def _matrices(plan: _C.OwnershipPlan, mp_policy: Any) -> list[_Matrix]:
    compute = _itemsize(getattr(mp_policy, "param_dtype", None))
    wire = _itemsize(getattr(mp_policy, "reduce_dtype", None))
    found = []
    for entry in plan.entries:
        numel = math.prod(entry.shape)
        rest = entry.bytes // numel
        item = compute or rest
        found.append(_Matrix(entry, numel, rest, item, wire or item))
    return found


def _column_copy(m: _Matrix, slot: tuple[int, int], sharded: bool) -> int:
    if not sharded:
        return m.aligned  # the unsharded buffer itself, which stays
    if m.entry.owner[1] != slot[1] or (m.entry.owner == slot and m.rest_item == m.compute_item):
        return 0
    return m.compute


def _second_moment(m: _Matrix, variant: str) -> int:
    wide = max(m.rest_item, _FP32)
    shape = _C.second_moment_shape(variant, list(m.entry.shape), None)
    return math.prod(shape) * wide if shape else 0


def _workspace(owned: list[_Matrix]) -> int:
    """Direction, X and another of its shape, four of (s, s), s <= l; a stack also its result."""
    places = [0, 0, 0]  # whole, (m, n), (s, s)
    for m in owned:
        shape = m.entry.shape
        rows, columns = shape[-2:] if len(shape) == 3 else (shape[0], m.numel // shape[0])
        stacked = 2 if len(shape) == 3 else 1
        sizes = (m.numel * stacked, 2 * rows * columns, 4 * min(rows, columns) ** 2)
        places = [max(place, size * max(m.rest_item, _FP32)) for place, size in zip(places, sizes)]
    return sum(places)


def _units(matrices: list[_Matrix]) -> list[list[_Matrix]]:
    by_name: dict[str, list[_Matrix]] = {}
    for m in matrices:
        by_name.setdefault(m.entry.unit, []).append(m)
    number: Callable[[str], Any] = lambda part: (0, int(part)) if part.isdigit() else (1, part)  # noqa: E731
    order = sorted(by_name, key=lambda name: [number(p) for p in re.split(r"(\d+)", name) if p])
    return [by_name[name] for name in order]
