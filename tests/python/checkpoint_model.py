"""A model whose gradients are small integers, so that all layouts compute the same bits."""

from __future__ import annotations

import torch
import torch.nn as nn
from models import distribute, full
from torch.nn.parallel import DistributedDataParallel

import dmuon

ROWS = 12  # of a batch, over all ranks: 1, 2, 3, 4 of them divide it


class Block(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.up_proj = nn.Linear(6, rows)

    def forward(self, x):
        return self.up_proj(x)


class Additive(nn.Module):
    """Affine maps of the input side by side, two of them with one weight, whose row count no mesh
    divides, a buffer that training changes, and one that is not saved."""

    def __init__(self, rows=(8, 5, 14), halves=()):
        super().__init__()
        self.table = nn.Linear(6, 14)
        self.layers = nn.ModuleList(Block(n) for n in rows)
        for i in halves:
            self.layers[i].bfloat16()
        self.tied = nn.Linear(6, 14)
        self.tied.weight = self.table.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x):
        if self.training:
            self.seen += 1
        outputs = [layer(x.to(layer.up_proj.weight.dtype)) for layer in self.layers]
        return torch.cat([*outputs, self.table(x), self.tied(x)], dim=1).float()


class Reordered(Additive):
    """The same names in another order."""

    def __init__(self, rows):
        super().__init__(rows)
        blocks = {str(i): block for i, block in enumerate(self.layers)}
        del self.layers
        self.layers = nn.ModuleDict(dict(reversed(blocks.items())))

    def forward(self, x):
        self.seen += 1
        outputs = [self.layers[str(i)](x) for i in range(len(self.layers))]
        return torch.cat([*outputs, self.table(x), self.tied(x)], dim=1)


def batch(step, rank, ranks, columns):
    """This rank's rows of the step's batch of integers: inputs, and what outputs are weighed by."""
    g = torch.Generator().manual_seed(step)
    x = torch.randint(-2, 3, (ROWS, 6), generator=g).float()
    t = torch.randint(-2, 3, (ROWS, columns), generator=g).float()
    return x[rank::ranks], t[rank::ranks]


def build(layout, seed=0, halves=(), **options):
    """(model to call, model, optimizer); layout None: this process alone."""
    torch.manual_seed(seed)
    model = Additive(halves=halves)
    called = model if layout is None else distribute(model, layout)[0]
    inner = called.module if isinstance(called, DistributedDataParallel) else called
    return called, inner, dmuon.Muon(inner, lr=0.02, weight_decay=0.1, adamw_lr=3e-3, **options)


def backward(model, step, rank, ranks):
    """The mean over the ranks of these gradients is an exact integer sum over the batch."""
    x = batch(step, rank, ranks, 1)[0]
    y = model(x)
    t = batch(step, rank, ranks, y.shape[1])[1]
    (ranks * (y * t).sum()).backward()


def train(model, optimizer, steps, rank, ranks):
    for step in steps:
        backward(model, step, rank, ranks)
        optimizer.step()
        optimizer.zero_grad()


def everything(model, optimizer):
    """Every weight, buffer and optimizer state as a plain tensor, by name."""
    found = {name: full(value) for name, value in model.state_dict().items()}
    for name, p in model.named_parameters():
        for key, value in optimizer.state[p].items():
            found[f"{name}:{key}"] = full(value)
    return found


@torch.no_grad()
def outputs(model):
    """What the model says of one batch, the same on every rank."""
    x = batch(0, 0, 1, 1)[0]
    model.eval()
    y = model(x)
    model.train()
    return y


def different(a, b):
    """Names whose dtype, shape or bits differ, or that are in one only."""
    return sorted(set(a) ^ set(b)) + [
        n for n in a if n in b and (a[n].dtype != b[n].dtype or not torch.equal(a[n], b[n]))
    ]
