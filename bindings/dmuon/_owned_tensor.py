"""A dedicated parameter at rest: a DTensor whose whole matrix lies on one rank.

Stock torch then works on it: ``p.full_tensor()``, ``p.norm()``, ``clip_grad_norm_``,
``state_dict``, distributed checkpoints, loading and resharding. Nothing here runs in the hot path
of a step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_flatten, tree_map

from ._amp import unscale
from ._mesh import MeshView, local_like
from ._owned_checkpoint import let_processes_write, whole_chunk, write_items

aten = torch.ops.aten


class Source(Protocol):
    """What brings gradients to parameters at rest, and their values to the ranks; each is known by
    an index."""

    def collect(self, index: int) -> None:
        """Waits for a gradient that is on its way and puts it into the parameter's ``grad``."""

    def unreduced(self, index: int) -> torch.Tensor | None:
        """This rank's own gradient that waits for a reduction."""

    def drop(self, index: int) -> None:
        """Forgets all of these."""

    def whole_copy(self, index: int) -> torch.Tensor | None:
        """The parameter's whole value, where every rank has it and it is exact (DDP)."""


_GRAD: Any = torch.Tensor.grad
#: torch.Tensor's own attribute, without what ``OwnedTensor`` adds to it.
plain_grad: Callable[[Any], Any] = _GRAD.__get__
set_plain_grad: Callable[[Any, Any], None] = _GRAD.__set__
_DATA: Any = torch.Tensor.data
plain_data: Callable[[Any], Any] = _DATA.__get__
set_plain_data: Callable[[Any, Any], None] = _DATA.__set__


class OwnedAlong(Shard):
    """``Shard(0)`` whose whole extent lies on one coordinate of the mesh dimension.

    torch's own slicing and checkpointing ask a placement for each rank's size and offset; here the
    answer is everything or nothing. Equal to ``Shard(0)`` under ``==``, as DTensor's own checks
    need.
    """

    coordinate: int

    def __new__(cls, coordinate: int) -> OwnedAlong:
        return super().__new__(cls, 0)  # type: ignore[call-arg]

    def __init__(self, coordinate: int) -> None:
        super().__init__(0)
        self.coordinate = coordinate

    def _local_shard_size_and_offset(
        self, curr_local_size: Any, num_chunks: int, rank: Any
    ) -> tuple[Any, Any]:
        return (curr_local_size, 0) if rank == self.coordinate else (0, 0)

    local_shard_size_and_offset = _local_shard_size_and_offset  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"OwnedAlong({self.coordinate})"

    __str__ = __repr__

    def __reduce__(self) -> tuple[Any, ...]:
        return (OwnedAlong, (self.coordinate,))


# Operations on the local part alone, besides everything torch tags as pointwise.
_LOCAL_OPS = {
    aten.detach.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.alias.default,
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.zero_.default,
}

# Drawn whole on every rank: so the ranks' generators stay alike, and with them the values of what
# is replicated and initialised next.
_RANDOM_OPS = {
    aten.rand_like.default,
    aten.randn_like.default,
    aten.normal_.default,
    aten.uniform_.default,
    aten.bernoulli_.float,
}

# Operations that make a tensor of a size of its own; on the local part alone if it is that of the
# tensor (torch's staging for asynchronous saves asks for that).
_NEW_OPS = {
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
}

# Operations that DTensor computes right from whole-or-nothing shards, with a small all-reduce.
_REDUCTIONS = {
    aten.linalg_vector_norm.default,
    aten._foreach_norm.Scalar,
    aten.norm.Scalar,
    aten.sum.default,
    aten._foreach_mul_.Tensor,
    aten._foreach_mul_.Scalar,
}


@dataclasses.dataclass
class _Parameter:
    source: Callable[[], Source | None]
    index: int

    def __deepcopy__(self, memo: Any) -> None:
        return None  # torch's staging copies a tensor's attributes, too


