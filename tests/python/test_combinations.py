"""Every two settings of a training loop together: nothing but the rounding asked for changes."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch._dynamo
import torch.nn as nn
from models import Net, full, full_weights, make_mesh
from ranks import run_ranks
from reference import relative
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import dmuon

STEPS = 6
EPS = 1e-4  # so that AdamW makes no steps of a gradient's last bits
PLAIN = {
    "reshard": True,  # ZeRO-3
    "replicate_async": True,
    "prefetch": 1,
    "checkpointing": None,
    "half": False,  # a policy of bf16 with sums in fp32
    "micros": 1,
    "compiled": False,
}
OTHERS = [
    ("reshard", False),
    ("replicate_async", False),
    ("prefetch", 0),
    ("prefetch", 3),
    ("checkpointing", "reentrant"),
    ("checkpointing", "non-reentrant"),
    ("checkpointing", "wrapper"),
    ("half", True),
    ("micros", 2),
    ("compiled", True),
]
PAIRS = [
    PLAIN | dict(pair) for pair in itertools.combinations(OTHERS, 2) if pair[0][0] != pair[1][0]
]


class Checkpointed(Net):
    """Computes the forward of every layer again in backward."""

    reentrant = False

    def forward(self, x):
        x = self.embed_in(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(x)


def data(step, micro, rank):
    return torch.randn(
        5, 4, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    )


def loss_of(model, x):
    return (model(x).float() - 0.5).pow(2).mean()


def build(how):
    torch.manual_seed(0)
    kind = Checkpointed if how in ("reentrant", "non-reentrant") else Net
    net = kind(((8, 6),) * 3)  # alike, so that they are compiled once
    net.reentrant = how == "reentrant"
    if how == "wrapper":
        net.layers = nn.ModuleList(checkpoint_wrapper(layer) for layer in net.layers)
    return net


def train(rank, layout, setting):
    """Losses and weights at the end; names are left out, as the wrapper changes them."""
    model, mesh = build(setting["checkpointing"]), make_mesh(layout)
    policy = MixedPrecisionPolicy()
    if setting["half"]:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    dmuon.dedicate_params(
        model, mesh, reshard_after_forward=setting["reshard"], prefetch=setting["prefetch"]
    )
    for layer in [*model.layers, model]:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=setting["reshard"])
    if setting["compiled"]:
        for layer in model.layers:
            layer.compile(backend="aot_eager")
    optimizer = dmuon.Muon(
        model, lr=0.02, adamw_lr=3e-3, adamw_eps=EPS, replicate_async=setting["replicate_async"]
    )
    losses = []
    for step in range(STEPS):
        with dmuon.no_sync(model):
            for micro in range(setting["micros"] - 1):
                loss_of(model, data(step, micro, rank)).backward()
        loss = loss_of(model, data(step, setting["micros"] - 1, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, list(full_weights(model).values())


def add_gradients(model, x, half):
    """As a policy of bf16 has it: all of the forward in bf16, gradients added up in fp32."""
    weights = dict(model.named_parameters())
    if half:
        weights = {n: p.detach().bfloat16().requires_grad_() for n, p in weights.items()}
    out = torch.func.functional_call(model, weights, x.bfloat16() if half else x)
    loss = (out.float() - 0.5).pow(2).mean()
    for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(weights.values()))):
        p.grad = g.float() / 4 if p.grad is None else p.grad + g.float() / 4


def train_alone(half, micros):
    model = build(None)
    optimizer = dmuon.Muon(model, lr=0.02, adamw_lr=3e-3, adamw_eps=EPS)
    for step in range(STEPS):
        for micro, rank in itertools.product(range(micros), range(4)):
            add_gradients(model, data(step, micro, rank), half)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def distance(a, b):
    return max(relative(x, y) for x, y in zip(a, b))


def all_pairs(rank, layout, kind):
    """The pairs that changed bits, though only ``half`` and ``micros`` may; and how far those are
    from one process."""
    plain, far, differ = {}, {}, []
    for setting in PAIRS:
        if kind != ("compiled" if setting["compiled"] else "half" if setting["half"] else "fp32"):
            continue
        half, micros = setting["half"], setting["micros"]
        if (half, micros) not in plain:
            plain[half, micros] = train(rank, layout, PLAIN | {"half": half, "micros": micros})
            far[half, micros] = distance(plain[half, micros][1], train_alone(half, micros))
        losses, weights = train(rank, layout, setting)
        expected, others = plain[half, micros]
        if losses != expected or not all(map(torch.equal, weights, others)):
            differ.append((setting, distance(weights, others)))
    return far, differ


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        *itertools.product(["(4)", "(2,2)", "(4,1)"], ["fp32", "half"]),
        ("(2,2)", "compiled"),
    ],
)
def test_every_pair_of_settings_leaves_the_bits_alone(layout, kind):
    for far, differ in run_ranks(4, all_pairs, layout, kind):
        assert differ == []
        assert all(distance < 1e-5 for distance in far.values()), far


def accumulate_halves(rank):
    model, mesh = build(None), make_mesh("(2,2)")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    dmuon.dedicate_params(model, mesh)
    for layer in [*model.layers, model]:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    with dmuon.no_sync(model):
        loss_of(model, data(0, 0, rank)).backward()
    loss_of(model, data(0, 1, rank)).backward()
    return {n: full(p.grad) for n, p in model.named_parameters()}


def test_micro_batches_of_bf16_are_added_up_in_the_dtype_of_the_reduction():
    expected = build(None)
    for micro, rank in itertools.product(range(2), range(4)):
        add_gradients(expected, data(0, micro, rank), half=True)
    for got in run_ranks(4, accumulate_halves):
        for n, p in expected.named_parameters():
            assert relative(got[n], p.grad) < 1e-6, n
