"""examples/cpp is built against the installed package, as a user would, and trains on 4 ranks."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dmuon
from dmuon import _C

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "cpp"


def run(*command, limit=300, **env):
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=limit,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def tool(name):
    beside_python = Path(sys.executable).parent / name
    return beside_python if beside_python.exists() else shutil.which(name)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """Where find_package(dmuon) finds it: the installed package, or else the build, installed."""
    if (Path(dmuon.cmake_prefix_path) / "lib/cmake/dmuon/dmuonConfig.cmake").exists():
        return dmuon.cmake_prefix_path
    build = Path(_C.__file__).parents[2]
    prefix = tmp_path_factory.mktemp("prefix")
    run(tool("cmake"), "--install", build, "--prefix", prefix)
    return prefix


@pytest.fixture(scope="module")
def program(prefix, tmp_path_factory):
    folder = tmp_path_factory.mktemp("example")
    ccache = shutil.which("ccache")
    run(
        tool("cmake"), "-S", EXAMPLE, "-B", folder, f"-DCMAKE_PREFIX_PATH={prefix}",
        f"-DPython3_EXECUTABLE={sys.executable}",
        *([f"-DCMAKE_CXX_COMPILER_LAUNCHER={ccache}"] if ccache else []),
    )  # fmt: skip
    run(tool("cmake"), "--build", folder)
    return folder / "train_mlp"


@pytest.mark.multiprocess
def test_the_example_trains_and_all_ranks_agree(program):
    output = run(program, limit=60)
    losses = [float(x) for x in re.findall(r"mean loss ([0-9.]+)", output)]
    assert losses[-1] < 0.5 * losses[0], output
    assert sorted(re.findall(r"rank (\d) of 4: ok", output)) == ["0", "1", "2", "3"], output
    assert len(re.findall(r"slot \(0, \d\)", output)) == 4, output


def test_one_process_trains_with_muons_options(program):
    output = run(program.parent / "train_gated", limit=60)
    losses = [float(x) for x in re.findall(r"loss ([0-9.]+)", output)]
    assert losses[-1] < 0.1 * losses[0], output


@pytest.mark.multiprocess
def test_ranks_started_one_by_one_meet_in_a_file(program, tmp_path):
    store = tmp_path / "store"
    ranks = [
        subprocess.Popen(
            [program, store],
            env={**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=60)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], outputs
    assert all(f"rank {rank} of 2: ok" in outputs[rank] for rank in range(2)), outputs
