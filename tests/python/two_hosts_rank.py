"""What test_two_hosts.py starts under torchrun: sums, then one rank is killed; writes down what the
others saw.

    two_hosts_rank.py FOLDER TIME_OUT VICTIM
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import dmuon


def write(folder, rank, result):
    part = Path(folder, f"{rank}.part")
    part.write_text(json.dumps(result))
    part.rename(part.with_suffix(".json"))


def main(folder, time_out, victim):
    dist.init_process_group("dmuon", timeout=timedelta(seconds=time_out))
    rank = dist.get_rank()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    sums = [torch.full((n,), float(10 * rank + n)) for n in (3, 1000, 300_000)]
    owners = [2, 1, 3]
    dmuon.reduce_to_owners(sums, owners, op=dist.ReduceOp.SUM)
    kept = {n.numel(): n.unique().tolist() for n, o in zip(sums, owners) if o == rank}
    dmuon.broadcast_from_owners(sums, owners)
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    result = {
        "transport": backend.transport,
        "kept": kept,
        "everywhere": [t.unique().tolist() for t in sums],
        "all_reduce": total.item(),
    }
    dist.barrier()
    if rank == victim:
        write(folder, rank, result)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        while True:  # at first the others may be faster than the signal
            dmuon.reduce_to_owners(sums, owners)
    except RuntimeError as error:
        result["error"] = str(error)
    result["noticed"] = time.monotonic() - began
    write(folder, rank, result)
    # torchrun ends a host's ranks when one has failed: the other one shall have its say first.
    neighbour = Path(folder, f"{rank ^ 1}.json")
    while not neighbour.exists() and time.monotonic() - began < 3 * time_out:
        time.sleep(0.05)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
