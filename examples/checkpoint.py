"""Checkpoints of a run in a folder, each complete or not there, whatever is killed and when.

A checkpoint is written aside, by torch.distributed.checkpoint, and gets its name when all of it is
on the disk. It can be loaded by any number of processes on any mesh. On the same number a resumed
run continues bit for bit; on another one the ranks draw other data from there on.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

PARTIAL = ".partial"


class Checkpoints:
    """The checkpoints of one run. Every rank calls every method, at the same point of the run."""

    def __init__(self, folder: str | Path, keep: int = 2) -> None:
        """`folder` must be one that all ranks share; the newest `keep` checkpoints stay in it."""
        self.folder, self.keep = Path(folder), keep

    def saved(self) -> list[int]:
        """Return the steps of the complete checkpoints, oldest first, as rank 0 finds them."""
        found: list[Any] = [None]
        if dist.get_rank() == 0:
            names = [path.name for path in self.folder.glob("step-*")]
            found = [sorted(int(n[5:]) for n in names if not n.endswith(PARTIAL))]
        dist.broadcast_object_list(found)
        return found[0]

    def path(self, step: int) -> Path:
        """Return where the checkpoint of a step is, once it is complete."""
        return self.folder / f"step-{step:08}"

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        others: dict[str, Any],
        generators: dict[str, torch.Generator],
    ) -> None:
        """Save everything. `others`: plain values, alike on all ranks; `generators`: a rank's."""
        aside = self.folder / (self.path(step).name + PARTIAL)
        if dist.get_rank() == 0:
            for left in self.folder.glob("*" + PARTIAL):  # by a run that was killed
                shutil.rmtree(left)
        dist.barrier()
        weights, state = get_state_dict(model, optimizer)
        world, rank = dist.get_world_size(), dist.get_rank()
        everything = {"model": weights, "optimizer": state, "others": others, "world": world}
        dcp.save(
            {**everything, "random": {str(rank): random_state(generators)}}, checkpoint_id=aside
        )
        if rank == 0:
            os.rename(aside, self.path(step))
            sync(self.folder)
        for old in self.saved()[: -self.keep]:
            if rank == 0:
                self.remove(self.path(old))
        dist.barrier()

    def remove(self, path: Path) -> None:
        """Take a checkpoint's name away first, so that what is left of it is not taken for one."""
        aside = path.with_name(path.name + PARTIAL)
        os.rename(path, aside)
        shutil.rmtree(aside)

    def load(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        others: dict[str, Any],
        generators: dict[str, torch.Generator],
    ) -> dict[str, Any]:
        """Load what `save` was given into the same objects; return the plain values.

        `others` says which values are wanted.
        """
        path = self.path(step)
        weights, state = get_state_dict(model, optimizer)
        everything: dict[str, Any] = {"model": weights, "optimizer": state, "others": others}
        everything["world"] = 0
        dcp.load(everything, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        if everything["world"] == dist.get_world_size():
            random = {str(dist.get_rank()): random_state(generators)}
            dcp.load({"random": random}, checkpoint_id=path)
            restore(random[str(dist.get_rank())], generators)
        else:
            for generator in generators.values():
                generator.manual_seed(generator.initial_seed() + 1_000_003 * step)
        return everything["others"]


def random_state(generators: dict[str, torch.Generator]) -> dict[str, Tensor]:
    """Return the state of torch's own generators and of others, as bytes."""
    state = {name: generator.get_state() for name, generator in generators.items()}
    state["torch"] = torch.get_rng_state()
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: dict[str, Tensor], generators: dict[str, torch.Generator]) -> None:
    """Bring the generators into a state that `random_state` gave."""
    for name, generator in generators.items():
        generator.set_state(state[name])
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def sync(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
