"""The backend's CUDA side on one GPU: forwarding to NCCL, and owner collectives of one rank."""

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


def test_owner_collectives_of_one_rank_scale_and_round(group):
    t = [torch.full((3,), 3.0, device="cuda"), torch.full((2,), 5.0, device="cuda").half()]
    dmuon.reduce_to_owners(t, [0, 0], op=dist.ReduceOp.SUM)
    assert [x.tolist() for x in t] == [[3.0] * 3, [5.0] * 2]
    dmuon.broadcast_from_owners(t, [0, 0])
    assert t[0].tolist() == [3.0] * 3


def test_owner_collectives_on_another_device_are_refused_with_both(group):
    t = torch.ones(3, device="cuda")
    dmuon.reduce_to_owners([t], [0])
    with pytest.raises(RuntimeError, match="is on cpu, but this group's owner collectives move"):
        dmuon.reduce_to_owners([t, torch.ones(3)], [0, 0])
