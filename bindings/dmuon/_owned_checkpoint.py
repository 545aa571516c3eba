"""What ``torch.distributed.checkpoint`` asks of a tensor that lies on its owner alone."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def write_items(fqn: str, local: torch.Tensor, size: torch.Size, is_owner: bool) -> list[Any]:
    """One item with the whole tensor from its owner, none from the others."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import (
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )

    if not is_owner:
        return []
    return [
        WriteItem(
            index=MetadataIndex(fqn, torch.Size([0] * local.ndim)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=whole_chunk(local),
                properties=TensorProperties.create_from_tensor(local),
                size=size,
            ),
        )
    ]


def whole_chunk(local: torch.Tensor) -> Any:
    """The whole of a tensor, as a chunk."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(offsets=torch.Size([0] * local.ndim), sizes=local.size())


class PartToWrite(torch.Tensor):
    """A rank's part of an owned tensor in the process that writes for it, which has no mesh."""

    _size: torch.Size
    _is_owner: bool

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        return write_items(fqn, self.as_subclass(torch.Tensor), self._size, self._is_owner)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def part_to_write(local: torch.Tensor, size: torch.Size, is_owner: bool) -> PartToWrite:
    """``local``, of a tensor of ``size``, for the process that writes it."""
    part: Any = local.as_subclass(PartToWrite)
    part._size, part._is_owner = size, is_owner
    return part


def let_processes_write(kind: type, describe: Callable[[Any], tuple[Any, ...]]) -> None:
    """Lets tensors of ``kind`` go to another process of this rank, as an asynchronous save by a
    process needs it; to plain pickle, which may go anywhere, they refuse themselves.

    ``describe``: the arguments of ``part_to_write`` for a tensor.
    """
    ForkingPickler.register(kind, lambda tensor: (part_to_write, describe(tensor)))
