"""One view of every mesh form: (replicate, shard), with the channels between its ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from . import _C

if TYPE_CHECKING:
    from collections.abc import Sequence


class MeshView:
    """A 1-D (shard) or 2-D (replicate, shard) DeviceMesh, seen as R replicas of G shards.

    Args:
        mesh: 1-D: all ranks are shards of one replica. 2-D: dimension 0 replicates, dimension 1
            shards, whatever their names. Every dimension of more than one rank must use the
            backend "dmuon" for the mesh's device.

    Raises:
        ValueError: another number of dimensions, or a rank outside the mesh.
        RuntimeError: a group that does not use the backend "dmuon".
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"dmuon: expected a DeviceMesh, got {type(mesh).__name__}: {mesh!r}")
        if mesh.ndim not in (1, 2):
            raise ValueError(
                "dmuon: a mesh must be 1-D (shard) or 2-D (replicate, shard), but "
                f"{mesh} has {mesh.ndim} dimensions; take the data parallel part of it, "
                'as in mesh["replicate", "shard"]'
            )
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise ValueError(f"dmuon: rank {dist.get_rank()} is not in the mesh {mesh}")
        self.mesh = mesh
        #: The runtime whose parameters rest on this view, if any.
        self.runtime: Callable[[], Any] = lambda: None
        #: Beside DDP's plain gradients, norms of dedicated ones must be plain too (for clipping).
        self.plain_scalars = False
        self.device_type = mesh.device_type
        if mesh.ndim == 1:
            self.shape = (1, mesh.size())
            self.slot = (0, coordinate[0])
        else:
            self.shape = (mesh.size(0), mesh.size(1))
            self.slot = (coordinate[0], coordinate[1])
        # A dimension of size 1 may carry a group that cannot communicate; it is never asked.
        self.shard_group = self._group(mesh.ndim - 1)
        self.replicate_group = self._group(0) if mesh.ndim == 2 else None
        self.collectives = self.channel("full")

    def _group(self, dim: int) -> dist.ProcessGroup | None:
        return self.mesh.get_group(dim) if self.mesh.size(dim) > 1 else None

    def channel(self, role: str) -> _C.MeshOwnerCollectives:
        """Owner collectives over the mesh whose order is independent of every other role's."""
        return _C.MeshOwnerCollectives(
            self.replicate_group, self.shard_group, self.device_type, role
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> MeshView:
        return self  # a copy of a tensor rests on the same mesh

    def coordinates(self, slot: tuple[int, int]) -> tuple[int, ...]:
        """A slot as a coordinate of the mesh: without the replicate part if it is 1-D."""
        return slot[2 - self.mesh.ndim :]

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]

    def check_equal(self, what: str, text: str) -> None:
        """Raises on every rank, naming the first differing line, unless all ranks have `text`."""
        # Every rank sees every text before any rank raises, so that none is left waiting.
        seen: list[tuple[int, str]] = [(dist.get_rank(), text)]
        for group in (self.shard_group, self.replicate_group):
            if group is not None:
                parts: list[list[tuple[int, str]]] = [[] for _ in range(dist.get_world_size(group))]
                dist.all_gather_object(parts, seen, group=group)
                seen = [pair for part in parts for pair in part]
        seen.sort()
        for rank, other in seen:
            if other != seen[0][1]:
                raise ValueError(
                    f"dmuon: {what} differs between ranks {seen[0][0]} and {rank}: "
                    + first_difference(seen[0][1], other)
                )


def first_difference(a: str, b: str) -> str:
    """The first line in which two texts differ, in words."""
    left, right = a.splitlines(), b.splitlines()
    for number in range(max(len(left), len(right))):
        x = left[number] if number < len(left) else "<nothing>"
        y = right[number] if number < len(right) else "<nothing>"
        if x != y:
            return f"line {number + 1} is {x!r} on one and {y!r} on the other"
    return "<no difference>"


def local_like(full: torch.Tensor, is_owner: bool) -> torch.Tensor:
    """What a rank keeps of a whole tensor at rest: a copy of it all, or ``(0, ...)`` of it."""
    if is_owner:
        return full.detach().clone(memory_format=torch.contiguous_format)
    return full.detach().new_empty((0, *full.shape[1:]))


def format_mesh(mesh: DeviceMesh) -> str:
    """Shape and dimension names of a mesh, for messages."""
    names: Sequence[str] = mesh.mesh_dim_names or [f"dim{i}" for i in range(mesh.ndim)]
    dims = ", ".join(f"{n}={mesh.size(i)}" for i, n in enumerate(names))
    return f"DeviceMesh({mesh.device_type}: {dims}; ranks {mesh.mesh.flatten().tolist()})"
