"""Times saving and loading a sharded checkpoint: FSDP2 + AdamW, and dmuon, in one run.

    python tests/perf/checkpoint.py [--meshes 4 2x2] [--dim 512 --layers 4 ...] [--json FILE]

Both save the same model with torch.distributed.checkpoint, in turn; a time is the slowest rank's,
the table shows medians. Bytes are those of the files. dmuon keeps weight and momentum of a matrix,
8 bytes an element in fp32, AdamW 12.

"gather" is a full state dict on rank 0 (full_state_dict, cpu_offload): its time, and by how much
rank 0's memory was at most above what it had before and the state itself; beside it the largest
tensor. Linux counts it: VmHWM of /proc/self/status, reset before.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from llama import Llama, LlamaConfig, is_projection
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_leaves

import dmuon

VARIANTS = ("adamw", "dmuon")


class Variant:
    """A model with its optimizer after one step, and what was measured."""

    def __init__(self, name: str, config: LlamaConfig, mesh: DeviceMesh, folder: Path) -> None:
        self.name, self.folder = name, folder
        torch.manual_seed(0)
        self.model = Llama(config)
        if name == "dmuon":
            dmuon.dedicate_params(self.model, mesh, predicate=is_projection)
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer: torch.optim.Optimizer
        if name == "dmuon":
            self.optimizer = dmuon.Muon(self.model)
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.model(torch.randint(256, (1, config.context))).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.times: dict[str, list[float]] = {"save": [], "load": [], "gather": []}
        self.bytes = self.extra = self.largest = 0

    def state(self) -> dict[str, Any]:
        """Return both sharded state dicts."""
        return dict(zip(("model", "optimizer"), get_state_dict(self.model, self.optimizer)))

    def save(self) -> None:
        """Write a checkpoint."""
        dcp.save(self.state(), checkpoint_id=self.folder)

    def load(self) -> None:
        """Read the checkpoint into the model and the optimizer."""
        state = self.state()
        dcp.load(state, checkpoint_id=self.folder)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def gather(self) -> None:
        """Take the full state on rank 0, and note the memory beside it."""
        ctypes.CDLL(None).malloc_trim(0)  # else what is free in the process would be used unseen
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before = memory("VmRSS")
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_state_dict(self.model, self.optimizer, options=options)
        tensors = [t for t in tree_leaves(state) if isinstance(t, Tensor)]
        size = sum(t.numel() * t.element_size() for t in tensors)
        self.extra = max(self.extra, memory("VmHWM") - before - size)
        self.largest = max((t.numel() * t.element_size() for t in tensors), default=0)

    def measure(self, what: str, keep: bool) -> None:
        """Run and time one of the three."""
        if what == "save" and dist.get_rank() == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        call: Callable[[], None] = getattr(self, what)
        dist.barrier()
        start = time.perf_counter()
        call()
        seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        if keep:
            self.times[what].append(seconds.item())
        if what == "save":
            self.bytes = sum(f.stat().st_size for f in self.folder.iterdir())


def memory(key: str) -> int:
    """Return a line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {key} in /proc/self/status")


def measure_mesh(shape: tuple[int, ...], options: argparse.Namespace) -> dict[str, Any]:
    """Run both variants on one mesh; return medians in milliseconds, and bytes."""
    names = ("shard",) if len(shape) == 1 else ("replicate", "shard")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    config = LlamaConfig(
        dim=options.dim, layers=options.layers, heads=options.heads, hidden=options.hidden
    )
    folder: list[Any] = [tempfile.mkdtemp(dir=options.folder) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    variants = [Variant(name, config, mesh, Path(folder[0], name)) for name in VARIANTS]
    for repeat in range(options.repeats + 1):
        for what in ("save", "load", "gather"):
            for variant in variants[:: 1 if repeat % 2 else -1]:
                variant.measure(what, keep=repeat > 0)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    matrices = sum(
        p.numel() for n, p in variants[1].model.named_parameters() if is_projection(n, p)
    )
    rest = sum(p.numel() for p in variants[1].model.parameters()) - matrices
    result: dict[str, Any] = {
        "mesh": "x".join(map(str, shape)),
        "matrix_elements": matrices,
        "other_elements": rest,
        "bytes_allowed": 8 * matrices + 12 * rest,
    }
    for v in variants:
        result[v.name] = {
            **{f"{what}_ms": 1e3 * statistics.median(t) for what, t in v.times.items()},
            "bytes": v.bytes,
            "gather_extra_bytes": v.extra,
            "largest_tensor_bytes": v.largest,
        }
    return result


def show(result: dict[str, Any]) -> None:
    """Print one mesh's table."""
    print(
        f"\nmesh {result['mesh']}, {result['matrix_elements']:,} elements in matrices, "
        f"{result['other_elements']:,} others"
    )
    print(
        f"{'':8}{'save':>11}{'load':>11}{'gather':>11}{'files':>12}{'beside the state':>19}"
        f"{'largest tensor':>17}"
    )
    for name in VARIANTS:
        row = result[name]
        print(
            f"{name:8}"
            + "".join(f"{row[what + '_ms']:>8.0f} ms" for what in ("save", "load", "gather"))
            + f"{row['bytes'] / 1e6:>9.2f} MB{row['gather_extra_bytes'] / 1e6:>16.2f} MB"
            f"{row['largest_tensor_bytes'] / 1e6:>14.2f} MB"
        )
    ours, theirs = result["dmuon"], result["adamw"]
    ratios = (f"{w} {ours[w + '_ms'] / theirs[w + '_ms']:.2f}" for w in ("save", "load", "gather"))
    share = ours["bytes"] / result["bytes_allowed"]
    print(
        f"dmuon / adamw: {', '.join(ratios)}; files {share:.3f} of 8 bytes an element of a matrix "
        "and 12 of the others"
    )


def main() -> None:
    """Start the ranks if need be, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--meshes", nargs="+", default=["4", "2x2"])
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=1408)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", metavar="DIR", help="where to write (default: for temporaries)")
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
        results.append(measure_mesh(shape, options))
        if dist.get_rank() == 0:
            show(results[-1])
    if dist.get_rank() == 0 and options.json:
        Path(options.json).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
