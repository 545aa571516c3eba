"""Where the gradients of an optimizer's parameters are, and on what their ranks must agree."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from . import _C
from ._owned_tensor import OwnedTensor
from ._unit import Unit, own_gradient


def local_gradient(p: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of a gradient: all of it or nothing, for a dedicated parameter.

    None if there is no gradient, for a dedicated parameter: on any rank. Waits for one that is on
    its way.
    """
    if isinstance(p, OwnedTensor):
        source, index = p._gradient_source()
        if isinstance(source, Unit):
            return source.local_gradient(index)
        return own_gradient(p)._local_tensor if p.grad is not None else None
    return p.grad._local_tensor if isinstance(p.grad, DTensor) else p.grad


def copies_of(p: torch.Tensor) -> int:
    """On how many ranks of its mesh each element of the gradient is held.

    Raises:
        ValueError: the gradient is a partial sum.
    """
    if isinstance(p, OwnedTensor) or not isinstance(p.grad, DTensor):
        return 1
    mesh, copies = p.grad.device_mesh, 1
    for dimension, placement in enumerate(p.grad.placements):
        if isinstance(placement, Partial):
            raise ValueError(
                f"dmuon: a gradient of shape {tuple(p.grad.shape)} is a partial sum "
                f"({p.grad.placements}); reduce it before clipping"
            )
        if isinstance(placement, Replicate):
            copies *= mesh.size(dimension)
    return copies


def all_reduce(value: torch.Tensor, mesh: DeviceMesh, op: dist.ReduceOp.RedOpType) -> None:
    """Combines a value over all ranks of a mesh, in place."""
    if mesh.size() == dist.get_world_size():
        dist.all_reduce(value, op)
        return
    for dimension in range(mesh.ndim):
        if mesh.size(dimension) > 1:
            dist.all_reduce(value, op, mesh.get_group(dimension))


def nonfinite(params: Iterable[torch.Tensor]) -> tuple[bool, list[torch.Tensor]]:
    """Whether any gradient on any rank holds a NaN or an infinity, and which of this rank's do.

    The first is the same on all ranks of the parameters' meshes. A collective over them.
    """
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    meshes: dict[DeviceMesh, None] = {}
    for p in params:
        if isinstance(p, DTensor):
            meshes[p.device_mesh] = None
        local = local_gradient(p)
        if local is not None and local.numel() > 0:
            held.append((p, local))
    found = not _C.all_finite([local for _, local in held])
    bad = [p for p, local in held if not _C.all_finite([local])] if found else []
    # The largest last: it has the ranks of all others, so that it hears of what they found.
    for mesh in sorted(meshes, key=lambda mesh: mesh.size()):
        value = torch.tensor(float(found), device=mesh.device_type)
        all_reduce(value, mesh, dist.ReduceOp.MAX)
        found = bool(value.item())
    return found, bad
