"""Runs a function on N ranks with CUDA: spawned, since CUDA does not survive a fork, and on one GPU
if there are no more."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

SIZE = 4


def _rank(
    rank: int, path: str, environment: dict[str, str], timeout: float, body: Any, args: Any
) -> None:
    os.environ.update(environment)
    import torch
    import torch.distributed as dist

    import dmuon  # noqa: F401

    if torch.cuda.device_count() < SIZE:
        # NCCL refuses two ranks on one device of one host: let each be a host of its own, which
        # talk over sockets.
        os.environ["NCCL_HOSTID"] = f"dmuon-rank-{rank}"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    try:
        dist.init_process_group(
            "dmuon",
            init_method=f"file://{path}",
            rank=rank,
            world_size=SIZE,
            timeout=timedelta(seconds=timeout),
        )
        body(rank, *args)
        dist.destroy_process_group()
    except BaseException:
        print(f"rank {rank}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def run_on_gpu(
    path: Any,
    body: Callable[..., Any],
    *args: Any,
    environment: dict[str, str] | None = None,
    timeout: float = 60.0,
    limit: float = 300.0,
    killed: tuple[int, ...] = (),
) -> None:
    """``body(rank, *args)`` in SIZE processes with a default group over the store ``path``.

    Fails if a rank fails, ends by a signal without being in ``killed``, or runs longer than
    ``limit`` seconds."""
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(
            target=_rank, args=(rank, str(path), environment or {}, timeout, body, args)
        )
        for rank in range(SIZE)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + limit
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    late = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for rank in late:
        ranks[rank].kill()
        ranks[rank].join()
    codes = {rank: process.exitcode for rank, process in enumerate(ranks) if rank not in killed}
    assert not late, f"ranks {late} were still running after {limit} s"
    assert not any(codes.values()), f"exit codes by rank: {codes}"
