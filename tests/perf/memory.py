"""Measures the peak memory of a step on every rank beside dmuon.step_memory (Linux).

    torchrun --nproc-per-node 4 tests/perf/memory.py [--mesh 2x2] [--blocks 16 --width 256] [--keep]

Blocks of two width x width matrices, nothing else. Measured is what the process has grown by since
before the model was built, after a first run of the same that sets up connections and pools: at its
largest in a step, and of that what the step itself added.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import re
from pathlib import Path

import torch
import torch.distributed as dist
from overhead import Block
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import dmuon

M_MMAP_THRESHOLD = -3  # of mallopt


def resident(key: str) -> int:
    """Return VmRSS or VmHWM, in bytes."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(key + r":\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def train(mesh: DeviceMesh, options: argparse.Namespace) -> tuple[int, int, dmuon.OwnershipPlan]:
    """Take three steps; return the memory before the last and its peak."""
    model = torch.nn.Sequential(*(Block(options.width) for _ in range(options.blocks)))
    plan = dmuon.dedicate_params(model, mesh, reshard_after_forward=not options.keep)
    optimizer = dmuon.Muon(model, lr=0.02)
    x = torch.randn(2, options.width)
    before = peak = 0
    for _ in range(3):
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        dmuon.stats(model)  # waits for what is being published
        peak = resident("VmHWM")
    return before, peak, plan


def main() -> None:
    """Measure on all ranks, print on the first."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mesh", default="4")
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--keep", action="store_true", help="reshard_after_forward=False")
    options = parser.parse_args()
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)  # freed memory goes back at once
    dist.init_process_group("dmuon")
    mesh = init_device_mesh("cpu", tuple(int(part) for part in options.mesh.split("x")))
    train(mesh, options)
    gc.collect()
    start = resident("VmRSS")
    before, peak, plan = train(mesh, options)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    slot = (0, coordinate[0]) if mesh.ndim == 1 else (coordinate[0], coordinate[1])
    formula = dmuon.step_memory(plan, slot, reshard_after_forward=not options.keep)
    mib = torch.tensor([peak - start, formula.peak, peak - before, formula.peak - formula.at_rest])
    rows = [torch.empty_like(mib) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mib)
    if dist.get_rank() == 0:
        print(f"{'MiB':8}{'peak':>10}{'formula':>10}{'in a step':>12}{'formula':>10}")
        table = torch.stack([*rows, torch.stack(rows).double().mean(0)]) / 2**20
        names = [f"rank {rank}" for rank in range(len(rows))] + ["mean"]
        for name, (a, b, c, d) in zip(names, table.tolist()):
            print(f"{name:8}{a:>10.2f}{b:>10.2f}{c:>12.2f}{d:>10.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
