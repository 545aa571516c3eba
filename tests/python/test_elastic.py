"""A run on two nodes goes on with the one that is left: two torchruns on this machine, each with an
address of its own, and one of them is killed together with its workers."""

from __future__ import annotations

import re
import shutil
import socket

import pytest
from checkpoint_model import different
from example_runs import STEPS, ExampleRun, final

NOTICED = 30  # seconds until the workers whose peers are lost have ended
#: torchrun waits 5 s for the lost node and 2 s for further ones, instead of 15 s and 30 s.
PATIENCE = "keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=2,join_timeout=60"
#: What Gloo says of a peer that is gone, and what dmuon says.
LOST = r"Connection \w+ by peer|Broken pipe|dmuon: .*rank [01]\b"


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.multiprocess
def test_a_run_on_two_nodes_goes_on_with_the_one_that_is_left(tmp_path, monkeypatch):
    # Else torchrun's store still holds the addresses of the first processes (torch 2.15).
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    endpoint = f"127.0.0.1:{free_port()}"

    def node(address, hosts):
        launcher = [
            *["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint],
            *["--rdzv-id", tmp_path.name, "--rdzv-conf", f"{PATIENCE},is_host={hosts}"],
            *["--local-addr", address, "--max-restarts", "3"],
        ]
        return ExampleRun(launcher, tmp_path / "run", "--resume")

    # Ranks follow addresses: ranks 0 and 1 are lost, and with them the store of the workers.
    with node("127.0.0.2", 1) as left, node("127.0.0.1", 0) as lost:
        left.wait_until((tmp_path / "run/muon/step-00000001").exists)
        orphans = left.workers()
        lost.kill()  # in the second step or its save
        left.wait_until(lambda: not orphans & left.processes(), NOTICED)
        assert re.search(LOST, left.output())
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        with ExampleRun(["--standalone"], tmp_path / "copy", "--resume") as fresh:
            left.finish()
            fresh.finish()
    assert "mesh 2x2 on cpu, 4 processes" in lost.output()
    assert "mesh 2x1 on cpu, 2 processes" in left.output()
    (step,) = re.findall(r"on from step (\d)", left.output())
    assert int(step) < STEPS and f"on from step {step}" in fresh.output()
    expected = final(tmp_path / "copy", tmp_path / "expected")
    assert different(expected, final(tmp_path / "run", tmp_path / "got")) == []
