"""What others see of the backend: torch's flight recorder and profiler."""

from __future__ import annotations

import gc
import json
import os
import pickle
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

import dmuon
from dmuon._mesh import MeshView

# Completion hooks and per-backend recorders came with torch 2.15.
needs_recorder = pytest.mark.skipif(
    tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 15),
    reason=f"torch {torch.__version__} has no flight recorder for other backends (2.15 has)",
)
pytestmark = pytest.mark.multiprocess


def recorded() -> list[dict]:
    text = torch._C._distributed_c10d._dump_fr_trace_json(backend="dmuon")
    return json.loads(text).get("entries", [])


def use_everything(rank: int) -> list[dict]:
    peer = 1 - rank
    dist.all_reduce(torch.full((3,), float(rank)))
    dist.all_reduce(torch.full((5,), float(rank)), op=dist.ReduceOp.AVG)
    dist.broadcast(torch.full((2, 7), float(rank)), src=1)
    halves = torch.zeros(4, 2)  # strided: through scratch
    dist.all_reduce(halves.t())
    tensors = [torch.full((4, 6), rank + 1.0), torch.full((8,), rank + 2.0)]
    dmuon.reduce_to_owners(tensors, [0, 1])
    dmuon.broadcast_from_owners(tensors, [1, 0])
    mine, theirs = torch.full((9,), float(rank)), torch.empty(9)
    works = [dist.isend(mine, peer), dist.irecv(theirs, peer)]
    for work in works:
        work.wait()
    assert theirs.eq(peer).all()
    dist.barrier()
    return recorded()


@needs_recorder
def test_the_flight_recorder_tells_what_has_completed():
    for rank, entries in enumerate(run_ranks(2, use_everything)):
        peer = 1 - rank
        assert [entry["profiling_name"] for entry in entries] == [
            "dmuon:all_reduce",
            "dmuon:all_reduce",
            "dmuon:broadcast",
            "dmuon:all_reduce",
            "dmuon:reduce",  # reduce_to_owners
            "dmuon:broadcast",  # broadcast_from_owners
            f"dmuon:send {rank}->{peer}",
            f"dmuon:recv {rank}<-{peer}",
            "dmuon:barrier",
        ]
        assert [entry["state"] for entry in entries] == ["completed"] * 9
        reduce = entries[4]
        assert reduce["input_sizes"] == [[4, 6], [8]]
        assert reduce["duration_ms"] > 0


def leave_one_out(rank: int, folder: str) -> tuple[list[dict], str]:
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{folder}/trace_"
    tensors = [torch.full((4, 6), rank + 1.0)]
    dmuon.reduce_to_owners(tensors, [1])
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["rank 0 has given up"], timedelta(seconds=20))
    with pytest.raises(dist.DistBackendError) as raised:
        dmuon.reduce_to_owners(tensors, [1])
    store.set("rank 0 has given up", "")
    return recorded(), str(raised.value)


@needs_recorder
def test_an_operation_that_never_ended_is_in_the_dump(tmp_path):
    results = run_ranks(2, leave_one_out, str(tmp_path), timeout=3.0)
    assert "rank 1 did not take part" in results[0][1]
    assert "rank 0 has left the group" in results[1][1]
    entries = results[0][0]
    states = [(e["profiling_name"], e["state"]) for e in entries]
    assert states == [("dmuon:reduce", "completed"), ("dmuon:reduce", "scheduled")]
    dumped = pickle.loads((tmp_path / "trace_0").read_bytes())["entries"]
    assert [e["state"] for e in dumped] == ["completed", "scheduled"]
    assert dumped[1]["input_sizes"] == [[4, 6]]


def trace(rank: int, folder: str) -> list[tuple[str, float, float]]:
    tensors = [torch.full((64, 64), rank + 1.0) for _ in range(4)]
    dmuon.reduce_to_owners(tensors, [0, 1, 2, 3])  # connections are there, threads started
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        work = dmuon.reduce_to_owners(tensors, [0, 1, 2, 3], async_op=True)
        work.wait()
        dmuon.broadcast_from_owners(tensors, [3, 2, 1, 0])
    file = f"{folder}/trace{rank}.json"
    profiler.export_chrome_trace(file)
    events = json.loads(Path(file).read_text())["traceEvents"]
    ours = [(e["name"], e["ts"], e["dur"]) for e in events if e["name"].startswith("dmuon::")]
    return [event for event in ours if not event[0].startswith("dmuon::wait")]


