"""dmuon.Muon as an optimizer on one process: closed forms, groups, schedulers, refusals."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
import torch.nn as nn
from models import Net
from reference import KELLER, Muon, composed, relative

import dmuon


def one_step(gradient, **options):
    w = nn.Parameter(torch.zeros_like(gradient))
    w.grad = gradient.clone()
    dmuon.Muon([w], lr=0.1, ns_coefficients="keller", **options).step()
    return w.detach()


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("k", [1e-20, 1.0, 3.0, 1e20])
def test_a_multiple_of_the_identity_gives_the_closed_form(n, k):
    c = {2: 1.108111, 4: 0.765439, 8: 1.066968}[n]
    w = one_step(k * torch.eye(n))
    assert torch.allclose(w, -0.1 * c * torch.eye(n), atol=1e-6)


def test_a_rank_one_gradient_gives_the_closed_form():
    assert torch.allclose(one_step(torch.ones(1, 16)), torch.full((1, 16), -0.0174109), atol=1e-6)
    assert torch.allclose(one_step(torch.ones(16, 1)), torch.full((16, 1), -0.0696436), atol=1e-6)
    u, v = torch.randn(5, generator=torch.Generator().manual_seed(0)), torch.arange(1.0, 8.0)
    expected = -0.1 * 0.696436 * torch.outer(u / u.norm(), v / v.norm())
    assert torch.allclose(one_step(torch.outer(u, v)), expected, atol=1e-6)
    assert math.isclose(composed(KELLER, 1.0), 0.696436, abs_tol=1e-6)


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw", "spectral_unclamped", "none"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_fifty_steps_follow_the_fp64_reference(adjust, nesterov):
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(12, 5, generator=generator)
    w = nn.Parameter(start.clone())
    options = {"momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.1, "adjust_lr_fn": adjust}
    optimizer = dmuon.Muon([w], lr=0.05, **options)
    reference = Muon(start, lr=0.05, mu=0.9, nesterov=nesterov, wd=0.1, adjust=adjust)
    for _ in range(50):
        g = torch.randn(12, 5, generator=generator)
        w.grad = g.clone()
        optimizer.step()
        reference.step(g)
    assert relative(w, reference.w) < 1e-5
    assert relative(optimizer.state[w]["momentum_buffer"], reference.buf) < 1e-6


def test_without_process_group_a_model_trains_as_the_reference_says():
    torch.manual_seed(0)
    model = Net()
    optimizer = dmuon.Muon(model, lr=0.02)
    assert not torch.distributed.is_initialized()
    muon = {n: Muon(p.detach(), lr=0.02) for n, p in model.named_parameters() if "proj.weight" in n}
    adamw_params = [p for n, p in model.named_parameters() if n not in muon]
    copies = [nn.Parameter(p.detach().double().clone()) for p in adamw_params]
    adamw = torch.optim.AdamW(copies, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for step in range(5):
        g = torch.Generator().manual_seed(step)
        model(torch.randn(8, 4, generator=g)).pow(2).mean().backward()
        for name, p in model.named_parameters():
            if name in muon:
                muon[name].step(p.grad)
        for copy, p in zip(copies, adamw_params):
            copy.grad = p.grad.double()
        optimizer.step()
        optimizer.zero_grad()
        adamw.step()
    for name, p in model.named_parameters():
        if name in muon:
            assert relative(p, muon[name].w) < 1e-5, name
    for copy, p in zip(copies, adamw_params):
        assert relative(p, copy) < 1e-5


def test_it_is_a_real_optimizer_with_the_base_class_signatures():
    w = nn.Parameter(torch.randn(3, 2))
    optimizer = dmuon.Muon([w])
    assert isinstance(optimizer, torch.optim.Optimizer)
    for method in ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group"):
        mine = inspect.signature(getattr(dmuon.Muon, method)).parameters
        base = inspect.signature(getattr(torch.optim.Optimizer, method)).parameters
        assert list(mine) == list(base), method
    assert optimizer.step(lambda: 3.5) == 3.5


def test_two_learning_rates_and_a_scheduler():
    model = Net()
    lr = torch.tensor(0.1)
    optimizer = dmuon.Muon(model, lr=0.1, adamw_lr=0.01)
    assert [(g["name"], g["lr"]) for g in optimizer.param_groups] == [
        ("muon", 0.1),
        ("adamw", 0.01),
    ]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    scheduler.step()
    assert [g["lr"] for g in optimizer.param_groups] == [0.05, 0.005]

    w = nn.Parameter(torch.zeros(4, 4))
    with_tensor = dmuon.Muon([w], lr=lr, ns_coefficients="keller")
    w.grad = torch.eye(4)
    with_tensor.step()
    assert torch.allclose(w, -0.0765439 * torch.eye(4), atol=1e-6)
    before = w.detach().clone()
    with_tensor.param_groups[0]["lr"] = 0.2  # seen by the next step
    w.grad = torch.eye(4)
    with_tensor.step()
    assert torch.allclose(w - before, -0.2 * 0.765439 * torch.eye(4), atol=1e-6)


def test_a_parameter_without_gradient_keeps_its_bits():
    a, b = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))
    before = b.detach().clone()
    optimizer = dmuon.Muon([a, b], lr=0.1, weight_decay=0.5)
    a.grad = torch.randn(3, 4)
    optimizer.step()
    assert torch.equal(b, before)
    assert optimizer.state[b]["momentum_buffer"].abs().sum() == 0


def test_half_precision_weights_have_an_fp32_master():
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(16, 8, generator=generator).bfloat16()
    w = nn.Parameter(start.clone())
    optimizer = dmuon.Muon([w], lr=1e-4)  # far below what bf16 could add up
    reference = Muon(start, lr=1e-4)
    for _ in range(30):
        g = torch.randn(16, 8, generator=generator).bfloat16()
        w.grad = g.clone()
        optimizer.step()
        reference.step(g)
    assert relative(optimizer.state[w]["master"], reference.w) < 1e-5
    assert torch.equal(w.detach(), optimizer.state[w]["master"].bfloat16())
    with torch.no_grad():
        w.copy_(torch.ones(16, 8))  # as a loaded checkpoint would
    w.grad = torch.zeros(16, 8, dtype=torch.bfloat16)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert torch.equal(w.detach(), torch.ones(16, 8, dtype=torch.bfloat16))


def test_state_dict_round_trip_continues_bit_for_bit():
    def fresh():
        torch.manual_seed(5)
        model = Net()
        return model, dmuon.Muon(model, lr=0.02)

    def train(model, optimizer, steps):
        for step in steps:
            g = torch.Generator().manual_seed(step)
            model(torch.randn(8, 4, generator=g)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    straight, optimizer = fresh()
    train(straight, optimizer, range(10))
    first, first_optimizer = fresh()
    train(first, first_optimizer, range(5))
    second, second_optimizer = fresh()
    second.load_state_dict(first.state_dict())
    second_optimizer.load_state_dict(first_optimizer.state_dict())
    train(second, second_optimizer, range(5, 10))
    for a, b in zip(straight.parameters(), second.parameters()):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: dmuon.Muon([nn.Parameter(torch.zeros(3))]), ["(3,)", "not a matrix"]),
        (lambda: dmuon.Muon([nn.Parameter(torch.zeros(()))]), ["()", "not a matrix"]),
        (
            lambda: dmuon.Muon([nn.Parameter(torch.zeros(2, 2, dtype=torch.cfloat))]),
            ["complex64", "floating"],
        ),
        (lambda: dmuon.Muon([("w", nn.Parameter(torch.zeros(3)))]), ["'w'"]),
        (lambda: dmuon.Muon(nn.Linear(3, 4)), ["Linear", "param_groups"]),
        (lambda: dmuon.Muon([]), ["no parameters"]),
        (lambda: dmuon.Muon([nn.Parameter(torch.eye(2))], lr=-1.0), ["lr", "-1"]),
        (lambda: dmuon.Muon([nn.Parameter(torch.eye(2))], momentum=1.5), ["momentum", "1.5"]),
        (lambda: dmuon.Muon([nn.Parameter(torch.eye(2))], ns_steps=0), ["0"]),
        (lambda: dmuon.Muon([nn.Parameter(torch.eye(2))], ns_steps=9), ["you", "9"]),
        (
            lambda: dmuon.Muon([nn.Parameter(torch.eye(2))], ns_coefficients="them"),
            ["them", "keller"],
        ),
        (lambda: dmuon.Muon([nn.Parameter(torch.eye(2))], adjust_lr_fn="max"), ["max", "original"]),
        (lambda: dmuon.Muon([nn.Parameter(torch.eye(2))], ns_mode="slow"), ["slow", "fast"]),
        (
            lambda: dmuon.Muon([nn.Parameter(torch.eye(2))], ns_coefficients=[(3.0, 4.0, 5.0)] * 5),
            ["step"],
        ),
        (lambda: dmuon.Muon(Net(), adamw_betas=(0.9, 1.5)), ["beta", "1.5"]),
        (
            lambda: dmuon.Muon(
                [nn.Parameter(torch.eye(2))],
                param_groups=[{"params": [nn.Parameter(torch.eye(3))], "algorithm": "sgd"}],
            ),
            ["sgd"],
        ),
    ],
)
def test_bad_input_is_refused_with_its_value(make, words):
    with pytest.raises((ValueError, RuntimeError)) as error:
        make()
    for word in words:
        assert word in str(error.value), str(error.value)


def test_param_groups_take_parameters_out_of_the_default_groups():
    model = Net()
    special = model.layers[0].up_proj.weight
    optimizer = dmuon.Muon(
        model, lr=0.02, param_groups=[{"params": [special], "lr": 0.5, "name": "special"}]
    )
    by_name = {g["name"]: g for g in optimizer.param_groups}
    assert by_name["special"]["lr"] == 0.5 and by_name["special"]["algorithm"] == "muon"
    assert all(p is not special for p in by_name["muon"]["params"])
    listed = [id(p) for g in optimizer.param_groups for p in g["params"]]
    assert sorted(listed) == sorted(id(p) for p in model.parameters())
