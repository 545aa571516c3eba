"""``dmuon.stats``: what a model's dedicated units have done so far, on this rank."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.nn as nn

from ._runtime import Runtime, runtimes_of


@dataclasses.dataclass
class UnitStats:
    """One unit: how often it moved, its size, and the seconds that this rank has waited for it.

    ``prefetches``: how many of the unshards were started ahead of their use.
    """

    name: str
    unsharded_bytes: int
    unshards: int
    reduces: int
    publishes: int
    published_parameters: int
    unshard_wait_s: float
    publish_wait_s: float
    reduce_wait_s: float
    prefetches: int


@dataclasses.dataclass
class Stats:
    """Counts since ``dedicate_params``, on this rank; bytes are payload on the wire."""

    steps: int
    matrices: int
    owned: int
    orthogonalizations: int
    imbalance: float
    bytes: dict[str, dict[str, int]]
    units: list[UnitStats]

    def __str__(self) -> str:
        lines = [
            f"steps {self.steps}, matrices {self.matrices} of which {self.owned} owned here, "
            f"orthogonalizations here {self.orthogonalizations}, "
            f"owner imbalance {self.imbalance:.3f}",
            f"{'role':<18}{'calls':>8}{'sent MiB':>12}{'received MiB':>14}",
        ]
        for role, c in self.bytes.items():
            sent, received = c["bytes_sent"] / 2**20, c["bytes_received"] / 2**20
            lines.append(f"{role:<18}{c['calls']:>8}{sent:>12.2f}{received:>14.2f}")
        width = max([len(u.name) for u in self.units] + [4]) + 2
        lines.append(
            f"{'unit':<{width}}{'MiB':>8}{'unshards':>10}{'ahead':>7}{'reduces':>9}{'publishes':>11}"
            f"{'waited ms: unshard':>20}{'publish':>9}{'reduce':>9}"
        )
        for u in self.units:
            lines.append(
                f"{u.name:<{width}}{u.unsharded_bytes / 2**20:>8.2f}{u.unshards:>10}"
                f"{u.prefetches:>7}{u.reduces:>9}{u.publishes:>11}{u.unshard_wait_s * 1e3:>20.1f}"
                f"{u.publish_wait_s * 1e3:>9.1f}{u.reduce_wait_s * 1e3:>9.1f}"
            )
        return "\n".join(lines)


def stats(model: nn.Module) -> Stats:
    """Counters of a model's dedicated units on this rank; ``print`` it for a table.

    ``bytes`` has one entry per role: "unshard" (shard group), "reduce" (shard, then replicate
    group), "publish" (replicate group), and "full" (full_tensor, checkpoints); each with calls,
    bytes_sent and bytes_received. Waits for gradients and updates that are still on
    their way.

    Raises:
        ValueError: ``model`` has no dedicated parameters.
    """
    runtimes = runtimes_of(model)
    if not runtimes:
        raise ValueError(f"dmuon: {type(model).__name__} has no dedicated parameters")
    totals: dict[str, dict[str, int]] = {}
    units: list[UnitStats] = []
    for runtime in runtimes:
        runtime.settle()  # bytes are counted at an operation's end
        _add_bytes(totals, runtime)
        if runtime.bound:
            units += [
                UnitStats(
                    u.core.name, u.core.unsharded_bytes, prefetches=u.prefetches, **u.core.counters
                )
                for u in runtime.units
            ]
    entries = [(r, e) for r in runtimes for e in r.plan.entries]
    return Stats(
        steps=max(r.steps for r in runtimes),
        matrices=len(entries),
        owned=sum(e.owner == r.view.slot for r, e in entries),
        orthogonalizations=sum(r.orthogonalized for r in runtimes),
        imbalance=max(r.plan.imbalance for r in runtimes),
        bytes=totals,
        units=units,
    )


def _add_bytes(totals: dict[str, dict[str, int]], runtime: Runtime) -> None:
    roles: dict[str, Any] = {
        "unshard": runtime.unshard_channel,
        "reduce": runtime.reduce_channel,
        "publish": runtime.publish_channel,
        "full": runtime.view.collectives,
    }
    for role, channel in roles.items():
        for dimension, counters in channel.counters().items():
            for operation in counters.values():
                total = totals.setdefault(f"{role}/{dimension}", dict.fromkeys(operation, 0))
                for key, value in operation.items():
                    total[key] += value
