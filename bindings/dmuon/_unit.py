"""A unit on the Python side: which of its parameters stand in the modules when.

Outside the unit's forward and backward its modules hold the parameters at rest (``OwnedTensor``).
Inside, they hold the live ones: plain parameters over the unit's flat buffer.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from . import _C
from ._blocks import Plain
from ._fsdp import Enclosing, enclosing
from ._mesh import local_like
from ._outputs import cast, register_pre_backward
from ._owned_tensor import OwnedTensor, plain_grad, set_plain_grad

if TYPE_CHECKING:
    from ._runtime import Runtime


@dataclasses.dataclass
class Entry:
    """One dedicated parameter: its name, owner, every place in the model where it is found, and its
    blocks, if it is a fused weight."""

    name: str
    owner: tuple[int, int]
    shape: torch.Size
    places: list[tuple[nn.Module, str]]
    blocks: Plain = None

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
        self.depth = 0  # nested forwards of the block, or of the module that stands for it
        self.opener: nn.Module | None = None  # that module
        self.openers: set[nn.Module] = set()  # those that once were
        self.in_backward = False
        self.awaited = False  # a backward through it is expected
        self.prefetches = 0
        self.orthogonalized = 0  # matrices, by this rank
        self.held = 0  # by full_params, nested
        self._held_versions: list[int] = []
        self.core: _C.DedicatedUnit
        self.rests: list[Any] = []  # Parameters that are OwnedTensors
        self.lives: list[nn.Parameter] = []
        self.slots: list[tuple[dict[str, Any], str, nn.Parameter, nn.Parameter]] = []
        self.version = 0  # of the weights; a backward must meet the one its forward used
        self._locals: list[torch.Tensor] = []
        self._trainable: tuple[bool, ...] = ()
        self._calls: weakref.WeakSet[_Call] = weakref.WeakSet()
        # Since the last step, a forward went through it whose backward cannot be followed.
        self._unwatched = False
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
        if runtime.mp_policy is not None:  # else who casts is the enclosing module
            self._cast = param_dtype if policy.cast_forward_inputs else None
            self._output = policy.output_dtype
        self.rests = [entry.rest for entry in self.entries]
        self._locals = [rest._local_tensor for rest in self.rests]
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
        source = weakref.ref(self)
        for index, rest in enumerate(self.rests):
            rest.follow(source, index)
        self.lives = [
            nn.Parameter(live, requires_grad=rest.requires_grad)
            for live, rest in zip(self.core.live(), self.rests)
        ]
        self.slots = [
            (module._parameters, leaf, rest, live)
            for entry, rest, live in zip(self.entries, self.rests, self.lives)
            for module, leaf in entry.places
        ]

    def check_rests(self) -> None:
        """Refuses parameters whose storage was exchanged under the unit (``model.to(dtype)``)."""
        for entry, rest, local in zip(self.entries, self.rests, self._locals):
            if rest._local_tensor is not local:
                raise RuntimeError(
                    f"dmuon: the storage of dedicated parameter {entry.name!r} was exchanged after "
                    f"its first use (now {rest.dtype} on {rest.device}); convert or move the model "
                    "before the optimizer is built and before its first forward"
                )

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

    def enter(self, args: Any, kwargs: Any) -> Any:
        """The start of the outermost forward of the block or of a module in it."""
        if self.held:
            self.check_held()
        else:
            self.runtime.enter_forward()
            if not self.in_backward:
                self.check_rests()
                self.follow_requires_grad()
                self.refresh()
            elif not self.core.unsharded:
                self.core.unshard(refresh=False)
            self.core.wait_unshard()
            if not self.in_backward and not self.runtime.core.in_backward:
                self.runtime.prefetch.entered("forward", self)
            _C.install(self.slots, live=True)
            if not self.in_backward:
                self.watch_inputs((args, kwargs))
        if self._cast is not None:
            return cast(args, self._cast), cast(kwargs, self._cast)
        return None

    def refresh(self) -> None:
        """Starts to bring the weights as they are now, published first if they were changed."""
        self.version += self.core.stale
        self.core.unshard(refresh=True)

    def bring(self, direction: str) -> bool:
        """Starts to bring weights that are expected to be used next; False if there is no need."""
        if self.core.unsharded or self.in_backward:
            return False
        if direction == "forward":
            self.refresh()
        elif self.awaited:
            self.core.unshard(refresh=False)
        return self.core.unsharded

    def release_unused(self) -> None:
        if self.reshard_after_forward and not (self.depth or self.in_backward or self.held):
            self.core.reshard()

    def publish(self, changed: set[int]) -> None:
        """Starts to bring the parameters whose ``id`` is in ``changed`` to all replicas.

        Whoever reads the unit's weights first waits for it.
        """
        self._unwatched = False  # no backward through earlier weights will come
        flags = [id(rest) in changed for rest in self.rests]
        self.version += any(flags)
        self.core.publish(flags)

    # --- between steps -----------------------------------------------------------------------

    def hold(self) -> None:
        """Brings the weights and leaves them in their modules until ``let_go``."""
        if self.depth or self.in_backward:
            raise RuntimeError(
                f"dmuon: full_params while unit {self.name or '<model>'!r} is in a forward or "
                "backward; use it between steps"
            )
        if not self.held:
            self.check_rests()
            self.refresh()
            self.core.wait_unshard()
            _C.install(self.slots, live=True)
            self._held_versions = [live._version for live in self.lives]
        self.held += 1

    def let_go(self) -> list[str]:
        """The end of ``hold``; returns the names of weights that were changed meanwhile."""
        self.held -= 1
        if self.held:
            return []
        _C.install(self.slots, live=False)
        self.core.reshard()
        versions = zip(self.entries, self.lives, self._held_versions)
        return [entry.name for entry, live, version in versions if live._version != version]

    def check_held(self) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "dmuon: a forward with gradients inside full_params; gradients need the weights to "
                "come and go"
            )

    def leave(self, output: Any) -> Any:
        """The end of that forward."""
        if self.in_backward:
            return None
        if self.held:
            return None if self._output is None else cast(output, self._output)
        _C.install(self.slots, live=False)
        seen_all = True
        if torch.is_grad_enabled():
            hook = functools.partial(self.pre_backward, self.version)
            seen_all = register_pre_backward(output, hook)
            self.awaited = True
        if self.reshard_after_forward and seen_all:
            self.core.reshard()
        return None if self._output is None else cast(output, self._output)

    # --- backward ----------------------------------------------------------------------------

    def pre_backward(self, version: int, _: torch.Tensor) -> None:
        self.runtime.enter_backward()
        if self.in_backward:
            return
        if version != self.version:
            raise RuntimeError(
                f"dmuon: the weights of unit {self.name or '<model>'!r} were changed (by a step or "
                "a load) between this forward and its backward: the gradients would be wrong"
            )
        self.in_backward = True
        if not self.core.unsharded:
            self.core.unshard(refresh=False)
        self.core.wait_unshard()
        self.runtime.prefetch.entered("backward", self)
        _C.install(self.slots, live=True)
        self.runtime.core.set_sync(self.index, self.sync())

    def watch_inputs(self, inputs: Any) -> None:
        """Notes when a backward has left the unit behind, though some gradients may never come.

        Autograd's nodes run from the youngest to the oldest of a device: once it comes to those
        that made the inputs, it has gone through all that was made of them.
        """
        leaves = [x for x in tree_leaves(inputs) if isinstance(x, torch.Tensor) and x.requires_grad]
        device = self.rests[0].device
        followed = all(not x.is_leaf and x.device == device for x in leaves)
        if not leaves or not followed or not torch.is_grad_enabled():
            self._unwatched = True  # without gradients: perhaps of a checkpoint, so one may follow
            return
        call = _Call(len(leaves))
        self._calls.add(call)

        def arrived(_: torch.Tensor) -> None:
            call.left -= 1
            if self.in_backward and not self._unwatched and all(c.left == 0 for c in self._calls):
                self.runtime.core.unit_passed(self.index)

        for leaf in leaves:
            leaf.register_hook(arrived)

    def sync(self) -> _C.GradientSync:
        """The gradient switches in force: dmuon.no_sync's, and those of FSDP2 or DDP around it."""
        factor = self.enclosing.divide_factor
        runtime = self.runtime
        return _C.GradientSync(
            self.enclosing.reduce and runtime.ddp_sync and runtime.no_sync_depth == 0,
            self.enclosing.all_reduce,
            float(runtime.view.size if factor is None else factor),
        )

    def end_backward(self) -> None:
        self.in_backward = self.awaited = False
        for call in self._calls:  # whose graphs were retained
            call.left = call.inputs
        if self.depth == 0:
            self.show_rests()
            self.core.reshard()

    def show_rests(self) -> None:
        """Puts the parameters at rest into the modules, unless those are in use."""
        if self.depth == 0 and not self.held:
            _C.install(self.slots, live=False)

    # --- gradients, as the resting parameters ask for them ------------------------------------

    def collect(self, index: int) -> None:
        local = self.core.take_reduced(index)
        if local is None:
            return
        rest = self.rests[index]
        if plain_grad(rest) is None:
            set_plain_grad(rest, rest.like(local))
        else:
            own_gradient(rest)._local_tensor.add_(local)

    def unreduced(self, index: int) -> torch.Tensor | None:
        return self.core.unreduced(index)

    def drop(self, index: int) -> None:
        self.core.drop_gradient(index)

    def whole_copy(self, index: int) -> torch.Tensor | None:
        rest, live = self.rests[index], self.lives[index]
        if self.runtime.view.shape[1] > 1 or live.dtype != rest.dtype or self.core.stale:
            return None
        self.core.wait_publish()
        return live.detach()

    def local_gradient(self, index: int) -> torch.Tensor | None:
        """This rank's part of the reduced gradient, without making it ``grad``."""
        if plain_grad(self.rests[index]) is None:
            return self.core.reduced(index)
        self.collect(index)
        return own_gradient(self.rests[index])._local_tensor

    def call_hooks(self) -> None:
        """Runs the hooks that users put on the resting parameters, with what has just arrived."""
        for index, rest in enumerate(self.rests):
            before = rest._backward_hooks
            after = getattr(rest, "_post_accumulate_grad_hooks", None)
            if not before and not after:
                continue
            local = self.core.take_reduced(index)
            if local is None:
                continue
            gradient = rest.like(local)
            for hook in list((before or {}).values()):
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
            if plain_grad(rest) is None:
                set_plain_grad(rest, gradient)
            else:
                own_gradient(rest).add_(gradient)
            for hook in list((after or {}).values()):
                hook(rest)


class _Call:
    """A forward through a unit: lives as long as its graph."""

    def __init__(self, inputs: int) -> None:
        self.inputs = self.left = inputs


def own_gradient(rest: Any) -> OwnedTensor:
    """The gradient of a parameter at rest, on its owner.

    Autograd leaves an ordinary DTensor where a loss uses the parameter outside its module, as a
    weight penalty does; it is converted here, a collective over the mesh.
    """
    grad = plain_grad(rest)
    if not isinstance(grad, OwnedTensor):
        if not isinstance(grad, DTensor):
            raise RuntimeError(
                f"dmuon: the gradient of a dedicated parameter of shape {tuple(rest.shape)} was "
                f"set to a {type(grad).__name__} of shape {tuple(grad.shape)}; it must come from a "
                "backward, or be an OwnedTensor made by p.like(local)"
            )
        grad = rest.like(local_like(grad.full_tensor(), rest.is_owner))
        set_plain_grad(rest, grad)
    return grad
