"""dmuon's C++ layers as Python sees them. Private: the public names are in ``dmuon`` itself."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup, Work

Slot = tuple[int, int]

class ProcessGroupDMuon:
    """The backend "dmuon": standard collectives go to an inner backend by the tensors' device."""

    class Options:
        """For ``init_process_group(..., pg_options=...)``. How owner collectives of CUDA tensors
        add up: by default as NCCL does; ``nccl_deterministic``: bit for bit as on the CPU, in rank
        order and fp32; ``nccl_fp32_accumulation``: the same for fp16 and bf16 only. The environment
        variables DMUON_NCCL_DETERMINISTIC and DMUON_NCCL_FP32_ACCUMULATION override them."""

        nccl_deterministic: bool
        nccl_fp32_accumulation: bool
        def __init__(self) -> None: ...

    def __init__(
        self,
        rank: int,
        size: int,
        cpu: Any,
        cuda: Any = ...,
        *,
        timeout: timedelta,
        group_name: str = ...,
        store: Any | None = ...,
        nccl_deterministic: bool = ...,
        nccl_fp32_accumulation: bool = ...,
    ) -> None:
        """``store``: where the ranks meet to set up the transport of the owner collectives of CPU
        tensors, which ``DMUON_TRANSPORT`` chooses; without one it is the backend ``cpu`` itself."""
    @property
    def transport(self) -> str:
        """Of the owner collectives of CPU tensors: "ucx" or "gloo"; empty without ``cpu``."""
    def perform_nocolor_split(self, device: torch.device) -> None: ...

class OwnerCollectives:
    """Owner collectives of one role on one group; passed on to units."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def group_name(self) -> str: ...
    def counters(self) -> dict[str, dict[str, Any]]: ...

class MeshOwnerCollectives:
    """Owner collectives of one role over a (replicate, shard) mesh."""

    def __init__(
        self,
        replicate: ProcessGroup | None,
        shard: ProcessGroup | None,
        device_type: str,
        role: str,
    ) -> None: ...
    @property
    def replicate(self) -> OwnerCollectives | None: ...
    @property
    def shard(self) -> OwnerCollectives | None: ...
    def reduce_to_owners(
        self,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        owners: Sequence[Slot],
        divisor: float,
        label: str = ...,
    ) -> Work: ...
    def broadcast_from_owners(
        self, tensors: Sequence[torch.Tensor], owners: Sequence[Slot], label: str = ...
    ) -> Work: ...
    def counters(self) -> dict[str, dict[str, dict[str, Any]]]: ...

def reduce_to_owners(
    group: ProcessGroup, tensors: Sequence[torch.Tensor], owners: Sequence[int], divisor: float
) -> Work: ...
def broadcast_from_owners(
    group: ProcessGroup, tensors: Sequence[torch.Tensor], owners: Sequence[int]
) -> Work: ...
def shutdown_owner_collectives(limit: timedelta = ...) -> int: ...

class NewtonSchulzConfig:
    """Checked coefficients, restarts and dtype of one orthogonalization."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    @property
    def steps(self) -> list[tuple[float, float, float]]: ...
    @property
    def restarts(self) -> list[int]: ...
    dtype: torch.dtype | None

class NewtonSchulzWorkspace:
    """Memory that updates use one after the other."""

    def __init__(self) -> None: ...

class MuonHyper:
    """Checked options of one Muon update."""

    def __init__(
        self,
        lr: float,
        momentum: float,
        nesterov: bool,
        weight_decay: float,
        adjust_lr: str,
        newton_schulz: NewtonSchulzConfig,
        variant: str = ...,
        beta2: float = ...,
        cautious: bool = ...,
        seed: int = ...,
    ) -> None: ...

