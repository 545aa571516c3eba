"""What ``dmuon.Muon.step`` does to its parameters."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch

from . import _C
from ._following import FollowingOptimizer
from ._gradients import local_gradient, nonfinite
from ._muon_batches import Batch, Row, rows_by_unit
from ._muon_options import adamw_options, muon_hyper
from ._muon_state import local_part
from ._owned_tensor import OwnedTensor
from ._runtime import Runtime
from ._unit import Unit


class MuonStep(FollowingOptimizer):
    """The updates of both algorithms."""

    nonfinite: str
    skipped_steps: int
    _runtimes: list[Runtime]
    _configs: dict[Any, _C.NewtonSchulzConfig]
    _workspace: _C.NewtonSchulzWorkspace
    #: By the id of a parameter: the local tensor, and its version, that the fp32 master goes with.
    _masters_of: dict[int, tuple[weakref.ref[torch.Tensor], int]]

    def _found_nonfinite(self) -> bool:
        """Whether this step must be skipped; raises instead if that was asked for."""
        params = (p for group in self.param_groups for p in group["params"])
        found, bad = nonfinite(params)
        if not found:
            return False
        names = [self._names[id(p)] for p in bad]
        if self.nonfinite == "raise":
            raise RuntimeError(
                "dmuon: a gradient holds a NaN or an infinity: "
                + (f"here that of {names}" if names else "on another rank, which says whose")
                + "; nothing has been changed"
            )
        if names:
            step = max([runtime.steps for runtime in self._runtimes], default=0)
            warnings.warn(
                f"dmuon: all ranks skip the step after step {step}, the gradient of {names} holds "
                f"a NaN or an infinity ({self.skipped_steps + 1} skipped so far)",
                RuntimeWarning,
                stacklevel=3,
            )
        return True

    def _step_muon(self, updated: set[int], early: bool) -> None:
        """Adds the ``id`` of what is updated to ``updated``; publishes units at once if ``early``,
        so that they travel while others are orthogonalized."""
        batches: dict[int, tuple[dict[str, Any], Batch]] = {}
        done: list[Unit] = []
        for unit, rows in rows_by_unit(self.param_groups):
            for row in rows:
                gradient = local_gradient(row.p)
                if gradient is None:
                    continue
                updated.add(id(row.p))
                _, batch = batches.setdefault(id(row.group), (row.group, Batch()))
                self._add(batch, row, gradient)
            if unit is not None:
                done.append(unit)
            waiting = [batch for _, batch in batches.values() if batch.weights]
            if waiting and not any(batch.worth_while for batch in waiting):
                continue
            self._update(batches)
            if early:
                _publish(done, updated)
        self._update(batches)
        if early:
            _publish(done, updated)

    def _add(self, batch: Batch, row: Row, gradient: torch.Tensor) -> None:
        p, group = row.p, row.group
        state = self._states[p]
        rounded = "step" in state
        if rounded:
            state["step"] += 1  # on every rank
        local = local_part(p)
        if local.numel() == 0:
            return  # another rank's
        weight = self._weight(p)
        if "master" in state:
            batch.halves.append((p, local, weight))
        batch.weights.append(weight)
        batch.gradients.append(gradient)
        batch.momenta.append(local_part(state["momentum_buffer"]))
        blocks = blocks_of(group, row.index)
        batch.blocks.append(blocks)
        if group["variant"] != "none":
            batch.moments.append(local_part(state["second_momentum_buffer"]))
        if rounded:
            batch.streams.append((row.number, int(state["step"])))
        source = p._gradient_source()[0] if isinstance(p, OwnedTensor) else None
        if isinstance(source, Unit):
            stacked = p.shape[0] if p.ndim == 3 else 1
            source.orthogonalized += stacked * (len(blocks[1]) if blocks else 1)

    def _update(self, batches: dict[int, tuple[dict[str, Any], Batch]]) -> None:
        for group, batch in batches.values():
            if not batch.weights:
                continue
            _C.muon_update(
                batch.weights, batch.gradients, batch.momenta, muon_hyper(group, self._configs),
                second_moments=batch.moments, blocks=batch.blocks, streams=batch.streams,
                workspace=self._workspace,
            )  # fmt: skip
            for p, local, master in batch.halves:
                local.copy_(master)
                self._note_master(p)
        batches.clear()

    def _weight(self, p: torch.Tensor) -> torch.Tensor:
        """What the update changes on this rank: the fp32 master, or the parameter itself."""
        local = local_part(p)
        if "master" not in self._states[p]:
            return local.detach()
        master = local_part(self._states[p]["master"])
        seen, version = self._masters_of[id(p)]
        if seen() is not local or local._version != version:
            # Loaded or changed from outside since the last step. What is its rounding still stays:
            # a checkpoint's weights may be loaded after its masters.
            changed = master.to(local.dtype) != local
            master.copy_(torch.where(changed, local, master))
        return master

    def _note_master(self, p: torch.Tensor) -> None:
        """The master has the parameter's values of now, or more of their bits."""
        local = local_part(p)
        self._masters_of[id(p)] = weakref.ref(local), local._version

    @torch.no_grad()
    def _follow_weights(self) -> None:
        """Brings the masters up to weights that were changed from outside since the last step, or
        since long, where no gradient came: whoever loads them again takes them for the weights."""
        for p, state in self._states.items():
            if "master" in state:
                self._weight(p)

    def _step_adamw(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        states = [self._states[p] for p in params]
        _C.adamw_update(
            [local_part(p).detach() for p in params],
            [local_part(p.grad) for p in params],
            [local_part(s["exp_avg"]) for s in states],
            [local_part(s["exp_avg_sq"]) for s in states],
            [s["step"] for s in states],
            **adamw_options(group),
        )


def _publish(units: list[Unit], updated: set[int]) -> None:
    for unit in units:
        unit.publish(updated)
    units.clear()


def blocks_of(group: dict[str, Any], index: int) -> Any:
    """Of a parameter in a group, by its index there."""
    return None if group["blocks"] is None else group["blocks"][index]
