"""Short runs of examples/train_llama.py under torchrun, two processes each, with a checkpoint at
every step."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4
LONGEST = 100  # seconds that a part of a test may take; only a hang takes so long


class ExampleRun:
    """A torchrun and its workers, which are found by a variable in their environment. At the end of
    `with`, whatever is left of them is killed."""

    def __init__(self, launcher, folder, *options):
        """`launcher`: torchrun's options; `options`: the example's, beside the usual ones."""
        name = uuid.uuid4().hex
        self.mark = f"DMUON_TEST_RUN={name}".encode()
        self.log = folder.with_name(f"{name}.log")
        program = [
            *[str(ROOT / "examples/train_llama.py"), "--data", str(ROOT / "README.md")],
            *["--rows", "1", "--steps", str(STEPS), "--eval-every", str(STEPS), "--warmup", "2"],
            *["--sample", "0", "--save-every", "1", "--checkpoints", str(folder), *options],
        ]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        with self.log.open("w") as output:
            self.torchrun = subprocess.Popen(
                [*torchrun, *launcher, *program],
                env={**os.environ, "DMUON_TEST_RUN": name},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()

    def processes(self):
        found = set()
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self.mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
        return found

    def workers(self):
        return self.processes() - {self.torchrun.pid}

    def kill(self):
        while found := self.processes():
            for pid in sorted(found):  # torchrun before its workers
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        self.torchrun.wait()

    def output(self):
        return self.log.read_text()

    def wait_until(self, condition, limit=LONGEST):
        deadline = time.monotonic() + limit
        while not condition():
            assert self.torchrun.poll() is None, self.output()
            assert time.monotonic() < deadline, f"not within {limit} s\n{self.output()}"
            time.sleep(0.02)

    def finish(self):
        self.wait_until(lambda: self.torchrun.poll() is not None)
        assert self.torchrun.returncode == 0, self.output()


def final(folder, path):
    """Weights and optimizer state of a run's last checkpoint; `path` is for a file in between."""
    dcp_to_torch_save(folder / f"muon/step-{STEPS:08}", path)
    state = torch.load(path, weights_only=False)
    flat = dict(state["model"])
    for name, values in state["optimizer"]["state"].items():
        flat.update({f"{name}:{key}": value for key, value in values.items()})
    return flat
