"""Options of Muon per group and per step, hooks and closures, and what its groups cannot take."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from block_reference import Reference
from models import Net
from reference import KELLER, YOU, relative

import dmuon


def start(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradients(shape, steps, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(steps)]


GROUPS = [
    ({"lr": 0.1}, {"lr": 0.1}),
    ({"weight_decay": 0.4}, {"wd": 0.4}),
    ({"momentum": 0.5}, {"mu": 0.5}),
    ({"nesterov": False}, {"nesterov": False}),
    ({"ns_steps": 3}, {"steps": YOU[:3]}),
    ({"ns_coefficients": "keller"}, {"steps": KELLER}),
    ({"ns_coefficients": (3.4445, -4.7750, 2.0315), "ns_mode": "exact"}, {"steps": KELLER}),
    ({"ns_coefficients": KELLER[0], "ns_steps": 9}, {"steps": KELLER[:1] * 9}),  # as in torch
    ({"ns_coefficients": KELLER[:1] * 8, "ns_steps": 8}, {"steps": KELLER[:1] * 8}),
    (
        {"ns_coefficients": KELLER[0], "ns_steps": 12, "ns_mode": "accurate"},
        {"steps": KELLER[:1] * 12},
    ),
    ({"ns_mode": "accurate"}, {}),
    ({"ns_mode": [1, 2]}, {}),
    ({"adjust_lr_fn": "match_rms_adamw"}, {"adjust": "match_rms_adamw"}),
    ({"adjust_lr_fn": None}, {}),
    ({"variant": "normuon"}, {"variant": "normuon"}),
    ({"variant": "adamuon", "beta2": 0.8}, {"variant": "adamuon", "beta2": 0.8}),
    ({"cautious": True, "weight_decay": 0.4}, {"cautious": True, "wd": 0.4}),
    ({"blocks": dmuon.Blocks(0, [3, 6])}, {"blocks": (0, [3, 6])}),
]


def test_every_option_may_differ_by_group():
    params = [nn.Parameter(start(9, 5, seed=i)) for i in range(len(GROUPS))]
    groups = [{"params": [p], **options} for p, (options, _) in zip(params, GROUPS)]
    optimizer = dmuon.Muon(groups, lr=0.05, weight_decay=0.1)
    references = [
        Reference(p, **{"lr": 0.05, "wd": 0.1, **same}) for p, (_, same) in zip(params, GROUPS)
    ]
    for step in range(6):
        for i, (p, reference) in enumerate(zip(params, references)):
            p.grad = gradients((9, 5), 1, seed=100 * step + i)[0]
            reference.step(p.grad)
        optimizer.step()
    for p, reference, (options, _) in zip(params, references, GROUPS):
        assert relative(p, reference.w) < 1e-5, options


def test_a_tensor_lr_changed_in_place_takes_effect():
    w, lr = nn.Parameter(torch.zeros(4, 4)), torch.tensor(0.1)
    optimizer = dmuon.Muon([w], lr=lr, ns_coefficients="keller")
    for value in (0.1, 0.025, 0.4):
        lr.fill_(value)
        before = w.detach().clone()
        w.grad = torch.eye(4)
        optimizer.step()
        assert torch.allclose(before - w, value * 0.765439 * torch.eye(4), atol=1e-6)
    assert optimizer.param_groups[0]["lr"] is lr


def test_a_change_of_any_option_between_steps_is_seen():
    w = nn.Parameter(start(9, 5))
    optimizer = dmuon.Muon([w], lr=0.05)
    reference = Reference(w, lr=0.05)
    changes = [
        ("nesterov", "nesterov", False),
        ("momentum", "mu", 0.7),
        ("weight_decay", "wd", 0.3),
        ("cautious", "cautious", True),
        ("adjust_lr_fn", "adjust", "spectral_unclamped"),
        ("lr", "lr", 0.2),
    ]
    for g, (mine, theirs, value) in zip(gradients((9, 5), len(changes)), changes):
        optimizer.param_groups[0][mine] = value
        setattr(reference, theirs, value)
        w.grad = g
        optimizer.step()
        reference.step(g)
        assert relative(w, reference.w) < 1e-5, mine
    optimizer.param_groups[0]["beta2"] = 1.0
    with pytest.raises(ValueError, match="beta2 must lie in"):
        optimizer.step()


def test_state_follows_options_that_are_changed_between_steps():
    w = nn.Parameter(start(9, 5))
    optimizer = dmuon.Muon([w], lr=0.05)
    reference = Reference(w, lr=0.05)
    group, state = optimizer.param_groups[0], optimizer.state[w]
    changes = [
        {"variant": "normuon"},
        {"variant": "adamuon"},
        {"variant": "none", "momentum_dtype": torch.bfloat16},
        {"momentum_dtype": None, "blocks": dmuon.Blocks(1, [2, 3])},
        {"variant": "normuon"},
    ]
    for g, change in zip(gradients((9, 5), len(changes)), changes):
        group.update(change)
        cuts = group["blocks"] is not None
        reference = Reference(w, lr=0.05, blocks=(1, [2, 3]) if cuts else None)
        reference.variant = group["variant"]
        kept = state["momentum_buffer"].to(group["momentum_dtype"] or torch.float32)
        reference.buf = kept.double()
        w.grad = g
        optimizer.step()
        reference.step(g)
        assert relative(w, reference.w) < 1e-5, change
        rounded = group["momentum_dtype"] is not None
        assert state["momentum_buffer"].dtype == (torch.bfloat16 if rounded else torch.float32)
        assert ("step" in state, "second_momentum_buffer" in state) == (
            rounded,
            group["variant"] != "none",
        )


def test_one_step_is_one_call_into_cpp_per_group(monkeypatch):
    calls = []
    real = dmuon._C.muon_update
    monkeypatch.setattr(
        dmuon._C, "muon_update", lambda w, *a, **k: calls.append(len(w)) or real(w, *a, **k)
    )
    params = [nn.Parameter(start(3, 4, seed=i)) for i in range(6)]
    optimizer = dmuon.Muon([{"params": params[:4]}, {"params": params[4:], "lr": 0.1}])
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert calls == [4, 2]


def test_a_closure_and_torchs_step_hooks_run_around_the_step():
    model, seen = Net(), []
    optimizer = dmuon.Muon(model)
    weight = model.layers[0].up_proj.weight
    before = weight.detach().clone()
    optimizer.register_step_pre_hook(lambda o, a, k: seen.append(torch.equal(weight, before)))
    optimizer.register_step_post_hook(lambda o, a, k: seen.append(torch.equal(weight, before)))

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss.requires_grad and loss.item() > 0
    assert seen == [True, False]


def test_an_update_hook_runs_after_the_update_and_can_be_removed():
    w = nn.Parameter(torch.zeros(4, 4))
    optimizer = dmuon.Muon([w], lr=0.1, ns_coefficients="keller")
    handle = optimizer.register_update_hook(lambda o: o.edit_weight(w, lambda whole: whole.mul_(2)))
    w.grad = torch.eye(4)
    optimizer.step()
    assert torch.allclose(w, -2 * 0.0765439 * torch.eye(4), atol=1e-6)
    handle.remove()
    w.grad = None
    optimizer.step()
    assert torch.allclose(w, -2 * 0.0765439 * torch.eye(4), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_edited_half_weight_keeps_its_master(dtype):
    w = nn.Parameter(start(4, 4).to(dtype))
    optimizer = dmuon.Muon([w])
    optimizer.edit_weight(w, lambda whole: whole.fill_(1 + 2**-14))
    assert torch.equal(optimizer.state[w]["master"], torch.full((4, 4), 1 + 2**-14))
    assert torch.equal(w.detach(), torch.ones(4, 4, dtype=dtype))
    w.grad = torch.zeros_like(w)
    optimizer.step()
    assert torch.equal(optimizer.state[w]["master"], torch.full((4, 4), 1 + 2**-14))


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(()), ["()", "not a matrix", '"algorithm": "adamw"']),
        (torch.zeros(7), ["(7,)", "not a matrix", '"algorithm": "adamw"']),
        (torch.zeros(3, 2, dtype=torch.cfloat), ["(3, 2)", "complex64", "two real ones"]),
        (torch.zeros(3, 2, dtype=torch.long), ["(3, 2)", "int64", "requires_grad=False"]),
        (torch.zeros(3, 2).to_sparse(), ["(3, 2)", "sparse", "to_dense"]),
    ],
)
@pytest.mark.parametrize("form", ["named", "group", "unnamed"])
def test_what_is_no_dense_real_matrix_is_refused_by_name(tensor, words, form):
    p = nn.Parameter(tensor, requires_grad=tensor.is_floating_point() or tensor.is_complex())
    good = nn.Parameter(torch.eye(2))
    params = {
        "named": [("good", good), ("block.w", p)],
        "group": [{"params": [("good", good), ("block.w", p)], "algorithm": "muon"}],
        "unnamed": [good, p],
    }[form]
    with pytest.raises(ValueError) as error:
        dmuon.Muon(params)
    for word in [*words, "'1 of group 0'" if form == "unnamed" else "'block.w'"]:
        assert word in str(error.value), str(error.value)


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_a_sparse_gradient_is_refused_by_name_and_nothing_has_changed(algorithm):
    embedding = nn.Embedding(5, 3, sparse=True)
    first = nn.Parameter(start(4, 4))
    before = [p.detach().clone() for p in (first, embedding.weight)]
    groups = [
        {"params": [first]},
        {"params": [("table", embedding.weight)], "algorithm": algorithm},
    ]
    optimizer = dmuon.Muon(groups, weight_decay=0.5)
    first.grad = torch.eye(4)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match=r"'table' \(5, 3\).*sparse.*sparse=False"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip((first, embedding.weight), before))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"variant": "sgd"}, ["sgd", "normuon", "adamuon"]),
        ({"ns_steps": 5.5}, ["ns_steps", "5.5"]),
        ({"lr": "0.1"}, ["lr", "'0.1'"]),
        ({"cautious": "yes"}, ["cautious", "'yes'"]),
        ({"nesterov": 1}, ["nesterov", "1"]),
        ({"beta2": 1.0}, ["beta2", "1"]),
        ({"beta2": -0.1}, ["beta2", "-0.1"]),
        ({"momentum_dtype": torch.float16}, ["momentum_dtype", "float16"]),
        ({"momentum_dtype": "bf16"}, ["momentum_dtype", "'bf16'"]),
        ({"ns_dtype": torch.int8}, ["ns_dtype", "int8"]),
        ({"seed": -1}, ["seed", "-1"]),
        ({"seed": 0.5}, ["seed", "0.5"]),
        ({"lr": float("nan")}, ["lr", "nan"]),
    ],
)
def test_options_out_of_range_are_refused_at_construction(options, words):
    for make in (
        lambda: dmuon.Muon([nn.Parameter(torch.eye(2))], **options),
        lambda: dmuon.Muon([{"params": [nn.Parameter(torch.eye(2))], **options}]),
    ):
        with pytest.raises(ValueError) as error:
            make()
        for word in words:
            assert word in str(error.value), str(error.value)
