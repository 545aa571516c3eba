"""What training loops do, over every transport of the owner collectives and on every mesh."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from block_reference import Reference
from checks import Checks
from models import LAYOUTS, Net, distribute, full, full_weights, make_mesh
from ranks import run_ranks
from reference import relative

import dmuon

LR, DECAY = 0.02, 0.5
MATRICES = 6


def data(number, rank, width=4):
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(5, width, generator=generator)


def net():
    torch.manual_seed(0)
    return Net()


def mean_gradients(model, numbers, loss=lambda m, x: m(x).pow(2).mean(), width=4):
    """Plain autograd in this process: the mean over the ranks, the sum over micro-batches."""
    model.zero_grad()
    for number in numbers:
        for rank in range(4):
            (loss(model, data(number, rank, width)) / 4).backward()
    return {n: p.grad for n, p in model.named_parameters()}


def set_up(layout, **options):
    model, _ = distribute(net(), layout, **options)
    return model, dmuon.Muon(model, lr=LR, weight_decay=DECAY)


def backward(model, number, rank):
    model(data(number, rank)).pow(2).mean().backward()


def gradients(model):
    return {n: None if p.grad is None else full(p.grad) for n, p in model.named_parameters()}


def close(checks, name, got, expected, atol=2e-6):
    for n, value in expected.items():
        if value is None:
            checks.true((name, n), got[n] is None)
        else:
            checks.true((name, n), (got[n] - value).abs().max() <= atol)


def accumulation(rank, layout, checks):
    model, optimizer = set_up(layout)
    with dmuon.no_sync(model):
        for number in range(3):
            backward(model, number, rank)
    backward(model, 3, rank)
    close(checks, "sum", gradients(model), mean_gradients(net(), range(4)))
    optimizer.step()
    count = torch.tensor(dmuon.stats(model).orthogonalizations)
    dist.all_reduce(count)
    checks.true("one orthogonalization a matrix", count.item() == MATRICES)


def dropped(rank, layout, checks):
    model, optimizer = set_up(layout)
    before = full_weights(model)
    backward(model, 0, rank)
    optimizer.zero_grad()
    optimizer.step()
    for name, weight in full_weights(model).items():
        checks.equal(name, weight, before[name])
    backward(model, 1, rank)
    close(checks, "after", gradients(model), mean_gradients(net(), [1]))


def clip_between(rank, layout, checks):
    model, _ = set_up(layout)
    plain = net()
    expected = {n: g.clone() for n, g in mean_gradients(plain, [0]).items()}
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
    clipped = {n: p.grad.clone() for n, p in plain.named_parameters()}
    second = mean_gradients(plain, [1])
    backward(model, 0, rank)
    close(checks, "first", gradients(model), expected)
    got = full(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
    checks.true("norm", abs(got - norm) <= 1e-5 * norm)
    backward(model, 1, rank)
    close(checks, "both", gradients(model), {n: clipped[n] + second[n] for n in second})


def without_gradient(rank, layout, checks):
    """A parameter whose gradient is None for a step keeps its bits, and starts later."""
    model, optimizer = set_up(layout)
    name = "layers.1.up_proj.weight"
    late = model.get_parameter(name)
    dedicated = [n for n, p in model.named_parameters() if isinstance(p, dmuon.OwnedTensor)]
    references = {n: Reference(net().get_parameter(n), lr=LR, wd=DECAY) for n in dedicated}
    for number in range(2):
        plain = net()
        plain.load_state_dict(full_weights(model))
        expected = mean_gradients(plain, [number])
        before = full_weights(model)[name]
        backward(model, number, rank)
        if number == 0:
            late.grad = None
        optimizer.step()
        optimizer.zero_grad()
        after = full_weights(model)
        if number == 0:
            checks.equal("kept", after[name], before)
        for n in dedicated:
            if n != name or number == 1:
                references[n].step(expected[n])
                checks.true((number, n), relative(after[n], references[n].w) < 1e-5)


class Adapted(nn.Module):
    """Frozen linear maps, each with a pair of narrow ones beside it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(2):
            layer = nn.Module()
            layer.base = nn.Linear(16, 16, bias=False).requires_grad_(False)
            layer.down, layer.up = nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)
            layer.forward = lambda x, layer=layer: layer.base(x) + layer.up(layer.down(x))
            self.layers.append(layer)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def adapters(rank, layout, checks):
    """A frozen base is neither reduced nor published; thawed and added to the optimizer, it is."""

    def build():
        torch.manual_seed(0)
        return Adapted()

    model = build()
    dmuon.dedicate_params(model, make_mesh(layout), predicate=lambda n, p: True)
    pairs = [p for n, p in model.named_parameters() if "base" not in n]
    optimizer = dmuon.Muon(pairs, lr=LR, weight_decay=DECAY)
    references = {n: Reference(p, lr=LR, wd=DECAY) for n, p in build().named_parameters()}
    for number in range(4):
        frozen = number < 2
        if number == 2:
            for layer in model.layers:
                layer.base.weight.requires_grad_()
            thawed = [layer.base.weight for layer in model.layers]
            optimizer.add_param_group({"params": thawed, "lr": LR, "weight_decay": DECAY})
        before = full_weights(model)
        plain = build()
        plain.load_state_dict(before)
        for layer in plain.layers:
            layer.base.weight.requires_grad_(not frozen)
        expected = mean_gradients(plain, [number], width=16)
        model(data(number, rank, 16)).pow(2).mean().backward()
        counts = [u.published_parameters for u in dmuon.stats(model).units]
        close(checks, number, gradients(model), expected)
        optimizer.step()
        optimizer.zero_grad()
        after = full_weights(model)
        published = [u.published_parameters - c for u, c in zip(dmuon.stats(model).units, counts)]
        checks.true(("published", number, published), published == [2 if frozen else 3] * 2)
        for n, weight in after.items():
            if frozen and "base" in n:
                checks.equal(n, weight, before[n])
            else:
                references[n].step(expected[n])
                checks.true((number, n), relative(weight, references[n].w) < 1e-5)


