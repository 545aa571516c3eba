"""The Python side of dedicated units: module hooks, and who stands in the modules when.

Outside a unit's forward and backward its modules hold the parameters at rest (``OwnedTensor``).
Inside,
they hold the live ones: plain parameters over the unit's flat buffer. Hooks sit on the unit's block
and, as a net for modules called from elsewhere, on every module that holds a dedicated parameter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn as nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves, tree_map

from . import _C
from ._fsdp import Enclosing, enclosing
from ._hiding import reveal
from ._mesh import MeshView, format_mesh
from ._owned_tensor import OwnedTensor

_RUNTIMES = "_dmuon_runtimes"
_ORDER = (
    "the order is: dmuon.dedicate_params(model, mesh, ...), then fully_shard or "
    "DistributedDataParallel, then dmuon.Muon(model, ...)"
)


@dataclasses.dataclass
class Entry:
    """One dedicated parameter: its name, owner, and every place in the model where it is found."""

    name: str
    owner: tuple[int, int]
    shape: torch.Size
    places: list[tuple[nn.Module, str]]

    @property
    def rest(self) -> Any:
        """The parameter as it rests in the module now: a Parameter and OwnedTensor."""
        module, leaf = self.places[0]
        return module._parameters[leaf]


class Unit:
    """The dedicated parameters under one hook boundary, and their state in forward and backward."""

    def __init__(
        self, runtime: Runtime, index: int, name: str, entries: list[Entry], reshard: bool
    ) -> None:
        self.runtime = runtime
        self.index = index
        self.name = name
        self.entries = entries
        self.reshard_after_forward = reshard
        self.enclosing = Enclosing()
        self.depth = 0  # nested forwards of the block and of modules in it
        self.in_backward = False
        self.core: _C.DedicatedUnit
        self.rests: list[Any] = []  # Parameters that are OwnedTensors
        self.lives: list[nn.Parameter] = []
        self.slots: list[tuple[dict[str, Any], str, nn.Parameter, nn.Parameter]] = []
        self._trainable: tuple[bool, ...] = ()
        self._cast: torch.dtype | None = None
        self._output: torch.dtype | None = None

    # --- binding -----------------------------------------------------------------------------

    def bind(self) -> None:
        """Builds the C++ unit from the parameters as they rest in the modules now."""
        runtime, view = self.runtime, self.runtime.view
        self.enclosing = enclosing(runtime.model, self.name)
        policy = runtime.mp_policy if runtime.mp_policy is not None else self.enclosing.policy
        param_dtype = getattr(policy, "param_dtype", None)
        reduce_dtype = getattr(policy, "reduce_dtype", None)
        if self.enclosing.policy is None and policy is not None:  # nobody else casts
            self._cast = param_dtype if policy.cast_forward_inputs else None
            self._output = policy.output_dtype
        self.rests = [entry.rest for entry in self.entries]
        parameters = [
            (
                entry.name,
                list(entry.shape),
                entry.owner,
                rest._local_tensor,
                param_dtype or rest.dtype,
            )
            for entry, rest in zip(self.entries, self.rests)
        ]
        several_shards, several_replicas = view.shape[1] > 1, view.shape[0] > 1
        self.core = _C.DedicatedUnit(
            self.name or "<model>",
            parameters,
            runtime.reduce_channel,
            runtime.unshard_channel.shard if several_shards else None,
            runtime.publish_channel.replicate if several_replicas else None,
            reduce_dtype,
        )
        self.lives = [
            nn.Parameter(live, requires_grad=rest.requires_grad)
            for live, rest in zip(self.core.live(), self.rests)
        ]
        self.slots = [
            (module._parameters, leaf, rest, live)
            for entry, rest, live in zip(self.entries, self.rests, self.lives)
            for module, leaf in entry.places
        ]

    def follow_requires_grad(self) -> None:
        """Carries ``requires_grad`` over from the parameters at rest, also when toggled later."""
        trainable = tuple([rest.requires_grad for rest in self.rests])
        if trainable == self._trainable:
            return
        for live, flag in zip(self.lives, trainable):
            live.requires_grad_(flag)
        self._trainable = trainable
        self.runtime.core.attach(self.index, self.lives)

    # --- forward -----------------------------------------------------------------------------

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.depth += 1
        if self.depth == 1:
            self.runtime.enter_forward()
            if not self.in_backward:
                self.follow_requires_grad()
                self.core.unshard(refresh=True)
            elif not self.core.unsharded:
                self.core.unshard(refresh=False)
            self.core.wait_unshard()
            _C.install(self.slots, live=True)
            if self._cast is not None:
                return _cast(args, self._cast), _cast(kwargs, self._cast)
        return None

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.depth == 0:  # the pre-forward hook itself failed
            return None
        self.depth -= 1
        if self.depth or self.in_backward:
            return None
        _C.install(self.slots, live=False)
        seen_all = not torch.is_grad_enabled() or register_pre_backward(output, self.pre_backward)
        if self.reshard_after_forward and seen_all:
            self.core.reshard()
        return None if self._output is None else _cast(output, self._output)

    # --- backward ----------------------------------------------------------------------------

    def pre_backward(self, _: torch.Tensor) -> None:
        if self.in_backward:
            return
        self.runtime.enter_backward()
        self.in_backward = True
        if not self.core.unsharded:
            self.core.unshard(refresh=False)
        self.core.wait_unshard()
        _C.install(self.slots, live=True)
        self.runtime.core.set_sync(self.index, self.sync())

    def sync(self) -> _C.GradientSync:
        """The gradient switches in force: dmuon.no_sync's, and the enclosing FSDP2 module's."""
        factor = self.enclosing.divide_factor
        return _C.GradientSync(
            self.enclosing.reduce and self.runtime.no_sync_depth == 0,
            self.enclosing.all_reduce,
            float(self.runtime.view.size if factor is None else factor),
        )

    def end_backward(self) -> None:
        self.in_backward = False
        if self.depth == 0:
            _C.install(self.slots, live=False)
            self.core.reshard()

    def set_gradients(self, locals_: list[torch.Tensor | None]) -> None:
        for rest, local in zip(self.rests, locals_):
            if local is None:
                continue
            if rest.grad is None:
                rest.grad = rest.like(local)
            else:
                rest.grad._local_tensor.add_(local)
            hooks = getattr(rest, "_post_accumulate_grad_hooks", None)
            for hook in (hooks or {}).values():
                hook(rest)


class Runtime:
    """Everything that one call of ``dedicate_params`` set up."""

    def __init__(
        self,
        model: nn.Module,
        view: MeshView,
        plan: _C.OwnershipPlan,
        units: list[tuple[str, list[Entry]]],
        *,
        reshard_after_forward: bool,
        mp_policy: Any,
    ) -> None:
        self.model = model
        self.view = view
        self.plan = plan
        self.mp_policy = mp_policy
        self.reduce_channel = view.channel("reduce")
        self.unshard_channel = view.channel("unshard")
        self.publish_channel = view.channel("publish")
        self.units = [
            Unit(self, i, name, entries, reshard_after_forward)
            for i, (name, entries) in enumerate(units)
        ]
        self.core: _C.DedicatedModel
        self.bound = False
        self.no_sync_depth = 0
        self.orthogonalized = 0  # by this rank, since construction
        self.steps = 0
        model.__dict__.setdefault(_RUNTIMES, []).append(self)
        self._register_hooks()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters at rest, in unit order."""
        return [entry.rest for unit in self.units for entry in unit.entries]

    def _register_hooks(self) -> None:
        for unit in self.units:
            holders = [module for entry in unit.entries for module, _ in entry.places]
            for module in dict.fromkeys([self.model.get_submodule(unit.name), *holders]):
                module.register_forward_pre_hook(unit.pre_forward, with_kwargs=True)
                module.register_forward_hook(unit.post_forward, always_call=True)
        # The outermost output, so that the end of the backward is the end of the outer one even
        # where re-entrant checkpointing runs backwards inside it.
        self.model.register_forward_hook(self._post_forward_model)

    def _post_forward_model(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            register_pre_backward(output, lambda _: self.enter_backward())

    # --- binding -----------------------------------------------------------------------------

    def bind(self) -> None:
        """Checks that wrapping went right and builds the C++ units; once, at first use."""
        if self.bound:
            return
        for unit in self.units:
            for entry in unit.entries:
                self._check(entry)
        for unit in self.units:
            unit.bind()
            other = unit.enclosing.mesh
            if other is not None and (
                other.mesh.shape != self.view.mesh.mesh.shape
                or not torch.equal(other.mesh, self.view.mesh.mesh)
            ):
                raise ValueError(
                    f"dmuon: unit {unit.name or '<model>'!r} is dedicated on "
                    f"{format_mesh(self.view.mesh)}, but fully_shard around it uses "
                    f"{format_mesh(other)}; give both the same mesh"
                )
        self.core = _C.DedicatedModel([unit.core for unit in self.units])
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
        if self.core.in_backward and torch._C._current_graph_task_id() == -1:
            self.abandon_backward()  # an exception ended it before its final callback

    def enter_backward(self) -> None:
        if self.core.in_backward:
            return
        self.core.begin_backward()
        Variable._execution_engine.queue_callback(self.finish_backward)

    def finish_backward(self) -> None:
        """End of the backward: launch what is left, wait, and set the parameters' gradients."""
        if not self.core.in_backward:
            return
        try:
            reduced = self.core.finish_backward([unit.sync() for unit in self.units])
        finally:
            for unit in self.units:
                unit.end_backward()
        for unit, locals_ in zip(self.units, reduced):
            if locals_ is not None:
                unit.set_gradients(locals_)

    def abandon_backward(self) -> None:
        self.core.abandon_backward()
        for unit in self.units:
            unit.end_backward()

    def drop_gradients(self) -> None:
        """Forgets gradients that are not yet on their owners (accumulated under no_sync)."""
        if self.bound:
            for unit in self.units:
                unit.core.drop_gradients()

    def publish(self, changed: set[int]) -> None:
        """After a step: brings the parameters whose ``id`` is in ``changed`` to all replicas."""
        for unit in self.units:
            unit.core.publish([id(rest) in changed for rest in unit.rests])
        for unit in self.units:
            unit.core.wait_publish()


def runtimes_of(model: nn.Module) -> list[Runtime]:
    """All runtimes in a model, also where a submodule was dedicated by itself."""
    return [r for module in model.modules() for r in module.__dict__.get(_RUNTIMES, [])]


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
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from _leaves(getattr(leaf, field.name))
        else:
            yield leaf


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return tree_map(
        lambda v: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v,
        values,
    )
