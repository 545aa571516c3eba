"""dmuon: Muon for sharded data parallel training, each matrix orthogonalized once, by its owner.

>>> import dmuon, torch.distributed as dist
>>> from torch.distributed.fsdp import fully_shard
>>> dist.init_process_group("dmuon")
>>> dmuon.dedicate_params(model, mesh)
>>> for layer in model.layers:
...     fully_shard(layer, mesh=mesh)
>>> fully_shard(model, mesh=mesh)
>>> optimizer = dmuon.Muon(model, lr=0.02)
"""

from __future__ import annotations

import torch

from ._build_info import TORCH_VERSION as _BUILT_WITH
from ._build_info import VERSION as __version__

if torch.__version__.split(".")[:2] != _BUILT_WITH.split(".")[:2]:
    raise ImportError(
        f"dmuon {__version__} was built for torch {_BUILT_WITH}, but torch {torch.__version__} is "
        "installed: C++ extensions work with one minor version only; install dmuon again in this "
        "environment (pip install --no-build-isolation .)"
    )

from . import _backend
from ._blocks import Blocks
from ._C import OwnershipPlan, ProcessGroupDMuon
from ._clip import clip_grad_norm_
from ._collectives import broadcast_from_owners, reduce_to_owners
from ._convert import ema_momentum
from ._dedicate import dedicate_params, dedicate_params_ddp, no_sync
from ._engine import newton_schulz
from ._forward_method import register_forward_method
from ._full_params import full_params
from ._muon import Muon
from ._owned_tensor import OwnedTensor
from ._paths import cmake_prefix_path
from ._qk_clip import QKClip, max_logits
from ._sizing import StepMemory, Traffic, step_memory, step_traffic
from ._stats import Stats, UnitStats, stats
from ._timeline import plot_timeline, timeline_rows

_backend.register()


def _register_backend() -> None:
    """Entry point of the group ``torch.distributed.backends``: importing has registered it."""


__all__ = [
    "Blocks",
    "Muon",
    "OwnedTensor",
    "OwnershipPlan",
    "ProcessGroupDMuon",
    "QKClip",
    "Stats",
    "StepMemory",
    "Traffic",
    "UnitStats",
    "__version__",
    "broadcast_from_owners",
    "clip_grad_norm_",
    "cmake_prefix_path",
    "dedicate_params",
    "dedicate_params_ddp",
    "ema_momentum",
    "full_params",
    "max_logits",
    "newton_schulz",
    "no_sync",
    "plot_timeline",
    "reduce_to_owners",
    "register_forward_method",
    "stats",
    "step_memory",
    "step_traffic",
    "timeline_rows",
]