def newton_schulz(g: torch.Tensor, config: NewtonSchulzConfig) -> torch.Tensor: ...
def newton_schulz_flops(m: int, n: int, config: NewtonSchulzConfig) -> float: ...
def coefficient_set_names() -> list[str]: ...
def lr_ratio(adjust_lr: str, m: int, n: int) -> float: ...
def check_blocks(blocks: tuple[int, Sequence[int]] | None, shape: Sequence[int]) -> None: ...
def second_moment_shape(
    variant: str, shape: Sequence[int], blocks: tuple[int, Sequence[int]] | None
) -> list[int]: ...
def round_stochastically(x: torch.Tensor, seed: int, parameter: int, step: int) -> torch.Tensor: ...
def all_finite(tensors: Sequence[torch.Tensor]) -> bool: ...
def muon_update(
    weights: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    momenta: Sequence[torch.Tensor],
    hyper: MuonHyper,
    *,
    second_moments: Sequence[torch.Tensor] = ...,
    blocks: Sequence[tuple[int, Sequence[int]] | None] = ...,
    streams: Sequence[tuple[int, int]] = ...,
    workspace: NewtonSchulzWorkspace | None = ...,
) -> int: ...
def adamw_update(
    weights: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    steps: Sequence[torch.Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None: ...

class PlanEntry:
    """One parameter of a plan."""

    @property
    def name(self) -> str: ...
    @property
    def unit(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def bytes(self) -> int: ...
    @property
    def cost(self) -> float: ...
    @property
    def owner(self) -> Slot: ...

class OwnershipPlan:
    """Who owns which matrix; ``print`` it for a table. A pure function of its arguments."""

    def __init__(
        self,
        matrices: Sequence[tuple[str, str, Sequence[int], int]],
        replicate_size: int,
        shard_size: int,
        cost: str = ...,
        blocks: Mapping[str, tuple[int, Sequence[int]] | None] = ...,
    ) -> None: ...
    @property
    def entries(self) -> list[PlanEntry]: ...
    @property
    def mesh_shape(self) -> Slot: ...
    def owner(self, name: str) -> Slot: ...
    @property
    def slot_costs(self) -> list[float]: ...
    @property
    def slot_bytes(self) -> list[int]: ...
    @property
    def imbalance(self) -> float: ...
    @property
    def canonical_text(self) -> str: ...
    @property
    def hash(self) -> int: ...
    def __len__(self) -> int: ...

class GradientSync:
    """How one unit's gradients are handled in one backward."""

    def __init__(self, reduce: bool, all_reduce: bool, divisor: float) -> None: ...
    @property
    def reduce(self) -> bool: ...
    @property
    def all_reduce(self) -> bool: ...
    @property
    def divisor(self) -> float: ...

class DedicatedUnit:
    """The dedicated parameters under one hook boundary."""

    def __init__(
        self,
        name: str,
        parameters: Sequence[tuple[str, Sequence[int], Slot, torch.Tensor, torch.dtype]],
        reduce: MeshOwnerCollectives,
        unshard: OwnerCollectives | None,
        publish: OwnerCollectives | None,
        reduce_dtype: torch.dtype | None,
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def unsharded(self) -> bool: ...
    @property
    def unsharded_bytes(self) -> int: ...
    @property
    def stale(self) -> bool: ...
    @property
    def counters(self) -> dict[str, Any]: ...
    def live(self) -> list[torch.Tensor]: ...
    def unshard(self, refresh: bool) -> None: ...
    def wait_unshard(self) -> None: ...
    def reshard(self) -> None: ...
    def publish(self, changed: Sequence[bool]) -> None: ...
    def wait_publish(self) -> None: ...
    def settle(self) -> None: ...
    def reduced(self, index: int) -> torch.Tensor | None: ...
    def take_reduced(self, index: int) -> torch.Tensor | None: ...
    def unreduced(self, index: int) -> torch.Tensor | None: ...
    def drop_gradient(self, index: int) -> None: ...

class DedicatedModel:
    """The units of one model, and the order in which their gradients are reduced."""

    def __init__(
        self, units: Sequence[DedicatedUnit], gradient_outside: Callable[[], None]
    ) -> None: ...
    def attach(self, index: int, live_parameters: Sequence[torch.Tensor]) -> None: ...
    def begin_backward(self, graph_task: int) -> None: ...
    @property
    def in_backward(self) -> bool: ...
    def set_sync(self, index: int, sync: GradientSync) -> None: ...
    def unit_passed(self, index: int) -> None: ...
    def finish_backward(self, fallback: Sequence[GradientSync]) -> None: ...
    def abandon_backward(self) -> None: ...

def install(
    slots: list[tuple[dict[str, Any], str, torch.nn.Parameter, torch.nn.Parameter]], live: bool
) -> None: ...
