import os
import sys

sys.path.insert(0, os.path.dirname(__file__))

# Ranks are forked: the parent must not start thread pools.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from transports import TRANSPORTS, require_transport

torch.set_num_threads(1)


@pytest.fixture(params=TRANSPORTS)
def transport(request, monkeypatch):
    """Runs the test once per transport of the owner collectives; its ranks inherit the choice."""
    require_transport(request.param)
    monkeypatch.setenv("DMUON_TRANSPORT", request.param)
    return request.param
