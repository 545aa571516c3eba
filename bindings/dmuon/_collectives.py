"""Owner collectives on ordinary tensors, for use without dedicated parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from . import _C


def reduce_to_owners(
    tensors: Sequence[torch.Tensor],
    owners: Sequence[int],
    group: dist.ProcessGroup | None = None,
    op: Any = dist.ReduceOp.AVG,
    async_op: bool = False,
) -> Any:
    """Sums (or averages) every tensor over the group onto its owner, in one fused operation.

    Args:
        tensors: contiguous, fp16, bf16, fp32 or fp64; equal shapes and dtypes on all ranks. Those
            this rank owns receive the result in place, the others are left as they are. The sum
            runs in rank order 0..N-1 with fp32 (fp64) accumulation.
        owners: for each tensor, its owner's rank in ``group``.
        group: a group of the backend "dmuon"; None for the default group.
        op: ``ReduceOp.AVG`` or ``ReduceOp.SUM``.
        async_op: return at once with a ``Work``; tensors must be left alone until it has completed.

    Returns:
        None, or with ``async_op`` a ``torch.distributed.Work``.

    Raises:
        RuntimeError: arguments that differ between ranks (on every rank, naming them), an owner out
            of range, an unsupported dtype or stride, a rank that did not come within the time-out.
    """
    group = group if group is not None else dist.distributed_c10d._get_default_group()
    if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
        raise ValueError(f"dmuon: reduce_to_owners takes ReduceOp.SUM or ReduceOp.AVG, got {op}")
    divisor = float(group.size()) if op == dist.ReduceOp.AVG else 1.0
    work = _C.reduce_to_owners(group, list(tensors), list(owners), divisor)
    return _finish(work, async_op)


def broadcast_from_owners(
    tensors: Sequence[torch.Tensor],
    owners: Sequence[int],
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Copies every tensor from its owner to all ranks of the group, in one fused operation.

    Args:
        tensors: contiguous, of any dtype; equal shapes and dtypes on all ranks. Overwritten on
            ranks that do not own them.
        owners, group, async_op, and errors: as for ``reduce_to_owners``.

    Returns:
        None, or with ``async_op`` a ``torch.distributed.Work``.
    """
    group = group if group is not None else dist.distributed_c10d._get_default_group()
    return _finish(_C.broadcast_from_owners(group, list(tensors), list(owners)), async_op)


def _finish(work: Any, async_op: bool) -> Any:
    if async_op:
        return work
    work.wait()
    return None
