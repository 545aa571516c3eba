"""Small models for the tests, and how they are laid out over ranks."""

from __future__ import annotations

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dmuon

# name -> (mesh shape, dimension names); "ddp" wraps with DistributedDataParallel instead.
LAYOUTS = {
    "(4)": ((4,), ("shard",)),
    "(2,2)": ((2, 2), ("replicate", "shard")),
    "(1,4)": ((1, 4), ("replicate", "shard")),
    "(4,1)": ((4, 1), ("replicate", "shard")),
    "ddp": ((4, 1), ("replicate", "shard")),
}
# Of another number of ranks.
OTHER_LAYOUTS = {
    "(2)": ((2,), ("shard",)),
    "(1,3)": ((1, 3), ("replicate", "shard")),
    "ddp 2": ((2, 1), ("replicate", "shard")),
}


def make_mesh(layout: str):
    shape, names = {**LAYOUTS, **OTHER_LAYOUTS}[layout]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


class Block(nn.Module):
    def __init__(self, rows: int, columns: int):
        super().__init__()
        self.norm = nn.LayerNorm(columns)
        self.up_proj = nn.Linear(columns, rows)
        self.down_proj = nn.Linear(rows, columns, bias=False)

    def forward(self, x):
        return x + self.down_proj(torch.relu(self.up_proj(self.norm(x))))


class Net(nn.Module):
    """Blocks of two matrices each, between a plain input and output layer."""

    def __init__(self, shapes=((8, 6), (5, 6), (12, 6)), width=6):
        super().__init__()
        self.embed_in = nn.Linear(4, width)
        self.layers = nn.ModuleList(Block(rows, width) for rows, _ in shapes)
        self.head = nn.Linear(width, 3, bias=False)

    def forward(self, x):
        x = self.embed_in(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def distribute(model: nn.Module, layout: str, **options):
    """dedicate_params, then the layout's own wrapping. Returns (model to call, plan)."""
    mesh = make_mesh(layout)
    if layout.startswith("ddp"):
        plan = dmuon.dedicate_params_ddp(model, mesh, **options)
        if all(isinstance(p, dmuon.OwnedTensor) for p in model.parameters()):
            return model, plan  # DDP refuses a model that leaves it nothing to do
        return DistributedDataParallel(model), plan
    plan = dmuon.dedicate_params(model, mesh, **options)
    for layer in getattr(model, "layers", []):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, plan


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the whole tensor (where nothing is sharded, full_tensor() may be the tensor)."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def full_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return {name: full(p.detach()) for name, p in inner.named_parameters()}
