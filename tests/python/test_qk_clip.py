"""QK-Clip: logits above tau come down to it, on whole matrices at their owners too."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from models import distribute, full_weights
from ranks import run_ranks
from reference import relative

import dmuon

TAU = 5.0


class Attention(nn.Module):
    """``fused``: Q and K in one weight, Q first. ``kv_heads`` K heads, shared where there are
    fewer."""

    def __init__(self, heads=4, kv_heads=4, dim=3, width=8, fused=False, scale=3.0):
        super().__init__()
        self.heads, self.kv_heads, self.dim, self.fused = heads, kv_heads, dim, fused
        rows = (heads + kv_heads) * dim
        g = torch.Generator().manual_seed(4)
        weight = torch.randn(rows, width, generator=g) * scale
        weight[:dim] /= 100  # head 0 stays far below tau
        if fused:
            self.qk_proj = nn.Linear(width, rows, bias=False)
        else:
            self.q_proj = nn.Linear(width, heads * dim, bias=False)
            self.k_proj = nn.Linear(width, kv_heads * dim, bias=False)
        with torch.no_grad():
            for p, part in zip(
                self.parameters(),
                [weight] if fused else weight.split([heads * dim, kv_heads * dim]),
            ):
                p.copy_(part)
        self.clip = None
        self.name = ""

    def logits(self, x):  # (heads, tokens, tokens)
        if self.fused:
            q, k = self.qk_proj(x).split([self.heads * self.dim, self.kv_heads * self.dim], dim=1)
        else:
            q, k = self.q_proj(x), self.k_proj(x)
        q = q.view(-1, self.heads, self.dim).transpose(0, 1)
        k = k.view(-1, self.kv_heads, self.dim).transpose(0, 1)
        k = k.repeat_interleave(self.heads // self.kv_heads, dim=0)
        return q @ k.mT

    def forward(self, x):
        logits = self.logits(x)
        if self.clip is not None:
            self.clip.record(self.name, logits.amax(dim=(1, 2)))
        return logits.softmax(-1).square().sum()

    def watch(self, clip, name):
        self.clip, self.name = clip, name
        weights = list(self.parameters())
        offsets = {"k_offset": self.heads * self.dim} if self.fused else {}
        clip.add(
            name, weights[0], weights[-1],
            heads=self.heads, kv_heads=self.kv_heads, head_dim=self.dim, **offsets,
        )  # fmt: skip


def batch(rank=0, step=0):
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + rank))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("fused", [False, True])
def test_logits_above_tau_shrink_by_tau_over_their_largest(fused, kv_heads):
    attention, unclipped = (Attention(kv_heads=kv_heads, fused=fused) for _ in range(2))
    optimizer, other = (dmuon.Muon(a.parameters(), lr=1e-3) for a in (attention, unclipped))
    clip = dmuon.QKClip(TAU)
    attention.watch(clip, "a")
    optimizer.register_update_hook(clip)
    x = batch()
    largest = attention.logits(x).amax(dim=(1, 2)).double()
    assert largest[0] < TAU < largest[1:].min()
    for model, o in ((attention, optimizer), (unclipped, other)):
        model(x).backward()
        o.step()
    gamma = torch.clamp(TAU / largest, max=1.0)
    for h in range(4):
        expected = unclipped.logits(x)[h].double() * gamma[h]
        assert relative(attention.logits(x)[h], expected) < 1e-5, h
    assert torch.equal(attention.logits(x)[0], unclipped.logits(x)[0])
    assert torch.allclose(torch.tensor(clip.factors["a"], dtype=torch.float64), gamma)
    if kv_heads != 4 and not fused:  # a shared K is left alone
        assert torch.equal(attention.k_proj.weight, unclipped.k_proj.weight)


def test_without_records_or_large_logits_nothing_changes():
    attention, unclipped = Attention(), Attention()
    optimizer, other = (dmuon.Muon(a.parameters(), lr=1e-3) for a in (attention, unclipped))
    clip = dmuon.QKClip(1e4)
    attention.watch(clip, "a")
    optimizer.register_update_hook(clip)
    for step in range(2):
        for model, o in ((attention, optimizer), (unclipped, other)):
            model(batch(step=step)).backward()
            o.step()
    clip.tau = TAU
    optimizer.step()  # nothing was recorded since the last step
    other.step()
    assert clip.factors == {}
    for name in ("q_proj", "k_proj"):
        a, b = getattr(attention, name).weight, getattr(unclipped, name).weight
        assert torch.equal(a, b)
    clip.record("a", torch.tensor([float("nan"), float("inf"), 1.0, -1.0]))
    clip(optimizer)
    assert clip.factors == {}


def test_the_largest_of_several_forwards_counts():
    attention = Attention()
    optimizer = dmuon.Muon(attention.parameters())
    clip = dmuon.QKClip(TAU)
    attention.watch(clip, "a")
    clip.record("a", torch.tensor([1.0, 10.0, 3.0, 20.0]))
    clip.record("a", torch.tensor([2.0, 8.0, 50.0, 3.0]))
    clip(optimizer)
    assert clip.factors["a"] == [1.0, 0.5, 0.1, 0.25]


def test_parts_of_latent_attention_take_their_powers():
    # Per head: 2 rows without rotation, then 1 rotary row in Q; K's part without rotation is
    # followed by 3 rows of V.
    q, kv = nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(10, 4))
    optimizer = dmuon.Muon([q, kv])
    clip = dmuon.QKClip(TAU)
    clip.add_rows("mla", q, heads=2, rows=2, stride=3, power=0.5)
    clip.add_rows("mla", q, heads=2, rows=1, stride=3, offset=2, power=1.0)
    clip.add_rows("mla", kv, heads=2, rows=2, stride=5, power=0.5)
    clip.record("mla", torch.tensor([1.0, TAU / 0.25]))
    clip(optimizer)
    assert q.detach()[:, 0].tolist() == [1, 1, 1, 0.5, 0.5, 0.25]
    assert kv.detach()[:, 0].tolist() == [1, 1, 1, 1, 1, 0.5, 0.5, 1, 1, 1]


def test_half_weights_are_clipped_in_their_master():
    q, k = (nn.Parameter(torch.ones(2, 3).bfloat16()) for _ in range(2))
    optimizer = dmuon.Muon([q, k])
    clip = dmuon.QKClip(1.0)
    clip.add("a", q, k, heads=2, head_dim=1)
    clip.record("a", torch.tensor([3.0, 1.0]))
    clip(optimizer)
    root = (1 / 3) ** 0.5
    assert torch.equal(optimizer.state[q]["master"], torch.tensor([[root] * 3, [1.0] * 3]))
    assert torch.equal(q.detach(), optimizer.state[q]["master"].bfloat16())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [6, 2])
def test_max_logits_are_those_of_the_attention(causal, kv_heads):
    g = torch.Generator().manual_seed(1)
    q = torch.randn(2, 6, 11, 4, generator=g)
    k = torch.randn(2, kv_heads, 11, 4, generator=g)
    logits = torch.einsum(
        "bhid,bhjd->bhij", q.double(), k.double().repeat_interleave(6 // kv_heads, 1)
    )
    if causal:
        seen = torch.tensor([[j <= i for j in range(11)] for i in range(11)])
        logits = torch.where(seen, logits, -torch.inf)
    for chunk in (4, 11, 100):
        got = dmuon.max_logits(q, k, is_causal=causal, chunk=chunk)
        assert got.shape == (6,) and relative(got, logits.amax(dim=(0, 2, 3)) / 2) < 1e-6
        scaled = dmuon.max_logits(q.bfloat16(), k.bfloat16(), 3.0, is_causal=causal, chunk=chunk)
        assert relative(scaled, logits.amax(dim=(0, 2, 3)) * 3) < 2e-2
    with pytest.raises(ValueError, match=r"\(2, 6, 11, 4\).*\(2, 4, 11, 4\)"):
        dmuon.max_logits(q, torch.zeros(2, 4, 11, 4))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c, q: dmuon.QKClip(0.0), ["tau", "0.0"]),
        (lambda c, q: c.add("b", q, q, heads=4, head_dim=4), ["4 heads of 4 rows", "(12, 8)"]),
        (lambda c, q: c.add("b", q, q, heads=4, head_dim=3, kv_heads=3), ["3 and 4"]),
        (lambda c, q: c.add("a", q, q, heads=4, head_dim=3), ["'a'", "already"]),
        (lambda c, q: c.add_rows("a", q, heads=3, rows=2), ["4 heads", "3 were given"]),
        (lambda c, q: c.record("x", torch.zeros(4)), ["'x'", "'a': (4,)"]),
        (lambda c, q: c.record("a", torch.zeros(3)), ["(3,)", "'a': (4,)"]),
        (
            lambda c, q: (c.record("a", torch.full((4,), 1e9)), c(dmuon.Muon([torch.eye(2)]))),
            ["(12, 8)", "not in this optimizer"],
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, words):
    q = nn.Parameter(torch.ones(12, 8))
    clip = dmuon.QKClip(TAU)
    clip.add("a", q, q, heads=4, head_dim=3)
    with pytest.raises(ValueError) as error:
        call(clip, q)
    for word in words:
        assert word in str(error.value), str(error.value)


# --- on owners -----------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.layers = nn.ModuleList([Attention(**options), Attention(fused=True, **options)])

    def forward(self, x):
        return sum(layer(x) for layer in self.layers)


def train(rank, layout):
    model, _ = distribute(Model(), layout, predicate=lambda n, p: True)
    inner = getattr(model, "module", model)
    optimizer = dmuon.Muon(inner, lr=1e-3)
    clip = dmuon.QKClip(TAU)
    for i, layer in enumerate(inner.layers):
        layer.watch(clip, f"{i}")
    optimizer.register_update_hook(clip)
    losses, factors = [], []
    for step in range(3):
        loss = model(batch(rank, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        factors.append(clip.factors)
    return losses, factors, full_weights(model)


def train_alone():
    model = Model()
    optimizer = dmuon.Muon(model.parameters(), lr=1e-3)
    losses, factors = [], []
    for step in range(3):
        per_rank = [model(batch(rank, step)) for rank in range(4)]
        (sum(per_rank) / 4).backward()
        losses.append([loss.item() for loss in per_rank])
        with torch.no_grad():
            gammas = []
            for layer in model.layers:
                seen = [layer.logits(batch(r, step)).amax(dim=(1, 2)).double() for r in range(4)]
                gammas.append(torch.clamp(TAU / torch.stack(seen).amax(0), max=1.0))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for layer, gamma in zip(model.layers, gammas):
                rows = gamma.sqrt().repeat_interleave(layer.dim).unsqueeze(1).float()
                if layer.fused:
                    layer.qk_proj.weight.mul_(torch.cat([rows, rows]))
                else:
                    layer.q_proj.weight.mul_(rows)
                    layer.k_proj.weight.mul_(rows)
        factors.append(gammas)
    return losses, factors, {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize("layout", ["(2,2)", "(4)", "ddp"])
def test_owners_clip_by_the_largest_logit_of_any_rank(layout):
    losses, factors, weights = train_alone()
    assert max(f.min() for f in factors[0]) < 1
    for rank, (got, clipped, final) in enumerate(run_ranks(4, train, layout)):
        for step in range(3):
            assert abs(got[step] - losses[step][rank]) < 1e-5 * abs(losses[step][rank])
            for i, gamma in enumerate(factors[step]):
                mine = torch.tensor(clipped[step].get(f"{i}", [1.0] * 4), dtype=torch.float64)
                assert relative(mine, gamma) < 1e-5
        for name, expected in weights.items():
            assert relative(final[name], expected) < 1e-5, name


def edit_between_steps(rank, layout):
    model, _ = distribute(Model(), layout, predicate=lambda n, p: True)
    inner = getattr(model, "module", model)
    optimizer = dmuon.Muon(inner, lr=1e-3)
    before = full_weights(model)
    model(batch(rank)).backward()
    optimizer.zero_grad()
    weight = inner.layers[0].q_proj.weight
    optimizer.edit_weight(weight, lambda whole: whole.mul_(2))
    after = full_weights(model)
    with torch.no_grad():
        return before, after, model(batch()).item()


@pytest.mark.parametrize("layout", ["(2,2)", "ddp"])
def test_a_weight_edited_between_steps_is_published_at_the_next_forward(layout):
    alone = Model()
    with torch.no_grad():
        alone.layers[0].q_proj.weight.mul_(2)
    for before, after, loss in run_ranks(4, edit_between_steps, layout):
        for name in before:
            factor = 2 if name == "layers.0.q_proj.weight" else 1
            assert torch.equal(after[name], before[name] * factor)
        assert abs(loss - alone(batch()).item()) < 1e-5
