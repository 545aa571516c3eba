"""Variants of Muon against fp64: nesterov, cautious decay, NorMuon, AdaMuon, a bf16 momentum."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from block_reference import Reference
from models import Net, distribute, full_weights
from ranks import run_ranks
from reference import relative

import dmuon
from dmuon import _C


def start(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def follow(w, reference, optimizer, steps=20, seed=3):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        g = torch.randn(w.shape, generator=generator)
        w.grad = g
        optimizer.step()
        reference.step(g)
    return relative(w, reference.w)


SHAPES = [(12, 5), (5, 12), (8, 8), (1, 9), (9, 1), (3, 4, 6), (6, 3, 2, 2)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("variant", ["none", "normuon", "adamuon"])
def test_twenty_steps_follow_the_fp64_reference(variant, nesterov, shape):
    w = nn.Parameter(start(*shape))
    optimizer = dmuon.Muon(
        [w], lr=0.02, momentum=0.9, nesterov=nesterov, weight_decay=0.1,
        variant=variant, beta2=0.9, adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    reference = Reference(
        w, lr=0.02, mu=0.9, nesterov=nesterov, wd=0.1,
        variant=variant, beta2=0.9, adjust="match_rms_adamw",
    )  # fmt: skip
    assert follow(w, reference, optimizer) < 1e-5


@pytest.mark.parametrize(
    ("shape", "blocks"),
    [
        ((12, 8), (0, [8, 2, 2])),
        ((6, 20), (1, [4, 16])),
        ((3, 12, 5), (1, [6, 6])),
        ((3, 5, 12), (2, [4, 8])),
        ((8, 6, 3, 2), (1, [2, 4])),
        ((4, 3, 4, 2), (2, [1, 3])),
    ],
)
@pytest.mark.parametrize("variant", ["normuon", "adamuon"])
def test_every_block_has_a_second_moment_of_its_own(variant, shape, blocks):
    w = nn.Parameter(start(*shape))
    optimizer = dmuon.Muon([w], lr=0.02, variant=variant, blocks=dmuon.Blocks(*blocks))
    assert follow(w, Reference(w, lr=0.02, variant=variant, blocks=blocks), optimizer, 10) < 1e-5


def test_the_second_moment_is_one_value_per_row_or_per_element():
    w, stack = nn.Parameter(start(6, 20)), nn.Parameter(start(3, 4, 5))
    for variant, shapes in {
        "normuon": [(6, 1), (3, 4, 1)],
        "adamuon": [(6, 20), (3, 4, 5)],
    }.items():
        optimizer = dmuon.Muon([w, stack], variant=variant)
        for p, shape in zip((w, stack), shapes):
            assert tuple(optimizer.state[p]["second_momentum_buffer"].shape) == shape
    cut = dmuon.Muon([w], variant="normuon", blocks=dmuon.Blocks(1, 5))
    assert tuple(cut.state[w]["second_momentum_buffer"].shape) == (6, 4)
    assert set(dmuon.Muon([w]).state[w]) == {"momentum_buffer"}


def test_normuon_evens_out_the_rows_and_keeps_the_norm():
    w = nn.Parameter(torch.zeros(6, 30))
    plain = nn.Parameter(torch.zeros(6, 30))
    g = start(6, 30) * torch.tensor([1.0, 1, 1, 1, 1, 100]).unsqueeze(1)
    for p, variant in ((w, "normuon"), (plain, "none")):
        p.grad = g
        dmuon.Muon([p], lr=1.0, variant=variant).step()
    rows = w.detach().norm(dim=1)
    assert torch.allclose(rows, rows.mean().expand(6), rtol=1e-5)
    assert abs(w.detach().norm() / plain.detach().norm() - 1) < 1e-5


def test_adamuon_has_the_rms_of_adamw():
    w = nn.Parameter(torch.zeros(10, 40))
    optimizer = dmuon.Muon([w], lr=1.0, variant="adamuon", adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        before = w.detach().clone()
        w.grad = start(10, 40, seed=step)
        optimizer.step()
        rms = (w.detach() - before).square().mean().sqrt().item()
        assert abs(rms - 0.2) < 1e-5


@pytest.mark.parametrize("variant", ["normuon", "adamuon"])
def test_zero_gradients_decay_and_leave_no_nan(variant):
    w = nn.Parameter(torch.ones(4, 4))
    optimizer = dmuon.Muon([w], lr=0.1, weight_decay=0.5, variant=variant)
    w.grad = torch.zeros(4, 4)
    optimizer.step()
    assert torch.equal(w.detach(), torch.full((4, 4), 0.95))
    reference = Reference(w, lr=0.1, wd=0.5, variant=variant)
    assert follow(w, reference, optimizer, 3) < 1e-5
    assert w.isfinite().all()


# --- cautious decay ------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["none", "normuon", "adamuon"])
@pytest.mark.parametrize("shape", [(7, 12), (3, 5, 4), (4, 3, 2, 2)])
def test_cautious_decay_follows_the_fp64_reference(variant, shape):
    w = nn.Parameter(start(*shape))
    options = {"lr": 0.05, "variant": variant, "cautious": True}
    optimizer = dmuon.Muon([w], weight_decay=0.3, **options)
    assert follow(w, Reference(w, wd=0.3, **options), optimizer) < 1e-5


def test_cautious_decay_shrinks_only_what_the_step_shrinks_too():
    w = nn.Parameter(torch.tensor([[2.0, 0.0], [0.0, -2.0]]))
    w.grad = torch.eye(2)  # X: positive diagonal; off it zero, which counts as agreement
    with torch.no_grad():
        w[0, 1] = 4.0
    dmuon.Muon([w], lr=0.1, weight_decay=1.0, cautious=True, ns_coefficients="keller").step()
    x = 0.1 * 1.108111
    assert torch.allclose(w.detach(), torch.tensor([[1.8 - x, 3.6], [0.0, -2 - x]]), atol=1e-6)


def test_without_decay_cautious_changes_no_bit():
    a, b = nn.Parameter(start(5, 7)), nn.Parameter(start(5, 7))
    for p, cautious in ((a, True), (b, False)):
        follow(p, Reference(p), dmuon.Muon([p], cautious=cautious), 3)
    assert torch.equal(a, b)


# --- bf16 momentum -------------------------------------------------------------------------------


def philox(counter, key):
    """Philox4x32-10, from its paper, one counter at a time in Python's integers."""
    c, k, word = list(counter), list(key), 2**32
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [p1 // word ^ c[1] ^ k[0], p1 % word, p0 // word ^ c[3] ^ k[1], p0 % word]
        k = [(k[0] + 0x9E3779B9) % word, (k[1] + 0xBB67AE85) % word]
    return c


def test_the_generator_gives_its_papers_known_answers():
    # From the authors' Random123, kat_vectors.
    assert philox([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    assert philox([ones] * 4, [ones] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def rounded(x, seed, parameter, step):
    """fp32 to bf16 by the bits of one stream, element by element."""
    out = []
    for i, bits in enumerate(x.flatten().view(torch.int32).tolist()):
        words = philox([i // 8, parameter, step % 2**32, step >> 32], [seed % 2**32, seed >> 32])
        random = words[i % 8 // 2] >> (16 * (i % 2)) & 0xFFFF
        out.append(((bits % 2**32) + random) % 2**32 >> 16)
    high = torch.tensor(out, dtype=torch.int64) << 16
    return (high - (high >= 2**31) * 2**32).to(torch.int32).view(torch.float32).view(x.shape)


@pytest.mark.parametrize("shape", [(1,), (7,), (8,), (5, 7), (3, 3, 3)])
def test_rounding_is_the_function_of_seed_parameter_and_step_that_is_documented(shape):
    x = start(*shape)
    for seed, parameter, step in [(0, 0, 0), (7, 3, 11), (2**63 + 5, 9, 2**33 + 1)]:
        got = _C.round_stochastically(x, seed, parameter, step)
        assert got.dtype == torch.bfloat16
        assert torch.equal(got.float(), rounded(x, seed, parameter, step))


def test_rounding_goes_to_the_neighbours_and_is_right_on_average():
    x = torch.full((1000, 100), 1 + 0.3 * 2**-7)
    total = torch.zeros(())
    for step in range(10):
        y = _C.round_stochastically(x, 1, 2, step).float()
        assert set(y.unique().tolist()) == {1.0, 1 + 2**-7}
        total += (y > 1).float().mean() / 10
    assert abs(total - 0.3) < 0.003  # 6 standard deviations
    exact = torch.tensor([0.0, -0.0, 1.5, -3.0, float("inf"), float("-inf"), float("nan")])
    kept = _C.round_stochastically(exact, 1, 2, 3).float()
    assert torch.equal(kept[:6], exact[:6]) and kept[6].isnan()
    strided = start(6, 8).t()
    plain = _C.round_stochastically(strided.contiguous(), 1, 2, 3)
    assert torch.equal(_C.round_stochastically(strided, 1, 2, 3), plain)


def test_a_bf16_momentum_follows_the_reference_that_rounds_with_the_same_bits():
    w, other = nn.Parameter(start(6, 9)), nn.Parameter(start(4, 4))
    optimizer = dmuon.Muon([other, w], lr=0.05, momentum_dtype=torch.bfloat16, seed=12)
    reference = Reference(w, lr=0.05)
    buffer = torch.zeros(6, 9)
    generator = torch.Generator().manual_seed(3)
    for step in range(1, 6):
        w.grad = torch.randn(6, 9, generator=generator)
        other.grad = torch.ones(4, 4)
        reference.buf = buffer.double()
        reference.step(w.grad)
        optimizer.step()
        fp32 = buffer.lerp(w.grad, 1 - 0.95)
        buffer = rounded(fp32, seed=12, parameter=1, step=step)
        kept = optimizer.state[w]["momentum_buffer"]
        assert kept.dtype == torch.bfloat16 and torch.equal(kept.float(), buffer)
        assert relative(w, reference.w) < 1e-5
        assert optimizer.state[w]["step"] == step


def test_a_bf16_momentum_follows_increments_far_below_its_last_bit():
    # Rounding to nearest would leave the average where it starts: 0.05 * 0.02 < 2^-9.
    w = nn.Parameter(torch.zeros(64, 64))
    optimizer = dmuon.Muon([w], momentum_dtype=torch.bfloat16)
    optimizer.state[w]["momentum_buffer"].fill_(1.0)
    for _ in range(60):
        w.grad = torch.full((64, 64), 1.02)
        optimizer.step()
    mean = optimizer.state[w]["momentum_buffer"].float().mean().item()
    assert abs(mean - (1.02 - 0.02 * 0.95**60)) < 2e-4


def train(model, optimizer, steps, rank=0):
    for step in steps:
        g = torch.Generator().manual_seed(100 * step + rank)
        model(torch.randn(8, 4, generator=g)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


OPTIONS = [
    {"momentum_dtype": torch.bfloat16, "seed": 3},
    {"variant": "normuon"},
    {"variant": "adamuon", "momentum_dtype": torch.bfloat16},
]


def fresh(**options):
    torch.manual_seed(5)
    model = Net()
    return model, dmuon.Muon(model, lr=0.02, **options)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("again", [True, False], ids=["same options", "options from the state"])
def test_a_resumed_run_continues_bit_for_bit(options, again, tmp_path):
    straight, optimizer = fresh(**options)
    train(straight, optimizer, range(8))
    first, first_optimizer = fresh(**options)
    train(first, first_optimizer, range(4))
    torch.save((first.state_dict(), first_optimizer.state_dict()), tmp_path / "saved")
    weights, state = torch.load(tmp_path / "saved", weights_only=True)
    second, second_optimizer = fresh(**(options if again else {}))
    second.load_state_dict(weights)
    second_optimizer.load_state_dict(state)
    train(second, second_optimizer, range(4, 8))
    for a, b in zip(straight.parameters(), second.parameters()):
        assert torch.equal(a, b)
        for key, value in optimizer.state[a].items():
            kept = second_optimizer.state[b][key]
            assert kept.dtype == value.dtype and torch.equal(kept, value), key
    assert set(second_optimizer.state) == set(second.parameters())


def test_a_run_can_be_repeated_and_another_seed_is_another_run():
    runs = []
    for seed in (3, 3, 4):
        model, optimizer = fresh(momentum_dtype=torch.bfloat16, seed=seed)
        train(model, optimizer, range(3))
        runs.append([s["momentum_buffer"] for s in optimizer.state.values() if len(s) == 2])
    assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[1]))
    assert not all(torch.equal(a, b) for a, b in zip(runs[0], runs[2]))


def test_half_parameters_take_every_variant():
    w = nn.Parameter(start(8, 6).bfloat16())
    options = {"lr": 0.01, "variant": "adamuon", "cautious": True}
    optimizer = dmuon.Muon([w], weight_decay=0.1, **options)
    reference = Reference(w, wd=0.1, **options)
    for step in range(5):
        w.grad = start(8, 6, seed=step).bfloat16()
        reference.step(w.grad)
        optimizer.step()
    assert relative(optimizer.state[w]["master"], reference.w) < 1e-5
    assert optimizer.state[w]["second_momentum_buffer"].dtype == torch.float32


@pytest.mark.parametrize("variant", ["normuon", "adamuon"])
def test_an_iteration_in_bf16_is_scaled_in_fp32(variant):
    w = nn.Parameter(start(16, 24))
    options = {"lr": 0.02, "variant": variant}
    optimizer = dmuon.Muon([w], ns_dtype=torch.bfloat16, ns_mode="accurate", **options)
    assert follow(w, Reference(w, **options), optimizer, 3) < 1e-2
    assert optimizer.state[w]["second_momentum_buffer"].dtype == torch.float32


# --- on owners -----------------------------------------------------------------------------------


def batch(step, rank):
    g = torch.Generator().manual_seed(77 * step + rank)
    return torch.randint(-2, 3, (4, 4), generator=g).float()


class Matrices(nn.Module):
    """Matrices only; with integer data every mean of first gradients is exact."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, rows, bias=False) for rows in (8, 3, 12, 4))

    def forward(self, x):
        return sum((layer(x) * (i + 1)).sum() for i, layer in enumerate(self.layers))


VARIANTS = [
    {"variant": "normuon", "beta2": 0.9},
    {"variant": "adamuon", "cautious": True},
    {"momentum_dtype": torch.bfloat16, "seed": 9, "variant": "normuon"},
]


def train_owned(rank, layout, options, halves):
    model, _ = distribute(Matrices(), layout, predicate=lambda n, p: True)
    inner = getattr(model, "module", model)
    optimizer = dmuon.Muon(inner, lr=0.05, weight_decay=0.1, **options)
    for step in range(4):
        model(batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if halves and step == 1:  # the state goes through a full state dict, and comes back
            from torch.distributed.checkpoint.state_dict import (
                StateDictOptions,
                get_optimizer_state_dict,
                set_optimizer_state_dict,
            )

            whole = StateDictOptions(full_state_dict=True)
            saved = get_optimizer_state_dict(inner, optimizer, options=whole)
            optimizer = dmuon.Muon(inner, lr=0.05, weight_decay=0.1, **options)
            every = [saved]
            torch.distributed.broadcast_object_list(every)
            set_optimizer_state_dict(inner, optimizer, every[0], options=whole)
    return full_weights(model), {
        n: {k: tuple(v.shape) for k, v in optimizer.state[p].items()}
        for n, p in inner.named_parameters()
    }


def train_alone(options):
    model = Matrices()
    optimizer = dmuon.Muon(model.parameters(), lr=0.05, weight_decay=0.1, **options)
    references = {
        n: Reference(
            p, lr=0.05, wd=0.1,
            **{k: v for k, v in options.items() if k not in ("momentum_dtype", "seed")},
        )
        for n, p in model.named_parameters()
    }  # fmt: skip
    for step in range(4):
        for rank in range(4):
            (model(batch(step, rank)) / 4).backward()
        for n, p in model.named_parameters():
            references[n].step(p.grad)
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach().clone() for n, p in model.named_parameters()}, references


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize(("layout", "halves"), [("(2,2)", False), ("(4)", True), ("ddp", False)])
def test_owners_do_what_one_process_does_bit_for_bit(options, layout, halves):
    alone, references = train_alone(options)
    for weights, shapes in run_ranks(4, train_owned, layout, options, halves):
        for name, expected in alone.items():
            assert torch.equal(weights[name], expected), name
            if "momentum_dtype" not in options:
                assert relative(weights[name], references[name].w) < 1e-5, name
            rows = expected.shape[0]
            moment = (rows, 1) if options["variant"] == "normuon" else tuple(expected.shape)
            assert shapes[name]["second_momentum_buffer"] == moment


def save_sharded(rank, layout, folder, options):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, _ = distribute(Matrices(), layout, predicate=lambda n, p: True)
    optimizer = dmuon.Muon(model, lr=0.05, **options)
    for step in range(2):
        model(batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    dcp.save(
        dict(zip(("model", "optimizer"), get_state_dict(model, optimizer))), checkpoint_id=folder
    )
    for step in range(2, 4):
        model(batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_weights(model)


def load_sharded(rank, layout, folder, options):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, _ = distribute(Matrices(), layout, predicate=lambda n, p: True)
    optimizer = dmuon.Muon(model, lr=0.05, **options)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    for step in range(2, 4):
        model(batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_weights(model)


@pytest.mark.parametrize("options", [VARIANTS[1], VARIANTS[2]])
def test_a_sharded_checkpoint_goes_on_with_other_owners_bit_for_bit(options, tmp_path):
    expected = run_ranks(4, save_sharded, "(2,2)", str(tmp_path), options)[0]
    for weights in run_ranks(4, load_sharded, "(4)", str(tmp_path), options):
        for name in expected:
            assert torch.equal(weights[name], expected[name]), name
