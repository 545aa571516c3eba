"""Clipping by the norm of all gradients, with one small collective for all of them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ._gradients import all_reduce, copies_of, local_gradient
from ._owned_tensor import OwnedTensor


def clip_grad_norm_(
    params: Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """As ``torch.nn.utils.clip_grad_norm_``, for dedicated, sharded and plain gradients together.

    Every element counts once: a dedicated gradient on its owner, a sharded one on each shard, a
    plain one as if all ranks had the same. Ranks all-reduce one scalar (per mesh; two on a mesh of
    two dimensions that is not the whole job). Nothing waits for the device, unless
    ``error_if_nonfinite``. A collective: every rank must call it.

    Returns:
        The norm before clipping, a 0-dim tensor of the same bits on all ranks.

    Raises:
        RuntimeError: a norm that isn't finite, if ``error_if_nonfinite``; gradients are unchanged.
        ValueError: ``norm_type`` is not positive, or a gradient is a partial sum.
    """
    max_norm, norm_type = float(max_norm), float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"dmuon: norm_type must be positive, got {norm_type}")
    gradients: list[torch.Tensor] = []
    # By mesh (None: no mesh): local gradients, and by how many ranks each is held.
    groups: dict[DeviceMesh | None, list[tuple[torch.Tensor, int]]] = {}
    for p in params:
        local = local_gradient(p)
        if local is None:
            continue
        grad = p if isinstance(p, OwnedTensor) else p.grad
        mesh = grad.device_mesh if isinstance(grad, DTensor) else None
        groups.setdefault(mesh, [])  # also where this rank has nothing: the others wait for it
        copies = copies_of(p)
        if local.numel() > 0:
            gradients.append(local)
            groups[mesh].append((local, copies))
    device = gradients[0].device if gradients else _device_of(groups)
    total = torch.zeros((), device=device, dtype=torch.float64)
    for mesh, held in groups.items():
        part = _power(held, norm_type, device)
        if mesh is not None:
            op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
            all_reduce(part, mesh, op)
        total = torch.maximum(total, part) if math.isinf(norm_type) else total + part
    norm = (total if math.isinf(norm_type) else total.pow(1.0 / norm_type)).to(torch.float32)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"dmuon: the gradients' norm of order {norm_type} is {norm.item()}, so they cannot be "
            "clipped; error_if_nonfinite=False scales by it anyway"
        )
    if gradients:
        coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        with torch.no_grad():
            for place in dict.fromkeys(g.device for g in gradients):
                there = [g for g in gradients if g.device == place]
                torch._foreach_mul_(there, coefficient.to(place, non_blocking=True))
    return norm


def _device_of(groups: Iterable[DeviceMesh | None]) -> torch.device:
    return torch.device(next((mesh.device_type for mesh in groups if mesh is not None), "cpu"))


def _power(
    held: list[tuple[torch.Tensor, int]], norm_type: float, device: torch.device
) -> torch.Tensor:
    """The sum of |x|^p over this rank's elements (each by its copies' share), or their maximum."""
    if not held:
        return torch.zeros((), device=device, dtype=torch.float64)
    with torch.no_grad():
        norms = torch._foreach_norm([g for g, _ in held], norm_type)
        stacked = torch.stack([n.to(device=device, dtype=torch.float64) for n in norms])
    if math.isinf(norm_type):
        return stacked.max()
    shares = torch.tensor([1.0 / copies for _, copies in held], dtype=torch.float64)
    return (stacked.pow(norm_type) * shares.to(device, non_blocking=True)).sum()
