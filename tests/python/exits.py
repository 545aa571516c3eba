"""Ends processes in every way a training script may end; test_robustness.py judges the result.

    python exits.py RANKS [SCENARIO...]

prints ``{scenario: {"codes": [...], "said": [...]}}``.

torch is imported once; each scenario's ranks are forks of this process that then end as any program
does: by falling off its end, with Python's whole finalization, unless the scenario says otherwise.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import dmuon

Scenario = Callable[[int], None]
SCENARIOS: dict[str, Scenario] = {}
kept: list[object] = []  # alive until the interpreter takes the module down
rank_0_has_ended, lives_with_rank_0 = -1, -1  # the ends of a pipe


def scenario(body: Scenario) -> Scenario:
    SCENARIOS[body.__name__] = body
    return body


def reduce(async_op: bool = False, numel: int = 1000) -> Any:
    return dmuon.reduce_to_owners([torch.ones(numel)] * 2, [0, 1], async_op=async_op)


def answer_nothing() -> None:
    """Of the other ranks: until rank 0 has given up and gone."""
    os.read(rank_0_has_ended, 1)


def expect_no_answer() -> None:
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2))


@scenario
def pending_that_complete(rank: int) -> None:
    for _ in range(20):
        kept.append(reduce(async_op=True, numel=100000))


@scenario
def pending_with_python_callbacks(rank: int) -> None:
    for _ in range(5):
        work = reduce(async_op=True, numel=100000)
        kept.append(work.get_future().then(lambda future: future.value()))


@scenario
def unanswered_with_python_callbacks(rank: int) -> None:
    if rank == 0:
        expect_no_answer()
        work = reduce(async_op=True)
        kept.append(work.get_future().then(lambda future: future.value()))
    else:
        answer_nothing()


@scenario
def unanswered_until_the_limit(rank: int) -> None:
    if rank == 0:
        work = reduce(async_op=True)
        # Of the extension, for the one that runs at exit would wait half a minute.
        assert dmuon._C.shutdown_owner_collectives(timedelta(seconds=1)) > 0
        try:
            work.wait()
        except RuntimeError as error:
            assert "shut down while operations were pending" in str(error), error
            return
        raise AssertionError("the operation ended")
    answer_nothing()


@scenario
def one_rank_raises(rank: int) -> None:
    reduce()
    if rank == 1:
        raise RuntimeError("of its own")
    reduce()
    reduce()


@scenario
def exit_code_with_pending(rank: int) -> None:
    kept.append(reduce(async_op=True, numel=100000))
    sys.exit(7)


@scenario
def os_exit_with_pending(rank: int) -> None:
    kept.append(reduce(async_op=True, numel=100000))
    os._exit(5)


@scenario
def forked_child_ends_first(rank: int) -> None:
    reduce()
    pid = os.fork()
    if pid == 0:
        try:
            reduce()
        except RuntimeError as error:
            sys.exit(0 if "was forked from process" in str(error) else 3)
        sys.exit(4)
    _, status = os.waitpid(pid, 0)
    reduce()
    sys.exit(os.waitstatus_to_exitcode(status))


def run_rank(body: Scenario, rank: int, size: int, folder: str) -> None:
    log = os.open(f"{folder}/said{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    dist.init_process_group(
        "dmuon",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=300),  # more than a rank's alarm leaves it
    )
    body(rank)


def run(body: Scenario, size: int) -> dict[str, object] | None:
    """What became of the ranks; None in a rank, which then ends by itself."""
    global rank_0_has_ended, lives_with_rank_0
    rank_0_has_ended, lives_with_rank_0 = os.pipe()
    folder = tempfile.mkdtemp()
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            signal.alarm(100)  # a rank that hangs ends by this signal
            if rank != 0:
                os.close(lives_with_rank_0)
            run_rank(body, rank, size, folder)
            return None
        pids.append(pid)
    os.close(rank_0_has_ended)
    os.close(lives_with_rank_0)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    said = []
    for rank in range(size):
        with open(f"{folder}/said{rank}", errors="replace") as log:
            said.append(log.read())
    shutil.rmtree(folder)
    return {"codes": codes, "said": said}


def main() -> None:
    size = int(sys.argv[1])
    results = {}
    for name in sys.argv[2:] or SCENARIOS:
        result = run(SCENARIOS[name], size)
        if result is None:
            return
        results[name] = result
    print(json.dumps(results))


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()  # else the ends of the forks would copy all of torch's objects
    main()