def all_bytes(model):
    """Sent and received by all ranks together, by role."""
    total = {}
    for role, counters in dmuon.stats(model).bytes.items():
        both = torch.tensor([counters["bytes_sent"], counters["bytes_received"]])
        dist.all_reduce(both)
        total[role] = both
    return total


def traffic(rank, layout, checks):
    """The bytes of a step are those of the formulas."""
    shape = LAYOUTS[layout][0]
    replicas, shards = shape if len(shape) == 2 else (1, shape[0])
    for reshard in (True, False):
        # Whole cache lines: matrices start at such in the buffer that is broadcast.
        model = Net(((8, 16), (4, 16), (12, 16)), width=16)
        distribute(model, layout, reshard_after_forward=reshard)
        model.layers[1].up_proj.weight.requires_grad_(False)
        optimizer = dmuon.Muon(model, lr=LR)
        owned = [p for p in model.parameters() if isinstance(p, dmuon.OwnedTensor)]
        size = 4 * sum(p.numel() for p in owned)
        changed = 4 * sum(p.numel() for p in owned if p.requires_grad)
        backward(model, 0, rank)
        optimizer.step()
        before = all_bytes(model)  # the first forward has published every matrix
        optimizer.zero_grad()
        backward(model, 1, rank)
        optimizer.step()
        after = all_bytes(model)
        expected = {
            "unshard/shard": (2 if reshard else 1) * replicas * (shards - 1) * size,
            "reduce/shard": replicas * (shards - 1) * changed,
            "reduce/replicate": (replicas - 1) * changed,
            "publish/replicate": (replicas - 1) * changed,
        }
        for role, value in expected.items():
            got = (after[role] - before[role]).tolist() if role in after else [0, 0]
            checks.true((reshard, role, got, value), got == [value, value])


def interleaved(rank, layout, checks):
    """A user's own collectives between and during those of 100 steps."""
    model, optimizer = set_up(layout)
    for step in range(100):
        early = torch.full((3,), float(rank + step))
        work = dist.all_reduce(early, async_op=True)
        loss = model(data(step, rank)).pow(2).mean()
        late = torch.full((2,), float(rank * step))
        other = dist.all_reduce(late, async_op=True)
        loss.backward()
        work.wait()
        optimizer.step()
        dist.broadcast(late if step % 2 else early, src=step % 4)
        other.wait()
        optimizer.zero_grad()
        checks.equal(step, early, torch.full((3,), 6.0 + 4 * step))
        checks.equal(step, late, torch.full((2,), 6.0 * step))


@dataclasses.dataclass
class Result:
    first: torch.Tensor
    rest: dict


class Several(Net):
    def forward(self, x):
        x = self.embed_in(x)
        outputs = []
        for layer in self.layers:
            x = layer(x)
            outputs.append(x)
        return Result(self.head(x), {"hidden": tuple(outputs)})


def second_output(rank, layout, checks):
    """A loss through one output among several, in a dataclass."""

    def loss(model, x):
        return model(x).rest["hidden"][1].pow(2).mean()

    def build():
        torch.manual_seed(0)
        return Several()

    model, _ = distribute(build(), layout)
    loss(model, data(0, rank)).backward()
    close(checks, "hidden", gradients(model), mean_gradients(build(), [0], loss))


SCENES = (
    accumulation, dropped, clip_between, without_gradient, adapters, traffic, second_output,
)  # fmt: skip


def play(rank, layout, scenes):
    bad = []
    for scene in scenes:
        checks = Checks((layout, rank, scene.__name__))
        scene(rank, layout, checks)
        bad += checks.bad
    return bad


@pytest.mark.parametrize("layout", ["(4)", "(2,2)", "(4,1)"])
def test_every_scene_equals_plain_training(transport, layout):
    assert run_ranks(4, play, layout, SCENES) == [[]] * 4


@pytest.mark.parametrize("layout", ["(4)", "(2,2)", "(4,1)"])
def test_a_user_s_collectives_come_between(transport, layout):
    assert run_ranks(4, play, layout, [interleaved]) == [[]] * 4
