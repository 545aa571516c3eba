"""Time and error of one orthogonalization, beside torch.optim.Muon's own function.

    python tests/perf/engine.py [--threads N] [--rounds N] [--json FILE]

Every way has its turn in every round (bf16 in the first only); printed are medians of the rounds'
ratios to torch's function in fp32 (the direct form). Ways:
    torch fp32   torch.optim.Muon's iteration on an fp32 matrix (it casts to bf16: here with fp32)
    torch bf16   the same as it is
    dmuon        newton_schulz() in the modes fast and accurate, with torch's coefficients
error     |X - U p(S) V^T| / |U p(S) V^T| against an fp64 singular value decomposition, p the
          composed polynomial: what the arithmetic loses, whatever the polynomial
GF/s      FLOPs that the way's products really do, by its time, and their share of the rate of a
          large square product measured in the same rounds
A batch is a list of matrices for torch's function, which takes one at a time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

import dmuon
from dmuon import _C

SHAPES = [(256, 256), (512, 512), (1024, 1024), (512, 2048), (1024, 4096), (16, 256, 256)]
KELLER = (3.4445, -4.7750, 2.0315)
STEPS = 5


def torch_iteration(g: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """torch.optim.Muon's zero-power iteration (torch/optim/_muon.py), for any dtype."""
    a, b, c = KELLER
    x = g.to(dtype)
    tall = g.size(0) > g.size(1)
    if tall:
        x = x.T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.T
        update = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, update, x, beta=a)
    return x.T if tall else x


def torch_way(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    def way(g: torch.Tensor) -> torch.Tensor:
        if g.dim() == 2:
            return torch_iteration(g, dtype)
        return torch.stack([torch_iteration(one, dtype) for one in g])

    return way


def dmuon_way(mode: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda g: dmuon.newton_schulz(g, STEPS, coefficients="keller", mode=mode)


WAYS = {
    "torch fp32": torch_way(torch.float32),
    "torch bf16": torch_way(torch.bfloat16),
    "dmuon fast": dmuon_way("fast"),
    "dmuon accurate": dmuon_way("accurate"),
}


def reference(g: torch.Tensor) -> torch.Tensor:
    """U p(S / |G|) V^T in fp64."""
    u, s, vh = torch.linalg.svd(g.double(), full_matrices=False)
    s = s / torch.linalg.vector_norm(s, dim=-1, keepdim=True)
    a, b, c = KELLER
    for _ in range(STEPS):
        s = s * (a + s**2 * (b + c * s**2))
    return (u * s.unsqueeze(-2)) @ vh


def gemm_flops(name: str, shape: tuple[int, ...]) -> float:
    short, long = sorted(shape[-2:])
    matrices = shape[0] if len(shape) == 3 else 1
    if name.startswith("torch"):
        return matrices * STEPS * (4.0 * short**2 * long + 2.0 * short**3)
    config = _C.NewtonSchulzConfig("keller", STEPS, name.split()[1])
    return matrices * _C.newton_schulz_flops(short, long, config)


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(shape: tuple[int, ...], rounds: int) -> list[dict[str, object]]:
    g = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    exact = reference(g)
    square = torch.randn(1024, 1024)
    errors = {}
    for name, way in WAYS.items():  # also the warm-up
        x = way(g).double()
        errors[name] = float((x - exact).norm() / exact.norm())
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    rates = []
    for round_number in range(rounds):
        for name, way in WAYS.items():
            if name == "torch bf16" and round_number > 0:
                continue  # tens of times slower on most CPUs
            times[name].append(seconds(lambda way=way: way(g)))
        rates.append(2.0 * 1024**3 / seconds(lambda: square @ square))
    rows = []
    for name in WAYS:
        base = times["torch fp32"]
        rate = gemm_flops(name, shape) / statistics.median(times[name])
        rows.append(
            {
                "shape": "x".join(map(str, shape)),
                "way": name,
                "ratio": statistics.median(t / b for t, b in zip(times[name], base)),
                "error": errors[name],
                "gflops": rate / 1e9,
                "share": rate / statistics.median(rates),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    everything = []
    print(f"{'shape':>12} {'way':>15} {'time':>6} {'error':>9} {'GF/s':>6} {'of GEMM':>8}")
    for shape in SHAPES:
        for row in measure(shape, options.rounds):
            everything.append(row)
            print(
                f"{row['shape']:>12} {row['way']:>15} {row['ratio']:6.2f} {row['error']:9.1e} "
                f"{row['gflops']:6.1f} {row['share']:8.2f}",
                flush=True,
            )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(everything, file, indent=1)


if __name__ == "__main__":
    main()
