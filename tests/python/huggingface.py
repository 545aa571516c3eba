"""What the tests of Accelerate and Trainer share."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"


def launched(rank: int, size: int) -> None:
    """What a launcher tells a rank beside what ``run_ranks`` does."""
    os.environ.update(
        MASTER_ADDR="localhost", MASTER_PORT="29500", LOCAL_WORLD_SIZE=str(size),
        ACCELERATE_USE_CPU="true",
    )  # fmt: skip


def pretend_accelerators() -> None:
    """Makes Accelerate, which knows FSDP2 for accelerators only, take this machine's CPUs for some.

    Everything after that choice is Accelerate's and torch's own.
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
