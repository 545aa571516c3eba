"""plot_timeline: the rows of a trace, and that in one of a real run weights come under compute."""

from __future__ import annotations

import gzip
import json
import sys

import pytest
import torch
from models import Net, distribute
from ranks import run_ranks
from torch.profiler import ProfilerActivity, profile

import dmuon


def event(name, ts, dur, tid=1):
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "tid": tid}


TRACE = {
    "traceEvents": [
        event("aten::linear", 1000, 2000),
        event("aten::mm", 1500, 1000),
        event("autograd::engine::evaluate_function: MmBackward0", 4000, 3000),
        event("aten::mm", 4500, 500),
        event("aten::mm", 1000, 9000, tid=2),
        event("dmuon::broadcast_from_owners layers.1:unshard", 2000, 1500),
        event("dmuon::reduce_to_owners layers.1:reduce, stage 1 of 2", 5000, 1000),
        event("dmuon::reduce_to_owners layers.1:reduce, stage 2 of 2", 5500, 1500),
        event("dmuon::wait layers.1:unshard", 3000, 500),
        event("Optimizer.step#Muon.step", 8000, 1000),
        event("dmuon::broadcast_from_owners layers.1:publish", 8500, 1000),
    ]
}
ROWS = {
    "forward": [(0, 2)],
    "backward": [(3, 6)],
    "step": [(7, 8)],
    "unshard": [(1, 2.5)],
    "reduce": [(4, 6)],
    "publish": [(7.5, 8.5)],
    "waits": [(2, 2.5)],
}


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_rows_of_a_trace(tmp_path, name):
    text = json.dumps(TRACE).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    assert dmuon.timeline_rows(tmp_path / name) == ROWS


def test_a_trace_of_something_else_is_refused(tmp_path):
    (tmp_path / "t.json").write_text('{"traceEvents": []}')
    with pytest.raises(ValueError, match=r"t\.json holds no ranges of a step \(0 events\)"):
        dmuon.timeline_rows(tmp_path / "t.json")


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "t.json").write_text(json.dumps(TRACE))
    dmuon.plot_timeline(tmp_path / "t.json", tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        dmuon.plot_timeline(tmp_path / "t.json", tmp_path / "t.png")


def traced(rank, folder):
    model, _ = distribute(Net(shapes=((256, 64),) * 4, width=64), "(2,2)")
    optimizer = dmuon.Muon(model, lr=0.02)
    x = torch.randn(512, 4, generator=torch.Generator().manual_seed(rank))

    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    dmuon.stats(model)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(2):
            step()
        dmuon.stats(model)
    profiler.export_chrome_trace(f"{folder}/{rank}.json.gz")
    return dmuon.timeline_rows(f"{folder}/{rank}.json.gz")


def overlap(left, right):
    return sum(max(0, min(b, d) - max(a, c)) for a, b in left for c, d in right)


def test_weights_come_under_compute(tmp_path):
    for rows in run_ranks(4, traced, str(tmp_path)):
        assert all(rows.values()), {row: len(spans) for row, spans in rows.items()}
        compute = rows["forward"] + rows["backward"]
        assert overlap(rows["unshard"], compute) > 0
        assert overlap(rows["reduce"], compute) > 0
