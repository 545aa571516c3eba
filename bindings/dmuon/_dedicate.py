"""``dedicate_params``: giving each matrix an owner."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from . import _C
from ._blocks import check_used, resolve
from ._boundary import BoundaryPredicate, Predicate, default_predicate, unit_of
from ._fsdp import param_groups
from ._hiding import hide
from ._mesh import MeshView, format_mesh, local_like
from ._owned_tensor import OwnedTensor
from ._runtime import Runtime, runtimes_of
from ._unit import Entry

_COSTS = ("measured", "flops")


def dedicate_params(
    model: nn.Module,
    mesh: DeviceMesh,
    predicate: Predicate | None = None,
    *,
    reshard_after_forward: bool | BoundaryPredicate = True,
    hook_boundary_predicate: BoundaryPredicate | None = None,
    hook_boundary_strict: bool = True,
    mp_policy: Any = None,
    prefetch: int = 1,
    blocks: Any = None,
    cost: str = "measured",
    process_groups: str = "isolated",
) -> _C.OwnershipPlan:
    """Gives every chosen matrix of ``model`` one owner rank. Call before ``fully_shard``.

    The chosen parameters become ``OwnedTensor`` (a DTensor): the whole matrix on its owner, nothing
    elsewhere. ``fully_shard`` then passes over them, and ``dmuon.Muon`` updates them.

    Args:
        model: parameters of equal values on all ranks, or on the meta device; the owner's values
            count.
        mesh: 1-D (shard) or 2-D (replicate, shard); the one given to ``fully_shard``.
        predicate: ``predicate(name, parameter) -> bool`` for parameters of 2 or more dimensions.
            Default: 2-D weights inside the blocks of a ModuleList, ModuleDict or Sequential, except
            embeddings (and what is tied to one), heads, routers and gates.
        reshard_after_forward: True (ZeRO-3): free the whole weights after forward and bring them
            back for backward. False (ZeRO-2): keep them until after backward. Or for each unit:
            ``reshard_after_forward(name, module) -> bool``, of its block.
        hook_boundary_predicate: ``predicate(name, module) -> bool``; the nearest module, upwards
            from the one that holds a parameter, becomes its unit. Default: the nearest ancestor
            that is an element of a container.
        hook_boundary_strict: raise if no module satisfies that predicate, instead of taking the
            module that holds the parameter.
        mp_policy: a ``MixedPrecisionPolicy``; default: that of the enclosing ``fully_shard``
            module.
        prefetch: how many units' weights are brought ahead of the one that computes, in forward and
            backward, in the order of the pass before; 0: none. Each costs its memory while it
            waits. The results are the same.
        blocks: fused weights whose blocks are matrices of their own, as for ``Muon``, which takes
            them from here then; the plan counts what the blocks cost.
        cost: how the plan weighs matrices: "measured" (a time model) or "flops".
        process_groups: "isolated": the operations of every role keep an order of their own, so that
            they never wait for each other or for the user's collectives.

    Returns:
        The plan: ``print`` it for a table. Equal on all ranks (checked here), and a function of
        names, shapes, mesh and options only. Keeps no parameter alive.

    Raises:
        ValueError: bad mesh or option, a parameter that cannot be dedicated, ranks that disagree.
    """
    return _dedicate(
        model, mesh, predicate, False,
        reshard_after_forward, hook_boundary_predicate, hook_boundary_strict, mp_policy, prefetch,
        blocks, cost, process_groups,
    )  # fmt: skip


def _dedicate(
    model: nn.Module,
    mesh: DeviceMesh,
    predicate: Predicate | None,
    for_ddp: bool,
    reshard_after_forward: bool | BoundaryPredicate = True,
    hook_boundary_predicate: BoundaryPredicate | None = None,
    hook_boundary_strict: bool = True,
    mp_policy: Any = None,
    prefetch: int = 1,
    blocks: Any = None,
    cost: str = "measured",
    process_groups: str = "isolated",
) -> _C.OwnershipPlan:
    _check_options(reshard_after_forward, prefetch, cost, process_groups)
    view = MeshView(mesh)
    view.plain_scalars = for_ddp
    chosen = _choose(model, predicate)
    _check_fit(model, view, chosen)

    named = {name: parameter for name, parameter, _ in chosen}
    cut = {name: resolve(blocks, name, parameter) for name, parameter in named.items()}
    check_used(blocks, list(named))
    units: dict[str, list[str]] = {}
    for name in named:
        unit = unit_of(model, name, hook_boundary_predicate, hook_boundary_strict)
        units.setdefault(unit, []).append(name)
    reshards = {unit: _reshards(reshard_after_forward, model, unit) for unit in units}
    plan = _C.OwnershipPlan(
        [
            (name, unit, list(named[name].shape), named[name].numel() * named[name].element_size())
            for unit, names in units.items()
            for name in names
        ],
        view.shape[0],
        view.shape[1],
        cost,
        cut,
    )
    view.check_equal(
        "what dedicate_params was called with",
        "\n".join(
            [
                plan.canonical_text,
                f"units {list(units)}",
                f"reshard_after_forward {list(reshards.values())}, prefetch {prefetch}",
                *(f"{name} {p.dtype}" for name, p in sorted(named.items())),
            ]
        ),
    )

    places = {name: where for name, _, where in chosen}
    entries: dict[str, list[Entry]] = {}
    for unit, names in units.items():
        for name in names:
            owner = plan.owner(name)
            _rest_on_owner(named[name], places[name], view, owner, hidden=not for_ddp)
            entry = Entry(name, owner, named[name].shape, places[name], cut[name])
            entries.setdefault(unit, []).append(entry)
    if chosen:
        Runtime(
            model,
            view,
            plan,
            [(unit, listed, reshards[unit]) for unit, listed in entries.items()],
            mp_policy=mp_policy,
            prefetch=prefetch,
        )
        _ignore_in_ddp(model, places)
    return plan


def dedicate_params_ddp(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    predicate: Predicate | None = None,
    **options: Any,
) -> _C.OwnershipPlan:
    """``dedicate_params`` for ``DistributedDataParallel(model)``, to be called before wrapping.

    DDP is HSDP with one shard: every rank is a replica. ``DistributedDataParallel`` then passes
    over the dedicated parameters.

    Args:
        model, predicate, options: as for ``dedicate_params``.
        mesh: a mesh of N ranks, 1-D or (N, 1); None for all ranks.
    """
    if mesh is None:
        device = next((p.device.type for p in model.parameters()), "cpu")
        device = torch.get_default_device().type if device == "meta" else device
        world = torch.distributed.get_world_size()
        mesh = init_device_mesh(
            device, (world, 1), mesh_dim_names=("dmuon_replicate", "dmuon_shard")
        )
    elif mesh.ndim == 1:
        # DTensor takes meshes of equal shape and names for one: these names are dmuon's own.
        mesh = DeviceMesh(
            mesh.device_type,
            mesh.mesh.view(-1, 1),
            mesh_dim_names=("dmuon_replicate", "dmuon_shard"),
        )
    if mesh.ndim != 2 or mesh.size(1) != 1:
        raise ValueError(f"dmuon: DDP needs a mesh of N ranks or (N, 1), got {format_mesh(mesh)}")
    return _dedicate(model, mesh, predicate, True, **options)


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulates gradients without communication; the next backward outside reduces them.

    Covers the dedicated parameters, FSDP2's and DDP's of ``model``. May be nested; the previous
    settings come back at the end.
    """
    runtimes = runtimes_of(model)
    switched: list[tuple[FSDPModule, bool, bool]] = []
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                stack.enter_context(module.no_sync())
            elif isinstance(module, FSDPModule) and (groups := param_groups(module)):
                switched.append((module, groups[0].reduce_grads, groups[0].all_reduce_grads))
                module.set_requires_gradient_sync(False, recurse=False)
        for runtime in runtimes:
            runtime.no_sync_depth += 1
        try:
            yield
        finally:
            for runtime in runtimes:
                runtime.no_sync_depth -= 1
            for wrapped, reduce, all_reduce in switched:
                wrapped.set_requires_gradient_sync(reduce, recurse=False)
                wrapped.set_requires_all_reduce(all_reduce, recurse=False)


