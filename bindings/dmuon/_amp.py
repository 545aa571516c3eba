"""Gradient scaling: ``torch.amp.GradScaler`` on gradients that rest on their owners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from ._mesh import MeshView


def unscale(
    func: Callable[..., Any],
    gradients: Sequence[Any],
    found_inf: torch.Tensor,
    inverse_scale: torch.Tensor,
    owned: type,
) -> None:
    """``_amp_foreach_non_finite_check_and_unscale_`` where some gradients are of class ``owned``.

    Each is looked at on its owner alone, so ``found_inf`` (1.0 for an infinity or NaN) is then
    agreed on over their meshes: all ranks step, or none. Others in the list, FSDP2's or DDP's, go
    torch's own way.
    """
    others = [g for g in gradients if not isinstance(g, owned)]
    if others:
        func(others, found_inf, inverse_scale)
    mine: list[Any] = [g for g in gradients if isinstance(g, owned)]
    func([g._local_tensor for g in mine], found_inf, inverse_scale)
    views: dict[int, MeshView] = {id(g._view): g._view for g in mine}
    for view in views.values():
        for group in (view.shard_group, view.replicate_group):
            if group is not None:
                dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=group)
