"""The backend "dmuon" of ``torch.distributed``: one object for CPU (over Gloo) and CUDA (over
NCCL)."""

from __future__ import annotations

import atexit
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from . import _C

NAME = "dmuon"

_default_timeout = default_pg_timeout  # of the default group


def _timeout(asked: timedelta) -> timedelta:
    """A group's time-out. One that got none of its own, as those of a ``DeviceMesh``, takes the
    default group's: torch's is 30 minutes, however short ``init_process_group`` made that."""
    global _default_timeout
    if not dist.is_initialized():  # this is the default group
        _default_timeout = asked
    return _default_timeout if asked == default_pg_timeout else asked


def _create(options: Any, backend_options: Any) -> _C.ProcessGroupDMuon:
    """torch calls this for every new group that uses the backend."""
    if backend_options is not None and not isinstance(
        backend_options, _C.ProcessGroupDMuon.Options
    ):
        raise TypeError(
            "dmuon: pg_options must be dmuon.ProcessGroupDMuon.Options or None, got "
            f"{type(backend_options).__name__}"
        )
    chosen = backend_options or _C.ProcessGroupDMuon.Options()
    rank, size = options.group_rank, options.group_size
    timeout = _timeout(options.timeout)
    store = options.store
    cpu = dist.ProcessGroupGloo(dist.PrefixStore("dmuon/cpu", store), rank, size, timeout=timeout)
    cuda = None
    if torch.cuda.is_available() and dist.is_nccl_available():
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        cuda = dist.ProcessGroupNCCL(dist.PrefixStore("dmuon/cuda", store), rank, size, nccl)
    return _C.ProcessGroupDMuon(
        rank,
        size,
        cpu,
        cuda,
        timeout=timeout,
        group_name=str(getattr(options, "group_id", "")),
        store=dist.PrefixStore("dmuon/transport", store),
        nccl_deterministic=chosen.nccl_deterministic,
        nccl_fp32_accumulation=chosen.nccl_fp32_accumulation,
    )


def _end_of_process() -> None:
    """Groups that nobody has destroyed: their pending operations must end while the interpreter is
    whole, for a callback of theirs, or a thread that waits for one, needs it."""
    if _C.shutdown_owner_collectives() and threading.active_count() > 1:
        # Daemon threads that have been waiting in C++ return from there while they may. (Python
        # ends a thread that asks for the GIL too late, which C++ does not survive.)
        time.sleep(0.5)


def register() -> None:
    """Makes ``init_process_group("dmuon")`` known; repeated calls do nothing."""
    if NAME not in dist.Backend.backend_list:
        create: Any = _create  # torch's annotation does not know extension types
        atexit.register(_end_of_process)
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
