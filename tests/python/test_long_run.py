"""Many steps of everything that happens in training: nothing grows, and a replay is the same.

DMUON_TEST_STEPS sets how many; 2000 for a long run.
"""

from __future__ import annotations

import gc
import os
import random
import threading
from pathlib import Path

import torch
import torch.nn as nn
from models import Block, distribute, full_weights
from ranks import run_ranks

import dmuon

STEPS = int(os.environ.get("DMUON_TEST_STEPS", "120"))
WARM_UP = STEPS // 3
LAYERS = 4


class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_in = nn.Linear(4, 6)
        self.layers = nn.ModuleList(Block(rows, 6) for rows in (8, 5, 12, 7))

    def forward(self, x, skipped):
        x = self.embed_in(x)
        for i, layer in enumerate(self.layers):
            if i not in skipped:
                x = layer(x)
        return x


def used():
    """Resident KiB that are this process's own, threads of the system, open descriptors."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return (
        int(fields["RssAnon"].split()[0]),
        int(fields["Threads"]),
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
    )


def pending(model):
    """Units whose whole weights, or gradients on their way, are still there."""
    (runtime,) = model.__dict__["_dmuon_runtimes"]
    return [u.name for u in runtime.units if u.core.unsharded or u.depth or u.in_backward]


def one_step(rank, model, optimizer, chance, step):
    """What happens is drawn alike on all ranks; the data is each rank's own."""

    def forward():
        generator = torch.Generator().manual_seed(chance.randrange(1 << 30) * 4 + rank)
        skipped = {i for i in range(LAYERS) if chance.random() < 0.2}
        return model(torch.randn(5, 4, generator=generator), skipped)

    if chance.random() < 0.2:
        layer = model.layers[chance.randrange(LAYERS)]
        layer.up_proj.weight.requires_grad_(chance.random() < 0.5)
    if chance.random() < 0.2:
        with torch.no_grad():
            forward()
    if chance.random() < 0.2:
        with dmuon.full_params(model):
            forward()
            forward()
    for _ in range(chance.choice([0, 0, 0, 1, 2])):
        with dmuon.no_sync(model):
            forward().pow(2).mean().backward()
    loss = forward().pow(2).mean()
    loss.backward()
    if chance.random() < 0.1:
        optimizer.zero_grad()
        if chance.random() < 0.5:
            forward().pow(2).mean().backward()
    if chance.random() < 0.5:
        optimizer.clip_grad_norm_(0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def train(rank, steps):
    torch.manual_seed(0)
    model, _ = distribute(Skipping(), "(2,2)")
    optimizer = dmuon.Muon(model, lr=0.02, adamw_lr=3e-3, weight_decay=0.01)
    chance = random.Random(7)
    losses, before = [], None
    for step in range(steps):
        if step == WARM_UP:
            before = used()
        losses.append(one_step(rank, model, optimizer, chance, step))
    after = used()
    return losses, full_weights(model), before, after, pending(model)


def run_and_replay(rank):
    losses, weights, before, after, left = train(rank, STEPS)
    again, others, *_ = train(rank, STEPS)
    return (
        losses == again and all(torch.equal(weights[n], others[n]) for n in weights),
        all(torch.isfinite(w).all() for w in weights.values()),
        before,
        after,
        left,
    )


def test_nothing_grows_and_a_replay_gives_the_same_bits():
    for same, finite, before, after, left in run_ranks(4, run_and_replay, limit=30 + STEPS):
        assert same and finite and left == []
        assert after[0] - before[0] < 4096, (before, after)  # KiB
        assert after[1:] == before[1:]