def _check_options(reshard: Any, prefetch: Any, cost: str, process_groups: str) -> None:
    if not isinstance(reshard, bool) and not callable(reshard):
        raise ValueError(
            "dmuon: reshard_after_forward must be True, False or a function of a unit's name and "
            f"block, got {reshard!r}"
        )
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        raise ValueError(f"dmuon: prefetch must be a number of units from 0 on, got {prefetch!r}")
    if cost not in _COSTS:
        raise ValueError(f"dmuon: cost must be one of {_COSTS}, got {cost!r}")
    if process_groups != "isolated":
        raise ValueError(f'dmuon: process_groups must be "isolated", got {process_groups!r}')


def _reshards(given: bool | BoundaryPredicate, model: nn.Module, unit: str) -> bool:
    answer = given if isinstance(given, bool) else given(unit, model.get_submodule(unit))
    if not isinstance(answer, bool):
        raise ValueError(
            f"dmuon: reshard_after_forward must say True or False, got {answer!r} for unit "
            f"{unit or '<model>'!r}"
        )
    return answer


Chosen = list[tuple[str, nn.Parameter, list[tuple[nn.Module, str]]]]


def _choose(model: nn.Module, predicate: Predicate | None) -> Chosen:
    """(name, parameter, all places) of every parameter that the predicate takes, each once."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, leaf))
    test = predicate if predicate is not None else default_predicate(model)
    chosen: Chosen = []
    for name, parameter in model.named_parameters():
        if isinstance(parameter, OwnedTensor):
            if predicate is not None and test(name, parameter):
                raise ValueError(f"dmuon: parameter {name!r} is dedicated already")
            continue
        if not test(name, parameter):
            continue
        _check_parameter(name, parameter)
        chosen.append((name, parameter, places[id(parameter)]))
    return chosen


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    what = f"dmuon: parameter {name!r} of shape {tuple(parameter.shape)}"
    if isinstance(parameter, DTensor):
        raise ValueError(
            f"{what} is a DTensor already (placements {parameter.placements}); call "
            "dedicate_params before fully_shard"
        )
    if parameter.ndim < 2:
        raise ValueError(
            f"{what} has {parameter.ndim} dimension(s); Muon needs matrices: leave it out of the "
            "predicate, and AdamW takes it"
        )
    if parameter.numel() == 0 or parameter.dtype not in (
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
    ):  # fmt: skip
        raise ValueError(f"{what} and dtype {parameter.dtype} cannot be orthogonalized")


def _check_fit(model: nn.Module, view: MeshView, chosen: Chosen) -> None:
    for name, parameter, _ in chosen:
        if parameter.device.type not in (view.device_type, "meta"):
            raise ValueError(
                f"dmuon: the mesh does not fit the model: {format_mesh(view.mesh)}, but parameter "
                f"{name!r} of {type(model).__name__} is on {parameter.device}"
            )


def _rest_on_owner(
    parameter: nn.Parameter,
    places: Iterable[tuple[nn.Module, str]],
    view: MeshView,
    owner: tuple[int, int],
    hidden: bool,
) -> None:
    rest = nn.Parameter(
        OwnedTensor.build(local_like(parameter, view.slot == owner), view, owner, parameter.shape),
        requires_grad=parameter.requires_grad,
    )
    for module, leaf in places:
        module._parameters[leaf] = rest
        if hidden:  # from fully_shard; DDP has a list of its own
            hide(module, leaf)


def _ignore_in_ddp(model: nn.Module, places: dict[str, list[tuple[nn.Module, str]]]) -> None:
    """DDP's own ignore list, by every name under which it may meet a dedicated parameter."""
    held = {id(module): leafs for module, leafs in _leafs_by_module(places)}
    names = {
        f"{path}.{leaf}" if path else leaf
        for path, module in model.named_modules(remove_duplicate=False)
        for leaf in held.get(id(module), ())
    }
    known = getattr(model, "_ddp_params_and_buffers_to_ignore", [])
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, list(dict.fromkeys([*known, *sorted(names)]))
    )


def _leafs_by_module(
    places: dict[str, list[tuple[nn.Module, str]]],
) -> Iterator[tuple[nn.Module, set[str]]]:
    by_module: dict[int, tuple[nn.Module, set[str]]] = {}
    for where in places.values():
        for module, leaf in where:
            by_module.setdefault(id(module), (module, set()))[1].add(leaf)
    yield from by_module.values()
