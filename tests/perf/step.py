"""Times whole training steps: FSDP2 + AdamW, dmuon, and a naive Muon, in one run.

    python tests/perf/step.py [--meshes 4 2x2] [--dim 256 --layers 4 ...] [--json FILE]

The naive Muon is what sharded data parallelism asks for without owners: FSDP2, and in the step
every rank gathers every matrix and orthogonalizes it. It uses the same engine
(dmuon.newton_schulz), so only the distribution differs.

The variants alternate, each with a few steps on end, so that noise hits all alike and what a step
leaves to the next is in its own time: the last one's updates are waited for. Every second time is a
single step with a barrier before the optimizer, so that the optimizer's phase can be told apart. A
time is the slowest rank's, the table shows medians. CPU seconds are summed over ranks: on a machine
with fewer cores than ranks they say more than the clock.

"dmuon sync" is dmuon with prefetch=0 and replicate_async=False: nothing hidden. For both, the
seconds that a rank has waited for weights and updates are printed, per step, averaged over ranks;
for updates, of those that are followed by a forward.

"bound" is what dmuon could reach at best: the AdamW step plus the Newton-Schulz of the matrices
that a rank owns, timed alone with all ranks at work.

`--figure overhead` measures the host overhead of a step instead, on tiny matrices (overhead.py).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import overhead
import torch
import torch.distributed as dist
import torch.nn.functional as F
from llama import Llama, LlamaConfig, is_projection
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import dmuon
from dmuon._runtime import runtimes_of

BURST = 3  # steps on end
VARIANTS = ("adamw", "dmuon", "dmuon sync", "naive")


class NaiveMuon(torch.optim.Optimizer):
    """Muon on FSDP2 shards: momentum there, then all-gather, orthogonalize, keep the shard."""

    def __init__(self, parameters: list[Tensor], lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every matrix."""
        for group in self.param_groups:
            lr, mu = group["lr"], group["momentum"]
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - mu)
                whole = p.grad.lerp(buffer, mu).full_tensor()
                whole = dmuon.newton_schulz(whole)
                shard = distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)
                p.add_(shard, alpha=-lr * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


class Variant:
    """A model with its optimizers, stepped by `half` (forward, backward) and `update`."""

    def __init__(self, name: str, config: LlamaConfig, mesh: DeviceMesh) -> None:
        self.name = name
        torch.manual_seed(0)
        self.model = Llama(config)
        self.dedicated = name.startswith("dmuon")
        hides = name != "dmuon sync"
        if self.dedicated:
            dmuon.dedicate_params(
                self.model, mesh, predicate=is_projection, prefetch=1 if hides else 0
            )
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        named = list(self.model.named_parameters())
        if name == "adamw":
            self.optimizers = [torch.optim.AdamW(self.model.parameters(), 1e-3, fused=True)]
        elif self.dedicated:
            self.optimizers = [
                dmuon.Muon(self.model, lr=0.02, adamw_lr=1e-3, replicate_async=hides)
            ]
        else:
            rest = [p for n, p in named if not is_projection(n, p)]
            self.optimizers = [
                NaiveMuon([p for n, p in named if is_projection(n, p)]),
                torch.optim.AdamW(rest, 1e-3, fused=True),
            ]
        self.whole: list[float] = []
        self.phase: list[float] = []
        self.cpu: list[float] = []
        self.waited: list[list[float]] = []

    def half(self, tokens: Tensor) -> None:
        """Run forward and backward."""
        logits = self.model(tokens)
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()

    def update(self) -> None:
        """Run the optimizers."""
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def waits(self) -> Tensor:
        """Return the seconds this rank has waited for unshard, publish; waits for nothing."""
        units = [unit for runtime in runtimes_of(self.model) for unit in runtime.units]
        keys = ("unshard_wait_s", "publish_wait_s")
        counters = [unit.core.counters for unit in units]
        return torch.tensor([sum(c[key] for c in counters) for key in keys], dtype=torch.float64)

    def measure(self, tokens: Tensor, split: bool, keep: bool) -> None:
        """Take a step and time the optimizer's phase (`split`), or BURST whole steps."""
        steps = 1 if split else BURST
        before = self.waits()
        dist.barrier()
        cpu, start = time.process_time(), time.perf_counter()
        for _ in range(steps):
            self.half(tokens)
            if split:
                dist.barrier()
                start = time.perf_counter()
            waited = self.waits() - before
            self.update()
        if self.dedicated:
            dmuon.stats(self.model)  # waits for the last update, which nothing hides here
        dist.barrier()
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        if keep and split:
            self.phase.append(slowest(seconds))
        elif keep:
            self.whole.append(slowest(seconds) / steps)
            self.cpu.append(total(cpu) / steps)
            waited /= torch.tensor([steps, steps - 1])  # the first forward had nothing to wait for
            dist.all_reduce(waited)
            self.waited.append((waited / dist.get_world_size()).tolist())


def slowest(value: float) -> float:
    """Return the largest of the ranks' values."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.item()


def total(value: float) -> float:
    """Return the sum of the ranks' values."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.item()


def newton_schulz_flops(m: int, n: int) -> float:
    """Return the FLOPs of five steps in the cheaper form (numbers as in newton_schulz.h)."""
    s, l = min(m, n), max(m, n)  # noqa: E741
    return min(20 * s * s * l + 10 * s**3, 8 * s * s * l + 28 * s**3)


def time_owned(model: torch.nn.Module, repeats: int) -> tuple[float, float]:
    """Time Newton-Schulz on what this rank owns. Return the slowest rank's median and CPU sum."""
    shapes: dict[tuple[int, ...], int] = {}
    for name, p in model.named_parameters():
        if is_projection(name, p) and isinstance(p, DTensor) and p.to_local().numel():
            shapes[tuple(p.shape)] = shapes.get(tuple(p.shape), 0) + 1
    stacks = [torch.randn(count, *shape) for shape, count in shapes.items()]
    seconds, cpus = [], []
    for _ in range(repeats):
        dist.barrier()
        cpu, start = time.process_time(), time.perf_counter()
        for stack in stacks:
            dmuon.newton_schulz(stack)
        dist.barrier()
        seconds.append(slowest(time.perf_counter() - start))
        cpus.append(total(time.process_time() - cpu))
    return statistics.median(seconds), statistics.median(cpus)


def make_mesh(shape: tuple[int, ...]) -> DeviceMesh:
    """Return a 1-D or 2-D mesh of all ranks."""
    names = ("shard",) if len(shape) == 1 else ("replicate", "shard")
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def measure_mesh(shape: tuple[int, ...], options: argparse.Namespace) -> dict[str, Any]:
    """Run all variants on one mesh; return medians in milliseconds."""
    mesh = make_mesh(shape)
    config = LlamaConfig(
        dim=options.dim,
        layers=options.layers,
        heads=options.heads,
        hidden=options.hidden,
        context=options.context,
    )
    variants = [Variant(name, config, mesh) for name in VARIANTS]
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(options.warmup + 2 * options.steps):
        tokens = torch.randint(256, (options.rows, options.context), generator=generator)
        for variant in variants:
            variant.measure(tokens, split=step % 2 == 1, keep=step >= options.warmup)
    owned, owned_cpu = time_owned(variants[1].model, options.steps)

    matrices = [p.shape for n, p in Llama(config).named_parameters() if is_projection(n, p)]
    parameters = sum(p.numel() for p in Llama(config).parameters())
    orthogonalize = sum(newton_schulz_flops(*shape) for shape in matrices)
    world = dist.get_world_size()
    model_flops = 6.0 * parameters * options.rows * options.context * world
    result: dict[str, Any] = {
        "mesh": "x".join(map(str, shape)),
        "newton_schulz_flop_share": orthogonalize / (orthogonalize + model_flops),
        "newton_schulz_owned_ms": 1e3 * owned,
        "newton_schulz_cpu_s": owned_cpu,
    }
    for v in variants:
        result[v.name] = {
            "step_ms": 1e3 * statistics.median(v.whole),
            "optimizer_ms": 1e3 * statistics.median(v.phase),
            "cpu_s": statistics.median(v.cpu),
            "waited_unshard_ms": 1e3 * statistics.median(w[0] for w in v.waited),
            "waited_publish_ms": 1e3 * statistics.median(w[1] for w in v.waited),
        }
    adamw, ours = result["adamw"], result["dmuon"]
    bound = adamw["step_ms"] + result["newton_schulz_owned_ms"]
    result["bound_ms"] = bound
    result["above_bound_of_adamw"] = (ours["step_ms"] - bound) / adamw["step_ms"]
    result["above_bound_of_adamw_cpu"] = (ours["cpu_s"] - adamw["cpu_s"] - owned_cpu) / adamw[
        "cpu_s"
    ]
    result["optimizer_naive_over_dmuon"] = result["naive"]["optimizer_ms"] / ours["optimizer_ms"]
    return result


def show(result: dict[str, Any]) -> None:
    """Print one mesh's table."""
    print(
        f"\nmesh {result['mesh']}, Newton-Schulz {result['newton_schulz_flop_share']:.0%} of FLOPs"
    )
    print(
        f"{'':11}{'step':>10}{'of adamw':>10}{'optimizer':>12}{'of dmuon':>10}"
        f"{'CPU, all ranks':>16}{'waits: unshard':>16}{'publish':>11}"
    )
    for name in VARIANTS:
        row = result[name]
        print(
            f"{name:11}{row['step_ms']:>7.1f} ms"
            f"{row['step_ms'] / result['adamw']['step_ms']:>10.2f}"
            f"{row['optimizer_ms']:>9.1f} ms"
            f"{row['optimizer_ms'] / result['dmuon']['optimizer_ms']:>10.2f}{row['cpu_s']:>14.3f} s"
            f"{row['waited_unshard_ms']:>13.1f} ms{row['waited_publish_ms']:>8.1f} ms"
        )
    print(
        f"bound   {result['bound_ms']:>7.1f} ms = adamw + Newton-Schulz of the owned share "
        f"({result['newton_schulz_owned_ms']:.1f} ms)\n"
        f"dmuon is {result['above_bound_of_adamw']:+.3f} adamw steps from the bound by the clock, "
        f"{result['above_bound_of_adamw_cpu']:+.3f} by CPU seconds"
    )


def main() -> None:
    """Start the ranks if need be, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--figure", choices=("step", "overhead"), default="step")
    parser.add_argument("--blocks", type=int, default=100, help="of the figure overhead")
    parser.add_argument(
        "--profile", action="store_true", help="of the figure overhead, by function"
    )
    parser.add_argument("--meshes", nargs="+", default=["4", "2x2"])
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=704)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--rows", type=int, default=2, help="sequences per rank")
    parser.add_argument("--steps", type=int, default=10, help="measured, of each kind")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    meshes = [tuple(int(part) for part in text.split("x")) for text in options.meshes]
    sizes = {torch.Size(shape).numel() for shape in meshes}
    if len(sizes) != 1:
        parser.error(f"all meshes must have the same number of ranks, got {options.meshes}")

    if "RANK" not in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={sizes.pop()}"]
        os.execv(sys.executable, [sys.executable, *launch, __file__, *sys.argv[1:]])
    dist.init_process_group("dmuon")
    results = []
    for shape in meshes:
        if options.figure == "overhead":
            results.append(overhead.measure_mesh(make_mesh(shape), options))
        else:
            results.append(measure_mesh(shape, options))
        if dist.get_rank() == 0:
            (overhead.show if options.figure == "overhead" else show)(results[-1])
    if dist.get_rank() == 0 and options.json:
        Path(options.json).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
