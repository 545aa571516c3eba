"""Which transports of the owner collectives of CPU tensors this build and machine have."""

from __future__ import annotations

import functools
import os
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import RankFailure, run_ranks

TRANSPORTS = ("gloo", "ucx")


def transport_of(group=None):
    group = group if group is not None else dist.group.WORLD
    backend = group._get_backend(torch.device("cpu"))
    # TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper around it.
    return (getattr(backend, "wrapped_pg", None) or backend).transport


@functools.cache
def _obstacle(transport):
    """Why it cannot be used, or None. Asked of two processes, since this one must not start UCX."""
    if transport == "gloo":
        return None
    with mock.patch.dict(os.environ, DMUON_TRANSPORT=transport):
        try:
            assert run_ranks(2, lambda rank: transport_of()) == [transport] * 2
        except RankFailure as failure:
            absent = re.search(r"the UCX library was not found|built without UCX", str(failure))
            if absent is None:
                raise
            return f"{absent.group()}: pip install libucx-cu13"
    return None


def require_transport(transport):
    """Skips the test where it is not installed."""
    obstacle = _obstacle(transport)
    if obstacle is not None:
        pytest.skip(obstacle)
