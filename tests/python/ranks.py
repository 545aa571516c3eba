"""Runs a function on N forked ranks, each in a process group of its own backend, and collects
results."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import pickle
import select
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIME_LIMIT = 60.0


class RankFailure(AssertionError):
    """At least one rank failed; the message holds every traceback."""


def _child(
    rank: int,
    size: int,
    path: str,
    backend: str | None,
    timeout: float,
    body: Any,
    args: Any,
    out: Any,
    hold: int,
    release: int,
) -> None:
    os.close(release)  # the parent's alone
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(size)
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    try:
        if backend is not None:
            import dmuon  # noqa: F401

            dist.init_process_group(
                backend,
                init_method=f"file://{path}",
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout),
            )
        result = body(rank, *args)
        if dist.is_initialized():
            dist.destroy_process_group()
        _send(out, (True, result))
    except BaseException:
        _send(out, (False, traceback.format_exc()))
        # The others may still be on their way to the same error: a connection that closes under
        # them would be another one.
        select.select([hold], [], [], 5.0)
    out.close()
    os._exit(0)


def _send(pipe: Any, value: Any) -> None:
    # Plain pickle: multiprocessing's own would hand tensors over by file descriptors of a process
    # that is about to end.
    pipe.send_bytes(pickle.dumps(value))


def run_ranks(
    size: int,
    body: Callable[..., Any],
    *args: Any,
    backend: str | None = "dmuon",
    timeout: float = 30.0,
    limit: float = TIME_LIMIT,
    expect_exit: tuple[int, ...] = (),
) -> list[Any]:
    """``[body(rank, *args) for rank in range(size)]``, each in its own process.

    ``backend``: for the default group; None to leave torch.distributed alone. Ranks in
    ``expect_exit`` may vanish without a result (None is returned for them). A run over ``limit``
    seconds is killed and fails.
    """
    context = multiprocessing.get_context("fork")
    hold, release = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "store")
        pipes, processes = [], []
        for rank in range(size):
            receive, send = context.Pipe(duplex=False)
            process = context.Process(
                target=_child,
                args=(rank, size, path, backend, timeout, body, args, send, hold, release),
            )
            process.start()
            send.close()
            pipes.append(receive)
            processes.append(process)
        results: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + limit
        waiting = dict(enumerate(pipes))
        while waiting and time.monotonic() < deadline:
            ready = multiprocessing.connection.wait(list(waiting.values()), timeout=0.5)
            for rank, pipe in list(waiting.items()):
                if pipe not in ready:
                    continue
                try:
                    results[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    results[rank] = (rank in expect_exit, None)
                    if rank not in expect_exit:
                        results[rank] = (False, "the process ended without a result")
                del waiting[rank]
        os.close(release)
        for process in processes:
            process.join(timeout=5 if not waiting else 0.1)
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
                process.join()
        os.close(hold)
        failures = [f"rank {r}: {v}" for r, (ok, v) in sorted(results.items()) if not ok]
        failures += [f"rank {r}: still running after {limit} s" for r in waiting]
        if failures:
            raise RankFailure("\n".join(failures))
        return [results[r][1] for r in range(size)]
