"""Host overhead of a step: 100 blocks of two 8x8 matrices, so that nothing is left to compute.

Run it by `python tests/perf/step.py --figure overhead`. FSDP2 + AdamW and dmuon alternate, each
with a few steps on end. What a step costs is then Python, dispatch and the wake-ups of collectives;
with more ranks than cores, the CPU seconds of the calling thread say more than the clock.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import dmuon

GOAL = 1.5  # dmuon's host time over FSDP2's and AdamW's
BURST = 3  # steps on end


class Block(nn.Module):
    """Two matrices of width x width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width, bias=False)
        self.down = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width) to the same."""
        return x + self.down(self.up(x))


class Variant:
    """A stack of blocks under FSDP2, with AdamW or dmuon, and the seconds its steps took."""

    def __init__(self, dedicated: bool, blocks: int, width: int, mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Block(width) for _ in range(blocks)))
        if dedicated:
            dmuon.dedicate_params(self.model, mesh)
        for block in self.model:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer: torch.optim.Optimizer
        if dedicated:
            self.optimizer = dmuon.Muon(self.model, lr=0.02)
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3, fused=True)
        self.wall: list[float] = []
        self.thread: list[float] = []
        self.process: list[float] = []

    def step(self, x: Tensor) -> None:
        """Forward, backward, update."""
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def measure(self, x: Tensor, keep: bool) -> None:
        """Take BURST steps and note the seconds of one: clock, calling thread, all threads."""
        dist.barrier()
        before = time.perf_counter(), time.thread_time(), time.process_time()
        for _ in range(BURST):
            self.step(x)
        after = time.perf_counter(), time.thread_time(), time.process_time()
        dist.barrier()
        seconds = torch.tensor([b - a for a, b in zip(before, after)], dtype=torch.float64)
        dist.all_reduce(seconds)
        if keep:
            mean = (seconds / dist.get_world_size() / BURST).tolist()
            for times, value in zip((self.wall, self.thread, self.process), mean):
                times.append(value)

    def profile(self, x: Tensor, steps: int) -> str:
        """Where the calling thread's Python time goes, by function (rank 0's)."""
        profiler = cProfile.Profile(time.thread_time)
        for _ in range(steps):
            profiler.runcall(self.step, x)
        text = io.StringIO()
        pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("tottime").print_stats(25)
        return text.getvalue()


def measure_mesh(mesh: DeviceMesh, options: argparse.Namespace) -> dict[str, Any]:
    """Run both variants on one mesh; return medians over bursts, in milliseconds a step."""
    width = 8
    variants = {
        name: Variant(name == "dmuon", options.blocks, width, mesh) for name in ("adamw", "dmuon")
    }
    generator = torch.Generator().manual_seed(dist.get_rank())
    for burst in range(options.warmup + options.steps):
        x = torch.randn(4, width, generator=generator)
        for variant in variants.values():
            variant.measure(x, keep=burst >= options.warmup)
    result: dict[str, Any] = {"mesh": "x".join(map(str, mesh.mesh.shape)), "blocks": options.blocks}
    result["steps"] = options.steps
    for name, v in variants.items():
        result[name] = {
            "step_ms": 1e3 * statistics.median(v.wall),
            "thread_ms": 1e3 * statistics.median(v.thread),
            "process_ms": 1e3 * statistics.median(v.process),
        }
    for key in ("step_ms", "thread_ms", "process_ms"):
        result[f"{key}_ratio"] = result["dmuon"][key] / result["adamw"][key]
    if options.profile:
        result["profile"] = {name: v.profile(x, options.steps) for name, v in variants.items()}
    return result


def show(result: dict[str, Any]) -> None:
    """Print one mesh's table."""
    print(f"\nmesh {result['mesh']}, {result['blocks']} blocks of two 8x8 matrices")
    print(f"{'ms a step, mean of ranks':26}{'clock':>10}{'calling thread':>16}{'all threads':>13}")
    for name in ("adamw", "dmuon"):
        row = result[name]
        print(
            f"{name:26}{row['step_ms']:>10.1f}{row['thread_ms']:>16.1f}{row['process_ms']:>13.1f}"
        )
    ratios = [result[f"{key}_ratio"] for key in ("step_ms", "thread_ms", "process_ms")]
    print(f"{f'dmuon over adamw (goal {GOAL})':26}" + "{:>10.2f}{:>16.2f}{:>13.2f}".format(*ratios))
    for name, text in result.get("profile", {}).items():
        print(f"\n{name}, rank 0's calling thread, CPU seconds of {result['steps']} steps\n{text}")
