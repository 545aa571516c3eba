"""Runs that are killed go on as if nothing had happened."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoint_model import backward, build, different, everything, train
from example_runs import ROOT, ExampleRun, final
from ranks import run_ranks

sys.path.insert(0, str(ROOT / "examples"))

import train_llama
from checkpoint import Checkpoints

#: How often the run is killed; more for a thorough test.
KILLS = int(os.environ.get("DMUON_TEST_KILLS", "3"))
STEPS = 4 * KILLS


def saving_run(rank, layout, folder, started, steps):
    """Trains with a checkpoint at every step, from the newest one on. The gradients also depend on
    a scheduler and on random numbers of two kinds."""
    called, model, optimizer = build(layout)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    generator = torch.Generator().manual_seed(rank)
    torch.manual_seed(100 + rank)
    checkpoints = Checkpoints(folder)
    saved = checkpoints.saved()
    step = saved[-1] if saved else 0
    if saved:
        others = {"schedule": schedule.state_dict()}
        others = checkpoints.load(step, model, optimizer, others, {"data": generator})
        schedule.load_state_dict(others["schedule"])
    Path(started).touch()
    drawn = []
    for step in range(step + 1, steps + 1):
        drawn.append((int(torch.randint(50, (), generator=generator)), int(torch.randint(50, ()))))
        backward(called, sum(sum_over_ranks(drawn[-1])), rank, 2)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        others = {"schedule": schedule.state_dict()}
        checkpoints.save(step, model, optimizer, others, {"data": generator})
    return everything(model, optimizer), drawn, [g["lr"] for g in optimizer.param_groups]


def sum_over_ranks(numbers):
    tensor = torch.tensor(numbers)
    torch.distributed.all_reduce(tensor)
    return tensor.tolist()


def killed(moment, *arguments):
    """Kills all ranks at once, so many seconds after the first step began."""

    def body():
        os.setpgid(0, 0)
        run_ranks(2, saving_run, *arguments)

    Path(arguments[2]).unlink(missing_ok=True)
    process = multiprocessing.get_context("fork").Process(target=body)
    process.start()
    while not Path(arguments[2]).exists():
        assert process.is_alive()
        time.sleep(0.005)
    time.sleep(moment)
    os.killpg(process.pid, signal.SIGKILL)
    process.join()


@pytest.mark.multiprocess
def test_a_run_killed_at_any_moment_of_its_saves_ends_bit_for_bit_the_same(tmp_path):
    begin = time.monotonic()
    expected = run_ranks(2, saving_run, "(2)", str(tmp_path / "a"), str(tmp_path / "on"), STEPS)
    after = (tmp_path / "on").stat().st_mtime
    window = (time.time() - after) / KILLS
    assert time.monotonic() - begin < 60
    draw = random.Random(0)
    folder = tmp_path / "b"
    for _ in range(KILLS):
        moment = draw.uniform(0, 1.5 * window)
        killed(moment, "(2)", str(folder), str(tmp_path / "on"), STEPS)
    got = run_ranks(2, saving_run, "(2)", str(folder), str(tmp_path / "on"), STEPS)
    for (values, drawn, lr), (other, other_drawn, other_lr) in zip(expected, got):
        assert different(values, other) == []
        assert lr == other_lr
        assert other_drawn == drawn[len(drawn) - len(other_drawn) :]
    names = sorted(path.name for path in folder.iterdir())
    assert names == [f"step-{STEPS - 1:08}", f"step-{STEPS:08}"]


def elastic_run(rank, ranks, layout, folder, steps):
    called, model, optimizer = build(layout)
    checkpoints = Checkpoints(folder)
    saved = checkpoints.saved()
    step = saved[-1] if saved else 0
    generators = {"data": torch.Generator().manual_seed(rank)}
    if saved:
        checkpoints.load(step, model, optimizer, {}, generators)
    train(called, optimizer, range(step, steps), rank, ranks)
    checkpoints.save(steps, model, optimizer, {}, generators)
    return everything(model, optimizer), torch.rand(2, generator=generators["data"])


def test_fewer_and_more_processes_go_on_with_data_of_their_own(tmp_path):
    expected = run_ranks(4, elastic_run, 4, "(2,2)", str(tmp_path / "a"), 6)[0][0]
    runs = [(4, "(2,2)", 2), (2, "(2)", 4), (4, "(4,1)", 6)]
    for ranks, layout, steps in runs:
        results = run_ranks(ranks, elastic_run, ranks, layout, str(tmp_path / "b"), steps)
    matrices = [n for n in expected if "up_proj.weight" in n]
    assert len(matrices) == 6
    for values, _ in results:
        for name in matrices:
            assert torch.equal(values[name], expected[name]), name
    assert len({tuple(draw.tolist()) for _, draw in results}) == 4


# --- the example, under torchrun -----------------------------------------------------------------


def refused(rank, folder):
    options = train_llama.parse(["--save-every", "5", "--checkpoints", folder])
    (Path(folder) / "muon/step-00000035").mkdir(parents=True)
    (Path(folder) / "muon/step-00000040.partial").mkdir()
    trainer = SimpleNamespace(options=options, kind="muon")
    try:
        train_llama.resume(trainer, Checkpoints(Path(folder) / "muon"), torch.Generator())
    except SystemExit as end:
        return str(end)
    return "no error"


def test_a_new_run_does_not_mix_its_checkpoints_with_those_of_an_earlier_one(tmp_path):
    message = run_ranks(1, refused, str(tmp_path))[0]
    assert "up to step 35" in message and "--resume" in message and str(tmp_path) in message


@pytest.mark.multiprocess
def test_the_example_survives_the_kill_of_one_rank_under_torchrun(tmp_path, monkeypatch):
    # Else torchrun's store still holds the addresses of the first processes (torch 2.15).
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    with ExampleRun(["--standalone"], tmp_path / "a") as run:
        run.finish()
    restarts = ["--standalone", "--max-restarts", "1"]
    with ExampleRun(restarts, tmp_path / "b", "--resume") as run:
        run.wait_until((tmp_path / "b/muon/step-00000002").exists)
        os.kill(max(run.workers()), signal.SIGKILL)  # the next step or its save
        run.finish()
    assert "on from step" in run.output()
    expected = final(tmp_path / "a", tmp_path / "x")
    assert different(expected, final(tmp_path / "b", tmp_path / "y")) == []
