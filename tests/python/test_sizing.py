"""What a step sends and holds equals the formulas, which need a plan alone."""

from __future__ import annotations

import ctypes
import gc
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from models import LAYOUTS, Net, distribute, make_mesh
from ranks import run_ranks
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import dmuon

POLICIES = {
    "fp32": None,
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16 sums": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
}
FROZEN = "layers.1.up_proj.weight"
UNUSED = "layers.2"  # left out of the last step


class Skipping(Net):
    skip = False

    def forward(self, x):
        x = self.embed_in(x)
        for i, layer in enumerate(self.layers):
            if not (self.skip and i == 2):
                x = layer(x)
        return self.head(x)


def data(step, rank):
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def traffic_by_policy(rank, layout, reshard):
    return {policy: traffic(rank, layout, reshard, policy) for policy in POLICIES}


def traffic(rank, layout, reshard, policy):
    """Bytes of one step, the second of three; then of a step without gradients for one unit."""
    torch.manual_seed(0)
    model = Skipping()
    model.layers[1].up_proj.weight.requires_grad_(False)
    mesh, fsdp = make_mesh(layout), {"mp_policy": POLICIES[policy] or MixedPrecisionPolicy()}
    plan = dmuon.dedicate_params(model, mesh, reshard_after_forward=reshard)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **fsdp)
    fully_shard(model, mesh=mesh, **fsdp)
    optimizer = dmuon.Muon(model, lr=0.02)

    def step(number):
        before = dmuon.stats(model)
        model(data(number, rank)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return dmuon.stats(model) - before

    step(0)
    usual = step(1)
    model.skip = True
    skipping = step(2)
    slot = model.layers[0].up_proj.weight._view.slot
    formula = dmuon.step_traffic(
        plan, slot, reshard_after_forward=reshard, mp_policy=POLICIES[policy], frozen=[FROZEN]
    )
    entries = [(e.name, e.unit, e.shape, e.owner) for e in plan.entries]
    return usual, skipping, formula, entries


def moved(stats):
    return {
        key: (c["bytes_sent"], c["bytes_received"])
        for key, c in stats.bytes.items()
        if c["bytes_sent"] or c["bytes_received"]
    }


def expected_sums(layout, reshard, policy, entries):
    """Bytes sent by all ranks together, whoever owns what: N - 1 times every matrix."""
    shape = LAYOUTS[layout][0]
    replicas, shards = shape if len(shape) == 2 else (1, shape[0])
    item = 4 if policy == "fp32" else 2
    wire = 2 if policy == "bf16 sums" else 4
    numels = {name: torch.Size(shape).numel() for name, _, shape, _ in entries}
    trained = sum(numel for name, numel in numels.items() if name != FROZEN)
    padded = sum(-(-numel * item // 64) * 64 for numel in numels.values())
    sums = {
        "unshard/shard": (1 + reshard) * replicas * (shards - 1) * padded,
        "reduce/shard": replicas * (shards - 1) * trained * wire,
        "reduce/replicate": (replicas - 1) * trained * wire,
        "publish/replicate": (replicas - 1) * trained * item,
    }
    return {key: value for key, value in sums.items() if value}


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("layout", ["(4)", "(2,2)", "(4,1)"])
def test_bytes_of_a_step_are_those_of_the_formula(layout, reshard):
    results = run_ranks(4, traffic_by_policy, layout, reshard)
    for policy in POLICIES:
        ranks = [result[policy] for result in results]
        entries = ranks[0][3]
        expected = expected_sums(layout, reshard, policy, entries)
        assert {k: sum(moved(r[0]).get(k, (0, 0))[0] for r in ranks) for k in expected} == expected
        for usual, skipping, formula, _ in ranks:
            assert moved(usual) == formula
            # A unit that was left out is summed all the same, as zeros.
            for key in ("reduce/shard", "reduce/replicate"):
                assert moved(skipping).get(key) == moved(usual).get(key)
        if "publish/replicate" in expected:  # ... and not published
            item = 4 if policy == "fp32" else 2
            left_out = sum(torch.Size(s).numel() * item for _, u, s, _ in entries if u == UNUSED)
            replicas = LAYOUTS[layout][0][0]
            published = sum(moved(r[1])["publish/replicate"][0] for r in ranks)
            assert published == expected["publish/replicate"] - (replicas - 1) * left_out


def test_the_average_rank_moves_what_the_documentation_says():
    matrices = [(f"layers.{i}.w", f"layers.{i}", [64, 32], 64 * 32 * 4) for i in range(32)]
    for replicas, shards in ((1, 4), (2, 2), (4, 1), (8, 16)):
        plan = dmuon.OwnershipPlan(matrices, replicas, shards)
        payload = 32 * 64 * 32 * 4
        total: dict[str, int] = {}
        for r in range(replicas):
            for g in range(shards):
                for key, bytes_ in dmuon.step_traffic(plan, (r, g)).items():
                    total[key] = total.get(key, 0) + bytes_.sent
        ranks = replicas * shards
        across = (replicas - 1) / replicas * payload / shards
        expected = {
            "unshard/shard": 2 * (shards - 1) / shards * payload,
            "reduce/shard": (shards - 1) / shards * payload,
            "reduce/replicate": across,
            "publish/replicate": across,
        }
        assert {k: v / ranks for k, v in total.items()} == {k: v for k, v in expected.items() if v}


class Pair(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.second = nn.Linear(width, width, bias=False)

    def forward(self, x):
        return x + self.second(self.first(x))


class Tower(nn.Module):
    def __init__(self, blocks, width):
        super().__init__()
        self.layers = nn.ModuleList(Pair(width) for _ in range(blocks))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def live_bytes(rank, layout, reshard, prefetch):
    """The most unsharded bytes at a time, looked at where modules start and gradients come."""
    model = Tower(4, 16)
    wrapped, plan = distribute(model, layout, reshard_after_forward=reshard, prefetch=prefetch)
    optimizer = dmuon.Muon(model, lr=0.02)
    runtime = model._dmuon_runtimes[0]
    runtime.bind()
    units = [unit.core for unit in runtime.units]
    seen = []

    def look(*_):
        seen.append(sum(unit.unsharded_bytes for unit in units if unit.unsharded))

    for layer in model.layers:
        for linear in (layer.first, layer.second):
            linear.register_forward_pre_hook(look)
            linear.register_full_backward_hook(look)
    for step in range(3):
        seen.clear()
        x = torch.randn(3, 16, generator=torch.Generator().manual_seed(10 * step + rank))
        wrapped(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        look()
    return (
        max(seen),
        seen[-1],
        dmuon.step_memory(plan, reshard_after_forward=reshard, prefetch=prefetch).unsharded,
    )


@pytest.mark.parametrize("reshard, prefetch", [(True, 0), (True, 1), (True, 2), (False, 1)])
@pytest.mark.parametrize("layout", ["(4)", "(2,2)"])
def test_unsharded_bytes_alive_are_those_of_the_formula(layout, reshard, prefetch):
    unit = 2 * 16 * 16 * 4
    for most, between_steps, formula in run_ranks(4, live_bytes, layout, reshard, prefetch):
        assert most == formula == unit * ((1 + prefetch) if reshard else 4)
        assert between_steps == 0


def resident(key):
    status = Path("/proc/self/status").read_text()
    return int(re.search(key + r":\s+(\d+) kB", status).group(1)) * 1024


def measured_memory(rank, layout, reshard, blocks, width):
    """Bytes that this process has grown by at the most of a step, and the formula's."""
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: freed memory goes back at once
    x = torch.randn(2, width, generator=torch.Generator().manual_seed(rank))
    mesh = make_mesh(layout)

    def train(steps):
        model = Tower(blocks, width)
        plan = dmuon.dedicate_params(model, mesh, reshard_after_forward=reshard)
        optimizer = dmuon.Muon(model, lr=0.02)
        for _ in range(steps):
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            dmuon.stats(model)
            peak = resident("VmHWM")
        return peak, plan

    train(2)  # connections, threads, pools
    gc.collect()
    start = resident("VmRSS")
    peak, plan = train(3)
    slot = (0, rank) if layout == "(4)" else divmod(rank, 2)
    return peak - start, dmuon.step_memory(plan, slot, reshard_after_forward=reshard).peak


MEASURE = """
import json, sys, test_sizing
from ranks import run_ranks
arguments = json.loads(sys.argv[1])
print(json.dumps(run_ranks(4, test_sizing.measured_memory, *arguments)))
"""


def measured_in_a_fresh_process(*arguments):
    """The ranks inherit what their parent holds: after half an hour of other tests, more free
    memory than they ask for."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, json.dumps(arguments)],
        cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peaks are measured by Linux's /proc"
)
@pytest.mark.parametrize("layout, reshard", [("(4)", True), ("(4)", False), ("(2,2)", True)])
def test_peak_memory_of_a_step_is_that_of_the_formula(layout, reshard):
    ranks = measured_in_a_fresh_process(layout, reshard, 8, 512)
    # Allocators keep some memory on some ranks, never on all.
    errors = [peak / formula - 1 for peak, formula in ranks]
    assert min(abs(error) for error in errors) < 0.05, errors
    assert abs(sum(errors)) / 4 < 0.15, errors


def test_a_job_is_sized_without_its_ranks():
    """A 7B-like model in bf16 on 4 replicas of 128, against sums by hand."""
    hidden, inner, layers = 4096, 11008, 32
    shapes = {"q": (hidden, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    matrices = [
        (f"layers.{i}.{name}", f"layers.{i}", list(shape), 2 * shape[0] * shape[1])
        for i in range(layers)
        for name, shape in shapes.items()
    ]
    plan = dmuon.OwnershipPlan(matrices, 4, 128)
    every = [dmuon.step_memory(plan, (r, g)) for r in range(4) for g in range(128)]
    elements = layers * (hidden * hidden + 2 * hidden * inner)
    assert sum(m.weights for m in every) == 2 * elements
    assert sum(m.masters for m in every) == sum(m.momentum for m in every) == 4 * elements
    assert sum(m.columns for m in every) == 3 * 2 * elements  # the other replicas' copies
    block = 2 * (hidden * hidden + 2 * hidden * inner)
    most = dmuon.step_memory(plan)
    assert most.peak == max(m.peak for m in every)
    assert (most.unsharded, most.unit_gradients) == (2 * block, block)
    kept = dmuon.step_memory(plan, most.slot, reshard_after_forward=False, variant="adamuon")
    assert kept.unsharded == layers * block
    assert kept.second_moment == 2 * kept.weights
    assert "peak" in str(kept) and f"{kept.peak / 2**20:.2f}" in str(kept)
    halved = dmuon.step_memory(plan, most.slot, momentum_dtype=torch.bfloat16)
    assert halved.momentum * 2 == most.momentum
    with pytest.raises(ValueError, match=r"slot \(4, 0\) is not on the plan's mesh"):
        dmuon.step_memory(plan, (4, 0))
