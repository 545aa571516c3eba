"""All units of one ``dedicate_params``: the hooks in the modules, and the phases of an iteration.

Hooks sit on a unit's block and, as a net for modules called from elsewhere, on every module that
holds a dedicated parameter.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any, Protocol

import torch
import torch.nn as nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from . import _C
from ._blocks import Plain
from ._fsdp import enclosing
from ._hiding import reveal
from ._mesh import MeshView, format_mesh
from ._outputs import register_pre_backward
from ._owned_tensor import OwnedTensor
from ._prefetch import Prefetch
from ._unit import Entry, Unit

_RUNTIMES = "_dmuon_runtimes"
_UNITS = "_dmuon_units"
_ORDER = (
    "the order is: dmuon.dedicate_params(model, mesh, ...), then fully_shard or "
    "DistributedDataParallel, then dmuon.Muon(model, ...)"
)


class Follower(Protocol):
    """What holds parameters of a model that may be wrapped, and so exchanged, later."""

    def follow_model(self) -> None:
        """Takes the parameters that the model has now."""


class Runtime:
    """Everything that one call of ``dedicate_params`` set up."""

    def __init__(
        self,
        model: nn.Module,
        view: MeshView,
        plan: _C.OwnershipPlan,
        units: list[tuple[str, list[Entry], bool]],
        *,
        mp_policy: Any,
        prefetch: int,
    ) -> None:
        self.model = model
        self.view = view
        self.plan = plan
        self.mp_policy = mp_policy
        self.prefetch = Prefetch(prefetch if view.shape[1] > 1 else 0)
        self.reduce_channel = view.channel("reduce")
        self.unshard_channel = view.channel("unshard")
        self.publish_channel = view.channel("publish")
        self.units = [
            Unit(self, i, name, entries, reshard)
            for i, (name, entries, reshard) in enumerate(units)
        ]
        self.core: _C.DedicatedModel
        self.bound = False
        #: Told once, when the model is used for the first time and wrapped for good.
        self.followers: list[weakref.ref[Follower]] = []  # in the same order on all ranks
        self._alive: weakref.ref[_Token] = weakref.ref(_Token())
        self.no_sync_depth = 0
        self.ddp_sync = True  # DDP's own no_sync was not in force in the last forward
        self.steps = 0
        view.runtime = weakref.ref(self)
        model.__dict__.setdefault(_RUNTIMES, []).append(self)
        self._register_hooks()

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError(
            "dmuon: a model with dedicated parameters cannot be copied, since its units and hooks "
            "belong to this one: copy it before dedicate_params, and dedicate the parameters of "
            "both, or load a full state (get_model_state_dict) into another"
        )

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters at rest, in unit order."""
        return [entry.rest for unit in self.units for entry in unit.entries]

    def blocks(self) -> dict[int, Plain]:
        """What ``dedicate_params`` was told of fused weights; keys: ``id`` of the resting ones."""
        entries = (entry for unit in self.units for entry in unit.entries)
        return {id(entry.rest): entry.blocks for entry in entries}

    def _register_hooks(self) -> None:
        from ._hooks import register_model, register_unit

        for unit in self.units:
            holders = [module for entry in unit.entries for module, _ in entry.places]
            block, *inner = self._between(unit.name, holders)
            for module in (block, *inner):
                module.__dict__.setdefault(_UNITS, []).append(unit)
            register_unit(unit, block, inner)
        # The outermost output, so that the end of the backward is the end of the outer one even
        # where re-entrant checkpointing runs backwards inside it.
        register_model(self, self.model)
        self.model.register_state_dict_pre_hook(lambda *_: self.repair())

    def _between(self, unit: str, holders: list[nn.Module]) -> list[nn.Module]:
        """The unit's block, the modules that hold its parameters, and all between: any of them may
        be called from outside, or read a weight below it."""
        block = self.model.get_submodule(unit)
        wanted = {id(module) for module in holders}
        found: dict[nn.Module, None] = {block: None, **dict.fromkeys(holders)}
        for name, module in block.named_modules():
            if id(module) not in wanted:
                continue
            for path in itertools.accumulate(name.split("."), "{}.{}".format):
                found[block.get_submodule(path)] = None
        return list(found)

    def pre_forward_model(self) -> None:
        if torch.is_grad_enabled():  # as DDP does, which decides in the forward
            ddp = getattr(DistributedDataParallel, "_active_ddp_module", None)
            self.ddp_sync = ddp is None or ddp.require_backward_grad_sync
        if not self.bound or not self.core.in_backward:
            self.prefetch.begin()

    def post_forward_model(self, output: Any) -> None:
        if not self.bound:
            return  # no unit has been used yet
        if not self.core.in_backward:
            self.prefetch.begin()
        if torch.is_grad_enabled():
            register_pre_backward(output, lambda _: self.enter_backward())

    # --- binding -----------------------------------------------------------------------------

    def check(self) -> None:
        """Raises if the dedicated parameters, or the wrapping so far, are not as they must be."""
        for unit in self.units:
            for entry in unit.entries:
                self._check(entry)
            other = enclosing(self.model, unit.name).mesh
            if other is not None and (
                other.mesh.shape != self.view.mesh.mesh.shape
                or not torch.equal(other.mesh, self.view.mesh.mesh)
            ):
                raise ValueError(
                    f"dmuon: unit {unit.name or '<model>'!r} is dedicated on "
                    f"{format_mesh(self.view.mesh)}, but fully_shard around it uses "
                    f"{format_mesh(other)}; give both the same mesh"
                )

    def bind(self) -> None:
        """Builds the C++ units; once, at first use: then all wrapping has been done."""
        if self.bound:
            return
        self.check()
        for reference in self.followers:
            if (follower := reference()) is not None:
                follower.follow_model()
        self.followers.clear()
        for unit in self.units:
            with torch.inference_mode(False):  # what is made here outlives an evaluation
                unit.bind()
        me = weakref.ref(self)  # C++ holds this: no cycle that Python cannot see

        def gradient_outside() -> None:
            if (runtime := me()) is not None:
                runtime.enter_backward()

        self.core = _C.DedicatedModel([unit.core for unit in self.units], gradient_outside)
        self.bound = True
        for unit in self.units:
            unit.follow_requires_grad()
            for entry in unit.entries:
                for module, _ in entry.places:
                    reveal(module)

    def _check(self, entry: Entry) -> None:
        for module, leaf in entry.places:
            found: Any = module._parameters.get(leaf)
            if not isinstance(found, OwnedTensor):
                raise RuntimeError(
                    f"dmuon: dedicated parameter {entry.name!r} has become "
                    f"{type(found).__name__} (placements "
                    f"{getattr(found, 'placements', None)}): something wrapped or replaced it. "
                    f"{_ORDER}"
                )
            if found._local_tensor.is_meta:
                raise RuntimeError(
                    f"dmuon: dedicated parameter {entry.name!r} is still on the meta device; call "
                    "model.to_empty(device=...) and initialise it before its first use"
                )

    # --- one iteration -------------------------------------------------------------------------

    def enter_forward(self) -> None:
        self.bind()
        self.repair()

    def repair(self) -> None:
        """Clears up after a backward that an exception ended before its final callback."""
        if self.bound and self.core.in_backward and self._alive() is None:
            self.abandon_backward()

    def enter_backward(self) -> None:
        self.repair()
        if self.core.in_backward:
            return
        self.core.begin_backward(torch._C._current_graph_task_id())
        self.prefetch.begin()
        # The engine drops its callbacks with the backward, however that ends; with them the token.
        token = _Token()
        self._alive = weakref.ref(token, functools.partial(_stopped, weakref.ref(self)))
        Variable._execution_engine.queue_callback(functools.partial(_finish, self, token))

    def finish_backward(self) -> None:
        """End of the backward: launch what is left. Whoever reads a gradient waits for it."""
        if not self.core.in_backward:
            return
        try:
            self.core.finish_backward([unit.sync() for unit in self.units])
        finally:
            for unit in self.units:
                unit.end_backward()
            self.prefetch.begin()
        for unit in self.units:
            unit.call_hooks()

    def abandon_backward(self) -> None:
        self.core.abandon_backward()
        for unit in self.units:
            unit.end_backward()
        self.prefetch.begin()

    def check_step(self) -> None:
        self.bind()
        self.repair()
        if any(unit.held for unit in self.units):
            raise RuntimeError(
                "dmuon: optimizer.step() inside full_params: the weights would change under it"
            )

    def publish(self, changed: set[int], wait: bool) -> None:
        """``Unit.publish`` of all units, in forward order; waits for them if asked to."""
        for unit in self.units:
            unit.publish(changed)
        if wait:
            self.wait_publish()

    def wait_publish(self) -> None:
        for unit in self.units if self.bound else ():
            unit.core.wait_publish()

    def settle(self) -> None:
        """Waits for everything that is on its way."""
        self.wait_publish()
        for unit in self.units if self.bound else ():
            unit.core.settle()


class _Token:
    """Lives as long as one backward."""


def _finish(runtime: Runtime, token: _Token) -> None:
    runtime.finish_backward()


def _stopped(runtime: weakref.ref[Runtime], _: Any) -> None:
    """The engine has dropped its callbacks. If it has not called them, an exception is on its way:
    who catches it must find the parameters at rest in the modules; the remainder is for
    ``repair``, since nobody should wait for another rank in here."""
    found = runtime()
    if found is not None and found.core.in_backward:
        for unit in found.units:
            unit.show_rests()


def runtimes_of(model: nn.Module) -> list[Runtime]:
    """All runtimes in a model, also where a submodule was dedicated by itself."""
    return [r for module in model.modules() for r in module.__dict__.get(_RUNTIMES, [])]


def units_at(module: nn.Module) -> list[Unit]:
    """The units that a forward of ``module`` enters."""
    units: list[Unit] = module.__dict__.get(_UNITS, [])
    return units
