"""The backend's CUDA side on one GPU: forwarding to NCCL, and what is refused until it exists."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import dmuon


@pytest.fixture
def group(tmp_path):
    torch.cuda.set_device(0)
    dist.init_process_group("dmuon", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_collectives_reach_nccl_and_gloo_by_the_tensors_device(group):
    for device in ("cuda", "cpu"):
        t = torch.arange(4.0, device=device)
        dist.all_reduce(t)
        dist.broadcast(t, 0)
        assert t.tolist() == [0.0, 1.0, 2.0, 3.0]
    dist.barrier()


def test_owner_collectives_on_cuda_tensors_are_refused_with_the_device(group):
    with pytest.raises(RuntimeError, match="cuda"):
        dmuon.reduce_to_owners([torch.ones(3, device="cuda")], [0])
