"""Print the numbers of optim/src/cost_model.cpp, on one core.

    python tests/perf/gemm_rate.py

The rate at size s is that of the products of one orthogonalization of an (s, 4 s) matrix: as many
FLOPs in s x s by s x 4 s as in s x s by s x s products, less the time of a call. The call's time
counts separately, once per ATen call of an update. The last number is the time per element of what
an update does besides products: momentum, direction, normalization and weights.
Everything is the best of several samples, each a median: other load only ever adds time.
"""

import statistics
import time

import torch

SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048)
MIN_SECONDS = 0.02
SAMPLES = 5
ROUNDS = 6
CALLS_PER_UPDATE = 30


def best_seconds(function):
    """Time of one call: the least of ROUNDS medians of samples of at least MIN_SECONDS."""
    function()
    start = time.perf_counter()
    function()
    repeats = max(1, int(MIN_SECONDS / max(time.perf_counter() - start, 1e-7)))

    def sample():
        start = time.perf_counter()
        for _ in range(repeats):
            function()
        return (time.perf_counter() - start) / repeats

    return min(statistics.median(sample() for _ in range(SAMPLES)) for _ in range(ROUNDS))


def product_seconds(rows, columns):
    """Seconds of (rows, rows) @ (rows, columns)."""
    left, right = torch.randn(rows, rows), torch.randn(rows, columns)
    out = torch.empty(rows, columns)
    return best_seconds(lambda: torch.mm(left, right, out=out))


def gemm_rate(s, call_seconds):
    """GFLOP/s, half of the FLOPs in square and half in s x s by s x 4 s products."""
    seconds = 4 * product_seconds(s, s) + product_seconds(s, 4 * s) - 5 * call_seconds
    return 16 * s**3 / seconds / 1e9


def elementwise_nanoseconds(elements):
    """ns per element of one update without its products."""
    gradient, momentum, weight = torch.randn(3, elements)

    def update():
        momentum.lerp_(gradient, 0.05)
        direction = gradient.lerp(momentum, 0.95)
        norm = torch.linalg.vector_norm(direction, dtype=torch.float64)
        weight.add_(direction / norm.float(), alpha=-0.02)

    return best_seconds(update) * 1e9 / elements


def main():
    torch.set_num_threads(1)
    call_seconds = product_seconds(1, 1)
    print(f"calls of one update: {CALLS_PER_UPDATE * call_seconds * 1e9:.0f} ns")
    for s in SIZES:
        print(f"{{{s}, {gemm_rate(s, call_seconds):.0f}}},")
    for elements in (1 << 16, 1 << 20, 1 << 22):
        print(f"elementwise, {elements} elements: {elementwise_nanoseconds(elements):.1f} ns each")


if __name__ == "__main__":
    main()
