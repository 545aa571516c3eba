"""A dedicated parameter's ``grad``: on its way, dropped, hooked, accumulated, and not finite."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn as nn
from checks import Checks
from models import Net, distribute, full, full_weights
from ranks import run_ranks
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import dmuon


def data(step, rank):
    g = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, 4, generator=g)


def build(layout, **options):
    torch.manual_seed(0)
    model, _ = distribute(Net(), layout, **options)
    return model, getattr(model, "module", model)


def backward(model, step, rank):
    model(data(step, rank)).pow(2).mean().backward()


def reference(*steps):
    """Gradients of one process: the mean over ranks, the sum over steps."""
    torch.manual_seed(0)
    model = Net()
    for step in steps:
        for rank in range(4):
            (model(data(step, rank)).pow(2).mean() / 4).backward()
    return {n: p.grad for n, p in model.named_parameters()}


def dedicated(inner):
    return {n: p for n, p in inner.named_parameters() if isinstance(p, dmuon.OwnedTensor)}


def close(gradients, expected, atol=1e-6):
    return all((full(g) - expected[n]).abs().max().item() <= atol for n, g in gradients.items())


# --- dropping ------------------------------------------------------------------------------------

DROPS = {
    "optimizer.zero_grad()": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer, not to None": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model.zero_grad()": lambda model, optimizer: model.zero_grad(),
    "by hand": lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()],
}


def drop(rank, layout, pending):
    bad = Checks((rank, layout, pending))
    for name, how in DROPS.items():
        model, inner = build(layout)
        optimizer = dmuon.Muon(inner, lr=0.02, weight_decay=0.5)
        before = full_weights(model)
        if pending == "in flight":
            backward(model, 0, rank)
        elif pending == "no_sync":
            with dmuon.no_sync(model):
                backward(model, 0, rank)
        else:
            model.set_requires_all_reduce(False)
            backward(model, 0, rank)
            model.set_requires_all_reduce(True)
        how(inner, optimizer)
        backward(model, 1, rank)
        got = {n: p.grad for n, p in dedicated(inner).items()}
        bad.true(f"{name}: next gradient", close(got, reference(1)))
        how(inner, optimizer)
        if name != "optimizer, not to None":
            bad.true(f"{name}: none left", all(p.grad is None for p in inner.parameters()))
            optimizer.step()
            for n, weight in full_weights(model).items():
                bad.equal(f"{name}: step, {n}", weight, before[n])
    return bad.bad


@pytest.mark.parametrize(
    ("layout", "pending"),
    [
        ("(4)", "in flight"),
        ("(2,2)", "in flight"),
        ("(4)", "no_sync"),
        ("(2,2)", "no_sync"),
        ("(2,2)", "all_reduce"),
    ],
)
def test_every_way_to_forget_gradients_forgets_those_that_are_pending(transport, layout, pending):
    assert run_ranks(4, drop, layout, pending) == [[]] * 4


def look(rank):
    model, inner = build("(2,2)")
    params = dedicated(inner)
    name, p = next(iter(params.items()))
    bad = Checks(rank)
    with dmuon.no_sync(model):
        backward(model, 0, rank)
    torch.manual_seed(0)
    plain = Net()
    plain(data(0, rank)).pow(2).mean().backward()
    own = dict(plain.named_parameters())[name].grad
    bad.true("this rank's own, as in DDP", (p.grad - own).abs().max() < 1e-6)
    bad.true("plain and whole", type(p.grad) is torch.Tensor and p.grad.shape == p.shape)
    optimizer = dmuon.Muon(inner, lr=0.02, weight_decay=0.5)
    before = full(p.detach())
    optimizer.step()
    bad.equal("a step does not take it for a gradient", full(p.detach()), before)
    backward(model, 1, rank)
    bad.true(
        "then the mean of both", close({n: q.grad for n, q in params.items()}, reference(0, 1))
    )
    backward(model, 2, rank)
    grad = p.grad
    bad.true("the sum", close({name: grad}, reference(0, 1, 2)))
    bad.true("one object", p.grad is grad and isinstance(grad, dmuon.OwnedTensor))
    p.grad = p.like(torch.ones_like(p._local_tensor))
    bad.equal("what a user sets", full(p.grad), torch.ones(p.shape))
    del p.grad
    bad.true("deleted", p.grad is None)
    return bad.bad


def test_grad_is_this_rank_s_own_until_it_is_reduced():
    assert run_ranks(4, look) == [[]] * 4


# --- hooks ---------------------------------------------------------------------------------------


def hooks(rank):
    model, inner = build("(2,2)")
    params = dedicated(inner)
    name, p = next(iter(params.items()))
    bad = Checks(rank)
    seen, after = [], []
    p.register_hook(lambda g: seen.append(full(g)))
    p.register_hook(lambda g: g * 2)
    handle = p.register_post_accumulate_grad_hook(lambda q: after.append(full(q.grad)))
    backward(model, 0, rank)
    first = reference(0)[name]
    bad.true("sees the mean", (seen[0] - first).abs().max() < 1e-6)
    bad.true("may change it", (after[0] - 2 * first).abs().max() < 1e-6)
    handle.remove()
    backward(model, 1, rank)
    second = reference(1)[name]
    bad.true("only what is new", (seen[1] - second).abs().max() < 1e-6 and len(after) == 1)
    bad.true("is added", (full(p.grad) - 2 * (first + second)).abs().max() < 1e-6)
    others = {n: q.grad for n, q in params.items() if n != name}
    bad.true("others", close(others, reference(0, 1)))
    return bad.bad


def test_hooks_on_a_resting_parameter_run_on_its_reduced_gradient():
    assert run_ranks(4, hooks) == [[]] * 4


# --- accumulation --------------------------------------------------------------------------------


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 8, bias=False)])

    def forward(self, x):
        return self.layers[0](x).sum()


def many_small(rank, layout, how):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, _ = distribute(Sum(), layout, mp_policy=policy)
    # One gradient of 256, then 64 of 1/2: bf16 cannot add 1/2 to 256.
    values = [256.0] + [0.5] * 64
    for micro, value in enumerate(values):
        how(model, micro == len(values) - 1)
        (model(torch.ones(1, 6)) * (value * (rank + 1))).backward()
    return full(model.layers[0].weight.grad)


@pytest.mark.parametrize(
    ("layout", "how"),
    [
        ("(4)", FSDPModule.set_requires_gradient_sync),
        ("(2,2)", FSDPModule.set_requires_gradient_sync),
        ("(2,2)", FSDPModule.set_requires_all_reduce),
    ],
)
def test_half_precision_gradients_are_accumulated_in_fp32(layout, how):
    for got in run_ranks(4, many_small, layout, how):
        assert torch.equal(got, torch.full_like(got, (256 + 32) * 2.5))


# --- NaN and infinity ----------------------------------------------------------------------------


def poison(rank, layout, what, where):
    model, inner = build(layout)
    optimizer = dmuon.Muon(inner, lr=0.02, weight_decay=0.5)
    bad = Checks((rank, layout, what))
    backward(model, 0, rank)
    optimizer.step()
    optimizer.zero_grad()
    before = full_weights(model)
    state = {
        (n, k): full(v).clone()
        for n, p in inner.named_parameters()
        for k, v in optimizer.state[p].items()
    }
    target = dict(inner.named_parameters())[where]
    x = data(1, rank)
    if rank == 2:
        target = inner.get_submodule(where.rpartition(".")[0])
        handle = target.register_forward_hook(lambda m, a, y: y * float(what))
    model(x).pow(2).mean().backward()
    if rank == 2:
        handle.remove()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    bad.true("counted", optimizer.skipped_steps == 1)
    for n, weight in full_weights(model).items():
        bad.equal(f"weight {n}", weight, before[n])
    for n, p in inner.named_parameters():
        for k, v in optimizer.state[p].items():
            bad.equal(f"state {n} {k}", full(v), state[n, k])
    optimizer.nonfinite = "raise"
    bad.refused("raise", "NaN or an infinity", optimizer.step)
    optimizer.zero_grad()
    backward(model, 2, rank)
    optimizer.step()
    bad.true("goes on", all(torch.isfinite(w).all() for w in full_weights(model).values()))
    changed = [n for n, w in full_weights(model).items() if not torch.equal(w, before[n])]
    bad.true("all move", len(changed) == len(before))
    return bad.bad, [str(w.message) for w in caught]


@pytest.mark.parametrize(
    ("layout", "what", "where"),
    [
        ("(4)", "nan", "layers.1.up_proj.weight"),
        ("(2,2)", "inf", "layers.0.down_proj.weight"),
        ("(4,1)", "nan", "head.weight"),
        ("ddp", "nan", "layers.2.up_proj.weight"),
    ],
)
def test_a_nan_on_one_rank_makes_all_skip_the_step(transport, layout, what, where):
    results = run_ranks(4, poison, layout, what, where)
    assert [bad for bad, _ in results] == [[]] * 4
    messages = [message for _, caught in results for message in caught]
    assert any("all ranks skip the step after step 1" in m and "layers" in m for m in messages)


def ignore(rank):
    model, inner = build("(4)")
    optimizer = dmuon.Muon(inner, lr=0.02, nonfinite="ignore")
    p = next(iter(dedicated(inner).values()))
    backward(model, 0, rank)
    p.grad._local_tensor.fill_(float("nan"))
    optimizer.step()
    try:
        dmuon.Muon(inner, nonfinite="stop")
    except ValueError as error:
        return bool(full(p.detach()).isnan().all()), str(error)


def test_a_nan_may_be_ignored():
    message = "dmuon: nonfinite must be one of ('skip', 'raise', 'ignore'), got 'stop'"
    assert run_ranks(4, ignore) == [(True, message)] * 4