class OwnedTensor(DTensor):
    """A DTensor with its whole content on the owner slot and ``(0, n, ...)`` elsewhere.

    Global shape, dtype, device and placements (``OwnedAlong`` on every mesh dimension) are true on
    all ranks. ``full_tensor()`` and ``redistribute()`` are collectives over the mesh. Element-wise
    operations run on the owner alone and give an ``OwnedTensor``; norms and sums communicate a
    scalar; any other operation is computed on the full tensor on every rank.
    """

    _view: MeshView
    _owner: tuple[int, int]
    #: Of a parameter: where its gradients come from, called with its index there.
    _source: tuple[Callable[[], Source | None], int] | None = None
    #: The same, also of a parameter's detached alias, as a state dict has it; not of a copy.
    _alias_of: _Parameter | None = None
    #: On the rank that is about to save it: the whole value (``Muon.consolidate_state_dict``).
    _consolidated: torch.Tensor | None = None

    @staticmethod
    def build(
        local: torch.Tensor,
        view: MeshView,
        owner: tuple[int, int],
        shape: Iterable[int],
        requires_grad: bool = False,
    ) -> OwnedTensor:
        """Wraps ``local``: the whole tensor if this rank's slot is ``owner``, else ``(0, ...)``."""
        size = torch.Size(shape)
        expected = size if view.slot == owner else torch.Size((0, *size[1:]))
        if local.shape != expected:
            raise ValueError(
                f"dmuon: slot {view.slot} got a local part of shape {tuple(local.shape)} for a "
                f"matrix of shape {tuple(size)} owned by slot {owner}; expected {tuple(expected)}"
            )
        stride = torch.empty(size, device="meta").stride()
        placements = tuple(OwnedAlong(c) for c in view.coordinates(owner))
        spec = DTensorSpec(view.mesh, placements, tensor_meta=TensorMeta(size, stride, local.dtype))
        return _wrap(local, spec, view, owner, requires_grad)

    @property
    def owner(self) -> tuple[int, int]:
        """The owner's slot (replicate, shard)."""
        return self._owner

    @property
    def is_owner(self) -> bool:
        """Whether this rank holds the matrix."""
        return self._owner == self._view.slot

    def like(self, local: torch.Tensor) -> OwnedTensor:
        """Another tensor of the same shape and owner around ``local``."""
        if local.dtype != self.dtype:
            return OwnedTensor.build(local, self._view, self._owner, self.shape)
        return _wrap(local, self._spec, self._view, self._owner, False)

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"OwnedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, owner={self._owner}, "
            f"local={self._local_tensor})"
        )

    # --- gradient --------------------------------------------------------------------------------

    @property
    def grad(self) -> Any:
        """The gradient on its owner, an ``OwnedTensor``; waits for it if it is on its way.

        None if no rank had one. While gradients are accumulated without reduction (``no_sync``) and
        there is no reduced one: this rank's own, a plain tensor, as in DDP. Setting it, to None or
        to another tensor, drops whatever was accumulated or is on its way.
        """
        source, index = self._gradient_source()
        if source is None:
            return plain_grad(self)
        source.collect(index)
        grad = plain_grad(self)
        return grad if grad is not None else source.unreduced(index)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        source, index = self._gradient_source()
        if source is not None:
            source.drop(index)
        set_plain_grad(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def _gradient_source(self) -> tuple[Source | None, int]:
        if self._source is None:
            return None, 0
        return self._source[0](), self._source[1]

    def follow(self, source: Callable[[], Source | None], index: int) -> None:
        """Makes it the parameter ``index`` of ``source``."""
        self._source = (source, index)
        self._alias_of = _Parameter(source, index)

    # --- whole-tensor access; collectives over the mesh ---------------------------------------

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor on every rank of the mesh. Not differentiable.

        Without communication for a parameter of which every rank has an exact copy (DDP).
        """
        copy = self._whole_copy()
        if copy is not None:
            return copy.clone()
        local = self._local_tensor.detach()
        full = local.clone() if self.is_owner else local.new_empty(self.shape)
        self._view.collectives.broadcast_from_owners(
            [full], [self._owner], label="full_tensor"
        ).wait()
        return full

    def _whole_copy(self) -> torch.Tensor | None:
        if self._alias_of is None or (source := self._alias_of.source()) is None:
            return None
        return source.whole_copy(self._alias_of.index)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **kwargs: Any,
    ) -> DTensor:
        """An ordinary DTensor with the placements asked for, on the same mesh."""
        if device_mesh is not None and device_mesh != self.device_mesh:
            raise ValueError(
                f"dmuon: cannot redistribute from mesh {self.device_mesh} to {device_mesh}"
            )
        if placements is None:
            raise RuntimeError("placements is needed for redistribute!")
        if all(p is q for p, q in zip(placements, self.placements)):
            return self
        mesh = self.device_mesh
        whole = DTensor.from_local(
            self.full_tensor(), mesh, [Replicate()] * mesh.ndim, run_check=False
        )
        return whole.redistribute(placements=placements)

    # --- checkpoints ---------------------------------------------------------------------------

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        return write_items(fqn, self._local_tensor, self.size(), self.is_owner)

    def __create_chunk_list__(self) -> list[Any]:
        # Asked on every rank before a load writes into the owner's local part: note the change.
        increment_version(self._local_tensor)
        return [whole_chunk(self._local_tensor)] if self.is_owner else []

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self._local_tensor

    # --- copies --------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy: Any = self.like(self._local_tensor.detach().clone())
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, requires_grad=self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        whole = self._consolidated
        if whole is None and (copy := self._whole_copy()) is not None:
            whole = copy.clone()  # of its own storage
        if whole is None:
            raise RuntimeError(self._not_whole("be pickled"))
        return whole.__reduce_ex__(protocol)

    def untyped_storage(self) -> torch.UntypedStorage:
        raise RuntimeError(self._not_whole("give its storage away"))

    def data_ptr(self) -> int:
        # Accelerate finds parameters by the address of their local part; torch's own staging takes
        # a tensor that has one for a plain tensor.
        is_parameter = isinstance(self, torch.nn.Parameter)
        return self._local_tensor.data_ptr() if is_parameter else super().data_ptr()

    @property
    def data(self) -> Any:
        """As in torch. What is given to it must have the same owner. Values go into the local part,
        which stays; one of another dtype takes its place, before the first use."""
        return plain_data(self)

    @data.setter
    def data(self, value: Any) -> None:
        if not isinstance(value, OwnedTensor) or value._owner != self._owner:
            raise RuntimeError(
                f"dmuon: the data of a tensor of shape {tuple(self.shape)} that rests on its owner "
                f"cannot become a {type(value).__name__} of shape {tuple(value.shape)} that does "
                "not; p.copy_(tensor) takes any"
            )
        if (value.dtype, value.device, value.shape) == (self.dtype, self.device, self.shape):
            plain_data(self).copy_(value)
            return
        set_plain_data(self, value)
        self._local_tensor, self._spec = value._local_tensor, value._spec

    def _not_whole(self, what: str) -> str:
        return (
            f"dmuon: a tensor of shape {tuple(self.shape)} that rests on its owner alone cannot "
            f"{what}: this rank's part would be wrong on any other. Save with "
            "torch.distributed.checkpoint, or take a full state first "
            "(get_model_state_dict, get_optimizer_state_dict with full_state_dict=True, "
            "optimizer.consolidate_state_dict)"
        )

    # --- operations ----------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        written = _written(func, args)
        if func is aten._to_copy.default and str(kwargs.get("device")) == "meta":
            _refuse_meta(args[0])
        if func is aten.copy_.default:
            result = _copy_(*args, **kwargs)
        elif func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            unscale(func, args[0], args[1], args[2], OwnedTensor)
            result = None
        elif func in _RANDOM_OPS:
            result = _draw(func, *args, **kwargs)
        elif func in _NEW_OPS and torch.Size(args[1]) == args[0].shape:
            local = args[0]._local_tensor
            result = args[0].like(func(local, local.shape, *args[2:], **kwargs))
        elif _is_local(func, args, kwargs) or _is_foreach_local(func, args):
            result = _run_local(func, args, kwargs)
        elif func in _REDUCTIONS and not any(a in (math.inf, -math.inf) for a in args[1:2]):
            result = func(*tree_map(_as_plain_shard, args), **tree_map(_as_plain_shard, kwargs))
            if func is not aten.sum.default and _plain_scalars(args):
                result = tree_map(_full_scalar, result)
        elif written:
            raise NotImplementedError(
                f"dmuon: {func} cannot write to a parameter that rests on its owner; "
                "compute on p.full_tensor() and p.copy_() the result"
            )
        else:
            _refuse_mixture(func, args)
            result = func(*tree_map(_as_replicated, args), **tree_map(_as_replicated, kwargs))
            if any(r.alias_info is not None for r in func._schema.returns):  # type: ignore[attr-defined]
                result = tree_map(_read_only, result)
        # Below this dispatch autograd does not count in-place changes; the units ask for them. All
        # ranks count, also those with nothing to write, so that all agree on what to publish.
        for tensor in written:
            increment_version(tensor._local_tensor)
        return result


let_processes_write(OwnedTensor, lambda t: (t._local_tensor, t.size(), t.is_owner))


def _wrap(
    local: torch.Tensor,
    spec: DTensorSpec,
    view: MeshView,
    owner: tuple[int, int],
    requires_grad: bool,
) -> OwnedTensor:
    tensor: Any = DTensor.__new__(OwnedTensor, local, spec, requires_grad=requires_grad)
    tensor._view = view
    tensor._owner = owner
    return tensor


def _written(func: Any, args: tuple[Any, ...]) -> list[OwnedTensor]:
    if not func._schema.is_mutable:
        return []
    return [
        tensor
        for argument, value in zip(func._schema.arguments, args)
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tree_flatten(value)[0]
        if isinstance(tensor, OwnedTensor)
    ]


def _is_local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func not in _LOCAL_OPS and torch.Tag.pointwise not in func.tags:
        return False
    first: OwnedTensor | None = None
    for value in tree_flatten((args, kwargs))[0]:
        if isinstance(value, OwnedTensor):
            first = first if first is not None else value
            if value.shape != first.shape or value._owner != first._owner:
                return False
        elif isinstance(value, torch.Tensor) and value.ndim > 0:
            whole = isinstance(value, DTensor) and first is not None and value.shape == first.shape
            if not whole:
                return False
    return first is not None


def _is_foreach_local(func: Any, args: tuple[Any, ...]) -> bool:
    """Element-wise operations on lists of owned tensors, equal position by position."""
    if not func.__name__.startswith("_foreach_") or func in _REDUCTIONS:
        return False
    lists = [a for a in args if isinstance(a, (list, tuple)) and a]
    tensors = [list(a) for a in lists if isinstance(a[0], torch.Tensor)]
    others = [a for a in args if isinstance(a, DTensor) and a.ndim > 0]
    return (
        bool(tensors)
        and not others
        and all(
            isinstance(t, OwnedTensor) and t.shape == row[0].shape and t._owner == row[0]._owner
            for row in zip(*tensors)
            for t in row
        )
    )


def _refuse_meta(tensor: OwnedTensor) -> None:
    if not tensor._local_tensor.is_meta:
        raise RuntimeError(
            f"dmuon: a tensor of shape {tuple(tensor.shape)} that rests on its owner alone would "
            "be lost on the meta device: no other rank could bring it back. With Accelerate: "
            "cpu_ram_efficient_loading=False (FSDP_CPU_RAM_EFFICIENT_LOADING); else dedicate the "
            "parameters of a model that is on the meta device already"
        )


def _run_local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    owned = [v for v in tree_flatten((args, kwargs))[0] if isinstance(v, OwnedTensor)]
    model = owned[0]

    def local(value: Any) -> Any:
        if isinstance(value, OwnedTensor):
            return value._local_tensor
        if not isinstance(value, DTensor):
            return value
        # A scalar, such as the clipping factor, or the gradient of a use outside the module.
        full = value.full_tensor()
        return local_like(full, model.is_owner) if full.ndim else full

    if func is aten.detach.default:
        # The same local part: below this dispatch an alias of it would count changes of its own,
        # and what is written through this one, as a load into a state dict, must count for both.
        alias = model.like(model._local_tensor)
        alias._alias_of = model._alias_of
        return alias
    result = func(*tree_map(local, args), **tree_map(local, kwargs))

    def wrap(value: Any, template: OwnedTensor) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        for tensor in owned:  # an in-place operation returns its own argument
            if value is tensor._local_tensor:
                return tensor
        return template.like(value)

    if isinstance(result, (list, tuple)):  # of a list of tensors
        return [wrap(value, template) for value, template in zip(result, args[0])]
    return wrap(result, model)


def _draw(func: Any, tensor: OwnedTensor, *args: Any, **kwargs: Any) -> OwnedTensor:
    whole = (
        tensor._local_tensor if tensor.is_owner else tensor._local_tensor.new_empty(tensor.shape)
    )
    drawn = func(whole, *args, **kwargs)
    if func._schema.is_mutable:
        return tensor
    return tensor.like(drawn if tensor.is_owner else drawn[:0].clone())


def _copy_(destination: Any, source: Any, non_blocking: bool = False) -> Any:
    if not isinstance(destination, OwnedTensor):  # from an owned tensor into another
        if isinstance(destination, DTensor):
            full = source.redistribute(
                placements=destination.placements
                if destination.device_mesh == source.device_mesh
                else None
            )
            destination._local_tensor.copy_(full._local_tensor, non_blocking)
            return destination
        return destination.copy_(source.full_tensor(), non_blocking)
    local = destination._local_tensor
    if isinstance(source, OwnedTensor) and source._owner == destination._owner:
        values = source._local_tensor
    else:
        values = source.full_tensor() if isinstance(source, DTensor) else source
        if torch.broadcast_shapes(values.shape, destination.shape) != destination.shape:
            raise RuntimeError(
                f"dmuon: cannot copy a tensor of shape {tuple(values.shape)} into a parameter of "
                f"shape {tuple(destination.shape)}"
            )
        if not destination.is_owner:
            values = local.new_empty(local.shape)
    local.copy_(values, non_blocking)
    return destination


def _as_plain_shard(value: Any) -> Any:
    if not isinstance(value, OwnedTensor):
        return value
    mesh = value.device_mesh
    spec = DTensorSpec(
        mesh,
        # Along one rank nothing is sharded: no communication there, and no warning of it.
        tuple(Shard(0) if mesh.size(i) > 1 else Replicate() for i in range(mesh.ndim)),
        tensor_meta=value._spec.tensor_meta,
    )
    return DTensor.__new__(DTensor, value._local_tensor, spec, requires_grad=False)  # type: ignore[call-arg,arg-type]


class _WholeView(DTensor):
    """A view of a resting parameter, computed on a gathered copy: what is written to it would be
    lost, so that is refused."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        for argument, value in zip(func._schema.arguments, args):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, _WholeView):
                raise NotImplementedError(
                    f"dmuon: {func} would write to a view of a parameter that rests on its "
                    "owner, and be lost; compute on p.full_tensor() and p.copy_() the result"
                )
        _refuse_mixture(func, args)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if any(r.alias_info is not None for r in func._schema.returns):
            result = tree_map(_read_only, result)
        return result


def _read_only(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    view: Any = DTensor.__new__(_WholeView, value._local_tensor, value._spec, requires_grad=False)
    return view


def _plain_scalars(args: tuple[Any, ...]) -> bool:
    owned = (v for v in tree_flatten(args)[0] if isinstance(v, OwnedTensor))
    return next(owned)._view.plain_scalars


def _full_scalar(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) and value.ndim == 0 else value


def _refuse_mixture(func: Any, args: tuple[Any, ...]) -> None:
    values = tree_flatten(args)[0]
    plain = any(
        isinstance(v, torch.Tensor) and not isinstance(v, DTensor) and v.ndim > 0 for v in values
    )
    if plain:
        owned = next(v for v in values if isinstance(v, (OwnedTensor, _WholeView)))
        raise RuntimeError(
            f"dmuon: {func} mixes an ordinary tensor with a dedicated parameter of shape "
            f"{tuple(owned.shape)} at rest. If this is in a forward, the weight was read where no "
            "hook could bring it in: choose a hook_boundary_predicate that takes a module around "
            "both. Elsewhere, use p.full_tensor(). (DistributedDataParallel must wrap the very "
            "module that was given to dedicate_params_ddp.)"
        )


def _as_replicated(value: Any) -> Any:
    if not isinstance(value, OwnedTensor):
        return value
    return value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)
