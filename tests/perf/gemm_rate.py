"""Print the table of optim/src/cost_model.cpp: fp32 GEMM rate by size, on one core.

    python tests/perf/gemm_rate.py

The rate at size s is that of the products of one orthogonalization of an (s, 4 s) matrix: as many
FLOPs in s x s by s x 4 s as in s x s by s x s products. Medians; other load on the machine shows as noise.
The second number is the time per element of what an update does besides products: momentum,
direction, normalization and weights.
"""

import statistics
import time

import torch

SIZES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
MIN_SECONDS = 0.02
SAMPLES = 15


def median_seconds(function):
    """Median time of one call; a sample repeats it until it takes MIN_SECONDS."""
    function()
    start = time.perf_counter()
    function()
    repeats = max(1, int(MIN_SECONDS / max(time.perf_counter() - start, 1e-7)))
    samples = []
    for _ in range(SAMPLES):
        start = time.perf_counter()
        for _ in range(repeats):
            function()
        samples.append((time.perf_counter() - start) / repeats)
    return statistics.median(samples)


def gemm_rate(s):
    """GFLOP/s, half of the FLOPs in square and half in s x s by s x 4 s products."""
    square, wide = torch.randn(s, s), torch.randn(s, 4 * s)
    square_out, wide_out = torch.empty(s, s), torch.empty(s, 4 * s)
    square_seconds = median_seconds(lambda: torch.mm(square, square, out=square_out))
    wide_seconds = median_seconds(lambda: torch.mm(square, wide, out=wide_out))
    return 16 * s**3 / (4 * square_seconds + wide_seconds) / 1e9


def elementwise_nanoseconds(elements):
    """ns per element of one update without its products."""
    gradient, momentum, weight = torch.randn(3, elements)

    def update():
        momentum.lerp_(gradient, 0.05)
        direction = gradient.lerp(momentum, 0.95)
        norm = torch.linalg.vector_norm(direction, dtype=torch.float64)
        weight.add_(direction / norm.float(), alpha=-0.02)

    return median_seconds(update) * 1e9 / elements


def main():
    torch.set_num_threads(1)
    print("s, GFLOP/s")
    for s in SIZES:
        print(f"{{{s}, {gemm_rate(s):.1f}}},")
    for elements in (1 << 16, 1 << 20, 1 << 23):
        print(f"elementwise, {elements} elements: {elementwise_nanoseconds(elements):.2f} ns each")


if __name__ == "__main__":
    main()