def test_owner_collectives_are_ranges_of_the_profiler(tmp_path):
    for events in run_ranks(4, trace, str(tmp_path)):
        assert [name for name, _, _ in sorted(events, key=lambda e: e[1])] == [
            "dmuon::reduce_to_owners",
            "dmuon::broadcast_from_owners",
        ]
        assert all(duration > 0 for _, _, duration in events)


def stop_in_flight(rank: int, all_threads: bool) -> list[str]:
    """Profilers that come and go while operations are under way."""
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=all_threads)
    tensors = [torch.full((256, 256), rank + 1.0) for _ in range(8)]
    owners = [i % 2 for i in range(8)]
    dmuon.reduce_to_owners(tensors, owners)
    names: list[str] = []
    for _ in range(6):
        with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as profiler:
            first = dmuon.broadcast_from_owners(tensors, owners, async_op=True)
            first.wait()
            second = dmuon.broadcast_from_owners(tensors, owners, async_op=True)
        gc.collect()
        names += [e.name for e in profiler.events() if e.name.startswith("dmuon::broadcast")]
        second.wait()
    return names


@pytest.mark.parametrize("all_threads", [False, True])
def test_a_profiler_may_be_stopped_while_operations_are_under_way(all_threads):
    for names in run_ranks(2, stop_in_flight, all_threads):
        assert len(names) >= 6 and set(names) == {"dmuon::broadcast_from_owners"}


def wait_for_a_late_rank(rank: int, folder: str) -> list[tuple[str, float]]:
    weight = [torch.full((64, 64), rank + 1.0)]
    dmuon.reduce_to_owners(weight, [0])
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        dist.barrier()
        if rank == 1:
            time.sleep(0.2)
        dmuon.reduce_to_owners(weight, [0])
    file = f"{folder}/trace{rank}.json"
    profiler.export_chrome_trace(file)
    events = json.loads(Path(file).read_text())["traceEvents"]
    return [(e["name"], e["dur"] / 1e6) for e in events if e["name"].startswith("dmuon::wait")]


def test_what_the_host_waits_for_is_a_range_of_the_profiler(tmp_path):
    early, late = run_ranks(2, wait_for_a_late_rank, str(tmp_path))
    ((name, seconds),) = early
    assert name == "dmuon::wait" and seconds > 0.1
    assert [name for name, _ in late] == ["dmuon::wait"]


def labelled(rank: int) -> dict:
    """Counters by label, with two dtypes, of a channel of its own."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    channel = MeshView(mesh).channel("test")
    mixed = [torch.full((4, 6), rank + 1.0), torch.full((8,), rank + 1.0, dtype=torch.bfloat16)]
    outputs = [mixed[0], mixed[1]]
    channel.reduce_to_owners(mixed, outputs, [(0, 0), (0, 1)], 1.0, "a:reduce").wait()
    channel.broadcast_from_owners(mixed, [(0, 0), (0, 1)], "a:publish").wait()
    channel.broadcast_from_owners(mixed[:1], [(0, 0)], "b:publish").wait()
    return channel.counters()["shard"]


def test_counters_are_kept_by_label_and_dtype():
    for rank, counters in enumerate(run_ranks(2, labelled)):
        labels = counters["by_label"]
        assert set(labels) == {"a:reduce", "a:publish", "b:publish"}
        wide, half = (96, 0) if rank == 1 else (0, 96), (16, 0) if rank == 0 else (0, 16)
        assert labels["a:reduce"]["bytes_by_dtype"] == {torch.float32: wide, torch.bfloat16: half}
        back = {torch.float32: wide[::-1], torch.bfloat16: half[::-1]}
        assert labels["a:publish"]["bytes_by_dtype"] == back
        assert labels["b:publish"]["bytes_by_dtype"] == {torch.float32: wide[::-1]}
        for label in labels.values():
            assert label["calls"] == 1 and 0 < label["seconds"] < 30
        for operation, names in (
            ("reduce", ["a:reduce"]),
            ("broadcast", ["a:publish", "b:publish"]),
        ):
            for key in ("calls", "tensors", "bytes_sent", "bytes_received"):
                assert counters[operation][key] == sum(labels[name][key] for name in names)
