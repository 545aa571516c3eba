"""Which matrices a parameter holds: fused weights, stacks, convolutions, transposed storage."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from block_reference import Reference
from models import distribute, full_weights
from ranks import run_ranks
from reference import relative

import dmuon
from dmuon import _C

OPTIONS = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
SAME = {"lr": 0.05, "mu": 0.9, "wd": 0.1}


def follow(w, reference, optimizer, steps=5, layout=lambda g: g):
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        g = torch.randn(w.shape, generator=generator)
        w.grad = layout(g)
        optimizer.step()
        reference.step(g)
    return relative(w, reference.w)


def start(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw", "spectral_unclamped", "none"])
@pytest.mark.parametrize(
    ("shape", "dim", "sizes"),
    [
        ((12, 8), 0, [8, 2, 2]),  # Q, K, V with grouped heads
        ((12, 8), -2, [3, 9]),
        ((6, 20), 1, [4, 16]),
        ((6, 20), -1, [7, 13]),
        ((3, 12, 5), 1, [6, 6]),  # gate and up of an expert stack
        ((3, 5, 12), -1, [4, 8]),
        ((8, 6, 3, 2), 0, [5, 3]),  # convolutions
        ((8, 6, 3, 2), 1, [2, 4]),
        ((4, 3, 4, 2), 2, [1, 3]),
    ],
)
def test_every_block_is_a_matrix_of_its_own(shape, dim, sizes, adjust):
    w = nn.Parameter(start(*shape))
    blocks = dmuon.Blocks(dim, sizes)
    optimizer = dmuon.Muon([w], blocks=blocks, adjust_lr_fn=adjust, **OPTIONS)
    reference = Reference(w, blocks=(dim % len(shape), sizes), adjust=adjust, **SAME)
    assert follow(w, reference, optimizer) < 1e-5


def test_without_blocks_a_fused_weight_goes_another_way():
    w = nn.Parameter(start(12, 8))
    reference = Reference(w, blocks=(0, [8, 2, 2]), **SAME)
    before = w.detach().clone()
    follow(w, reference, dmuon.Muon([w], **OPTIONS), steps=1)
    assert relative(w - before, reference.w - before) > 0.1


def test_a_single_size_makes_equal_blocks_as_for_heads():
    w = nn.Parameter(start(24, 10))
    optimizer = dmuon.Muon([w], blocks=dmuon.Blocks(0, 4), **OPTIONS)
    assert follow(w, Reference(w, blocks=(0, [4] * 6), **SAME), optimizer) < 1e-5


@pytest.mark.parametrize("shape", [(3, 4, 6), (3, 6, 4), (1, 5, 5)])
def test_a_stack_of_experts_is_separate_matrices(shape):
    w = nn.Parameter(start(*shape))
    assert follow(w, Reference(w, **SAME), dmuon.Muon([w], **OPTIONS)) < 1e-5


@pytest.mark.parametrize("shape", [(16, 1, 3, 3), (8, 5, 3, 2), (4, 3, 2, 2, 2), (6, 4, 3)])
def test_convolutions_follow_the_reference(shape):
    w = nn.Parameter(start(*shape))
    assert follow(w, Reference(w, **SAME), dmuon.Muon([w], **OPTIONS)) < 1e-5


@pytest.mark.parametrize("blocks", [None, (0, [3, 5]), (1, [2, 4])])
def test_channels_last_equals_contiguous(blocks):
    plain = nn.Parameter(start(8, 6, 3, 3))
    last = nn.Parameter(plain.detach().clone().to(memory_format=torch.channels_last))
    given = blocks and dmuon.Blocks(*blocks)
    reference = Reference(plain, blocks=blocks, **SAME)
    a, b = (dmuon.Muon([p], blocks=given, **OPTIONS) for p in (plain, last))
    follow(plain, Reference(plain, **SAME), a)
    error = follow(last, reference, b, layout=lambda g: g.to(memory_format=torch.channels_last))
    assert error < 1e-5
    assert torch.equal(plain, last)
    assert last.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("blocks", [None, (0, [3, 4]), (1, [2, 3])])
def test_transposed_weights_and_gradients_equal_plain_ones(blocks):
    given = blocks and dmuon.Blocks(*blocks)
    plain = nn.Parameter(start(7, 5))
    turned = nn.Parameter(plain.detach().t().contiguous().t())
    assert not turned.is_contiguous()
    a, b = (dmuon.Muon([p], blocks=given, **OPTIONS) for p in (plain, turned))
    assert follow(plain, Reference(plain, blocks=blocks, **SAME), a) < 1e-5
    follow(turned, Reference(turned, **SAME), b, layout=lambda g: g.t().contiguous().t())
    assert relative(turned, plain) < 1e-6


# --- who has which blocks ------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv_proj = nn.Linear(8, 12, bias=False)
        self.out_proj = nn.Linear(12, 8, bias=False)

    def forward(self, x):
        return x + self.out_proj(torch.tanh(self.qkv_proj(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


QKV = dmuon.Blocks(0, [8, 2, 2])


@pytest.mark.parametrize(
    "spec",
    [
        {"*.qkv_proj.weight": QKV},
        {"layers.?.qkv_proj.weight": {"dim": 0, "sizes": [8, 2, 2]}, "*": None},
        {"*.qkv_proj.weight": (0, (8, 2, 2))},
        lambda name, p: QKV if "qkv" in name else None,
    ],
    ids=["blocks", "dict", "tuple", "callable"],
)
def test_blocks_are_given_by_name(spec):
    model = Net()
    optimizer = dmuon.Muon(model, blocks=spec, **OPTIONS)
    references = {
        n: Reference(p, blocks=(0, [8, 2, 2]) if "qkv" in n else None, **SAME)
        for n, p in model.named_parameters()
    }
    for step in range(3):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        for name, p in model.named_parameters():
            references[name].step(p.grad)
        optimizer.step()
        optimizer.zero_grad()
    for name, p in model.named_parameters():
        assert relative(p, references[name].w) < 1e-5, name


def test_blocks_are_an_option_of_a_group_and_of_a_later_step():
    a, b = nn.Parameter(start(12, 8)), nn.Parameter(start(12, 8, seed=2))
    groups = [{"params": [a], "blocks": QKV}, {"params": [b]}]
    optimizer = dmuon.Muon(groups, **OPTIONS)
    assert [g["blocks"] for g in optimizer.param_groups] == [[(0, [8, 2, 2])], None]
    assert follow(a, Reference(a, blocks=(0, [8, 2, 2]), **SAME), optimizer) < 1e-5
    a.grad = None
    assert follow(b, Reference(b, **SAME), optimizer) < 1e-5
    optimizer.param_groups[1]["blocks"] = dmuon.Blocks(1, 4)
    c = Reference(b, blocks=(1, [4, 4]), **SAME)
    c.buf = optimizer.state[b]["momentum_buffer"].double().clone()
    assert follow(b, c, optimizer) < 1e-5


def test_blocks_stay_with_a_state_dict_that_torch_loads_safely(tmp_path):
    w = nn.Parameter(start(12, 8))
    optimizer = dmuon.Muon([w], blocks=QKV, **OPTIONS)
    follow(w, Reference(w, **SAME), optimizer, steps=2)
    torch.save(optimizer.state_dict(), tmp_path / "state")
    copy = nn.Parameter(w.detach().clone())
    other = dmuon.Muon([copy])
    other.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    follow(w, Reference(w, **SAME), optimizer, steps=2)
    follow(copy, Reference(w, **SAME), other, steps=2)
    assert torch.equal(w, copy)


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        (dmuon.Blocks(0, [8, 2, 3]), ["[8, 2, 3]", "13", "[12, 8]", "'qkv'"]),
        (dmuon.Blocks(2, [12]), ["dimension 2", "[12, 8]", "'qkv'"]),
        (dmuon.Blocks(0, 5), ["5", "(12, 8)", "'qkv'"]),
        ({"*.kv": QKV}, ["'*.kv'", "'qkv'"]),
        ({"qkv": 3}, ["3", "'qkv'"]),
        ([QKV, None], ["2 entries", "1 parameter"]),
    ],
)
def test_blocks_that_do_not_fit_name_the_parameter(blocks, words):
    with pytest.raises(ValueError) as error:
        dmuon.Muon([("qkv", nn.Parameter(start(12, 8)))], blocks=blocks)
    for word in words:
        assert word in str(error.value), str(error.value)


def test_blocks_across_a_stack_and_senseless_ones_are_refused():
    with pytest.raises(ValueError, match=r"\[4, 6, 6\].*separate"):
        dmuon.Muon([nn.Parameter(start(4, 6, 6))], blocks=dmuon.Blocks(0, [2, 2]))
    for sizes in ([], [4, 0], [-1], [2.5], "ab"):
        with pytest.raises(ValueError, match="positive integers"):
            dmuon.Blocks(0, sizes)


# --- on ranks ------------------------------------------------------------------------------------


def batch(step, rank):
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def train(rank, layout):
    spec = {"*.qkv_proj.weight": QKV}
    early = layout == "(2,2)"  # one layout tells dedicate_params, the others Muon
    model, plan = distribute(
        Net(), layout, predicate=lambda n, p: True, blocks=spec if early else None
    )
    inner = getattr(model, "module", model)
    optimizer = dmuon.Muon(inner, blocks=None if early else spec, **OPTIONS)
    assert ("blocks 0:8+2+2" in plan.canonical_text) == early
    for step in range(4):
        model(batch(step, rank)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_weights(model), dmuon.stats(inner).orthogonalizations


def test_the_owner_of_a_fused_weight_does_each_block():
    alone = Net()
    references = {
        n: Reference(p, blocks=(0, [8, 2, 2]) if "qkv" in n else None, **SAME)
        for n, p in alone.named_parameters()
    }
    for step in range(4):
        with torch.no_grad():
            for name, p in alone.named_parameters():
                p.copy_(references[name].w)
        alone.zero_grad()
        for rank in range(4):
            (alone(batch(step, rank)).square().sum() / 4).backward()
        for name, p in alone.named_parameters():
            references[name].step(p.grad)
    for layout in ("(4)", "(2,2)", "ddp"):
        results = run_ranks(4, train, layout)
        assert sum(count for _, count in results) == 4 * 2 * (3 + 1), layout
        for weights, _ in results:
            for name, reference in references.items():
                assert relative(weights[name], reference.w) < 1e-5, (layout, name)


class Experts(nn.Module):
    """An expert stack and a convolution, the latter in channels_last."""

    def __init__(self):
        super().__init__()
        self.stack = nn.Parameter(start(3, 4, 6))
        self.conv = nn.Conv2d(2, 5, 3, bias=False).to(memory_format=torch.channels_last)
        with torch.no_grad():
            self.conv.weight.copy_(start(5, 2, 3, 3))

    def forward(self, x):  # (3, batch, 6)
        y = self.conv(x[:, :, :2, None].permute(1, 2, 0, 3).expand(-1, -1, -1, 4))
        return torch.tanh(x @ self.stack.mT).sum() + torch.tanh(y).sum()


class ExpertNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Experts()])

    def forward(self, x):
        return self.layers[0](x)


def expert_batch(step, rank):
    return torch.randn(3, 7, 6, generator=torch.Generator().manual_seed(10 * step + rank))


EXPERT_OPTIONS = {"variant": "normuon", "blocks": {"*.stack": dmuon.Blocks(1, 2)}}


def train_experts(rank, layout):
    model, _ = distribute(ExpertNet(), layout, predicate=lambda n, p: True)
    optimizer = dmuon.Muon(getattr(model, "module", model), **EXPERT_OPTIONS, **OPTIONS)
    for step in range(3):
        model(expert_batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_weights(model)


def test_expert_stacks_and_convolutions_have_owners_too():
    alone = ExpertNet()
    optimizer = dmuon.Muon(alone.named_parameters(), **EXPERT_OPTIONS, **OPTIONS)
    references = {
        n: Reference(p, blocks=(1, [2, 2]) if "stack" in n else None, variant="normuon", **SAME)
        for n, p in alone.named_parameters()
    }
    for step in range(3):
        for rank in range(4):
            (alone(expert_batch(step, rank)) / 4).backward()
        for name, p in alone.named_parameters():
            references[name].step(p.grad)
        optimizer.step()
        optimizer.zero_grad()
    for name, p in alone.named_parameters():
        assert relative(p, references[name].w) < 1e-5, name
    for layout in ("(2,2)", "ddp"):
        for weights in run_ranks(4, train_experts, layout):
            for name, reference in references.items():
                assert relative(weights[name], reference.w) < 1e-5, (layout, name)


def refuse(rank):
    try:
        distribute(Net(), "(4)", predicate=lambda n, p: True, blocks={"*.qkv*": dmuon.Blocks(0, 5)})
    except ValueError as error:
        return str(error)


def test_dedicate_params_refuses_blocks_that_do_not_fit():
    for message in run_ranks(4, refuse):
        assert "layers.0.qkv_proj.weight" in message and "5" in message


def test_the_plan_counts_what_the_blocks_cost():
    def costs(blocks):
        matrices = [
            ("qkv", "u", [1536, 512], 4 * 1536 * 512),
            ("o", "u", [512, 512], 4 * 512 * 512),
        ]
        plan = _C.OwnershipPlan(matrices, 1, 2, "flops", blocks)
        return {e.name: e.cost for e in plan.entries}, plan.canonical_text, plan.hash

    joint, text, number = costs({})
    cut, cut_text, cut_number = costs({"qkv": (0, [512, 512, 512])})
    assert cut["qkv"] == 3 * cut["o"] and joint["o"] == cut["o"] and joint["qkv"] != cut["qkv"]
    assert "blocks" not in text and "blocks 0:512+512+512" in cut_text and number != cut_number
    for bad in ((0, [512, 512]), (2, [512])):
        with pytest.raises(ValueError, match=r"qkv.*\[1536, 512\]"):
            costs({"qkv": bad})
