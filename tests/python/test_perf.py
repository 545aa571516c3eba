"""``python -m dmuon.perf``: found, run, and its figures right; its check can fail."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

import dmuon
from dmuon import perf

TIME_LIMIT = 120
SHORT = ["--iterations", "2", "--repeats", "2", "--warmup", "0"]


def run(*options):
    return subprocess.run(
        [perf.program(), *options], capture_output=True, text=True, timeout=TIME_LIMIT
    )


def test_it_is_a_module_to_run_with_help():
    command = [sys.executable, "-m", "dmuon.perf", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT)
    assert shown.returncode == 0 and shown.stderr == ""
    for word in ("--transport", "--json", "memcpy", "idle", "expected"):
        assert word in shown.stdout


def test_options_that_mean_nothing_are_refused():
    refused = run("--no-such-option")
    assert refused.returncode == 2 and "--no-such-option" in refused.stderr
    assert run("--begin", "2K", "--end", "1K").returncode == 2


def test_bytes_are_the_formula_s_and_no_element_is_wrong(tmp_path):
    size, tensors, file = 2, 5, tmp_path / "rows.json"
    shown = run(
        *["--ranks", str(size), "--tensors", str(tensors), "--owners", "spread,skewed"],
        *["--begin", "1K", "--end", "4K", "--factor", "4", "--dtype", "bfloat16"],
        *["--json", str(file), *SHORT],
    )
    assert shown.returncode == 0, shown.stderr
    result = json.loads(file.read_text())
    assert (result["ranks"], result["tensors"], result["dtype"]) == (size, tensors, "bfloat16")
    rows = result["rows"]
    ways = {row["transport"] for row in rows}
    assert ways in ({"baseline", "gloo"}, {"baseline", "gloo", "ucx"})
    keys = {(r["op"], r["owners"], r["transport"], r["tensor_bytes"]) for r in rows}
    assert keys == {
        (op, owners, way, n)
        for op in ("reduce", "broadcast")
        for owners in ("spread", "skewed")
        for way in ways
        for n in (1024, 4096)
    }
    for row in rows:
        assert row["wrong"] == 0
        assert row["bytes_moved"] == tensors * (size - 1) * row["tensor_bytes"], row
        assert row["seconds"] >= row["best_seconds"] > 0 and row["share"] > 0
        assert (row["speedup"] == 1) == (row["transport"] == "baseline")
        # Rank 0 owns tensors 0, 2 and 4, and where owners are skewed number 1 as well.
        expected = {"spread": 1, "skewed": 4 / 3}[row["owners"]]
        assert abs(row["slowdown_expected"] - expected) < 1e-6
        assert f"{row['tensor_bytes']}" in shown.stdout


def test_a_wrong_element_is_counted_and_the_exit_status_says_so(tmp_path):
    file = tmp_path / "rows.json"
    shown = run(
        *["--ranks", "3", "--tensors", "4", "--begin", "1K", "--end", "1K", "--spoil"],
        *["--json", str(file), *SHORT],
    )
    assert shown.returncode == 1
    for row in json.loads(file.read_text())["rows"]:
        assert row["wrong"] == 3, row  # one element on each rank


def test_ranks_of_a_launcher_are_taken():
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    launch = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    options = ["--begin", "1K", "--end", "1K", "--tensors", "2", "--op", "reduce", *SHORT]
    ranks = [
        subprocess.Popen(
            [perf.program(), *options],
            env={**os.environ, **launch, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=TIME_LIMIT) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert "# 2 ranks" in outputs[0][0] and outputs[1][0] == ""


def test_a_build_without_the_program_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(perf, "__file__", str(tmp_path / "perf.py"))
    with pytest.raises(FileNotFoundError, match="DMUON_BUILD_TOOLS"):
        perf.program()
    assert "perf" not in dmuon.__all__  # a program, not a part of the interface
