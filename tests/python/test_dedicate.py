"""Ownership, units, order of calls, and what is refused."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from models import Net, distribute, full_weights, make_mesh
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch_functions import torch_functions

import dmuon


def section_2(rank):
    before = torch_functions()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = Net()
    dmuon.dedicate_params(model, mesh, predicate=lambda n, p: "proj" in n and p.ndim == 2)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(model, lr=0.02, ns_steps=5, adamw_lr=1e-3)
    losses = []
    for step in range(10):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(rank))
        loss = (model(x) - 1.0).pow(2).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert torch_functions() == before
    kinds = {n: type(p).__name__ for n, p in model.named_parameters()}
    return losses, kinds


def test_the_design_s_example_runs_on_unpatched_torch():
    for losses, kinds in run_ranks(4, section_2):
        assert losses[-1] < losses[0]
        for name, kind in kinds.items():
            assert kind == ("OwnedTensor" if "proj.weight" in name else "DTensor"), name


def test_importing_replaces_nothing_in_torch():
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from torch_functions import torch_functions\n"
        "before = torch_functions()\n"
        "import dmuon\n"
        "assert torch_functions() == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- ownership (cases 19, 20) --------------------------------------------------------------------


class Shuffled(nn.Module):
    """Eight matrices, registered in an order of the caller's choosing."""

    def __init__(self, order):
        super().__init__()
        self.layers = nn.ModuleList()
        block = nn.Module()
        for i in order:
            block.add_module(f"proj{i}", nn.Linear(6 + i % 3, 8, bias=False))
        block.forward = lambda x: sum(
            m(x[..., : m.in_features]) for _, m in sorted(block._modules.items())
        )
        self.layers.append(block)

    def forward(self, x):
        return self.layers[0](x)


def owners_and_state(rank, order):
    model, plan = distribute(Shuffled(order), "(2,2)")
    optimizer = dmuon.Muon(model)
    model(torch.randn(3, 8)).sum().backward()
    optimizer.step()
    held = {
        name: optimizer.state[p]["momentum_buffer"]._local_tensor.numel()
        for name, p in model.named_parameters()
    }
    return {e.name: e.owner for e in plan.entries}, held, dmuon.stats(model).orthogonalizations


def test_one_rank_holds_the_state_and_owners_do_not_depend_on_registration_order():
    order = list(range(8))
    runs = []
    for seed in (0, 1):
        random.Random(seed).shuffle(order)
        runs.append(run_ranks(4, owners_and_state, list(order)))
    owners = runs[0][0][0]
    assert set(owners.values()) == {(0, 0), (0, 1), (1, 0), (1, 1)}
    for run in runs:
        for got, _, _ in run:
            assert got == owners
        for name in owners:
            sizes = [held[name] for _, held, _ in run]
            assert sorted(sizes)[:3] == [0, 0, 0] and max(sizes) > 0, name
            assert sizes.index(max(sizes)) == owners[name][0] * 2 + owners[name][1]
        assert sum(count for _, _, count in run) == 8


# --- units (case 25) -----------------------------------------------------------------------------


class Gpt2Like(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(16, 8)
        self.h = nn.ModuleList(nn.ModuleDict({"c_fc": nn.Linear(8, 8)}) for _ in range(2))
        self.lm_head = nn.Linear(8, 16, bias=False)


class BertLike(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.Module()
        self.encoder = nn.Module()
        for _ in range(2):
            layer = nn.Module()
            layer.attention = nn.Module()
            layer.attention.query = nn.Linear(8, 8)
            layer.output = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
            self.encoder.layer = getattr(self.encoder, "layer", nn.ModuleList())
            self.encoder.layer.append(layer)


def units(rank, make, options):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = dmuon.dedicate_params(make(), mesh, **options)
    return {e.name: e.unit for e in plan.entries}


def test_units_are_layers_by_default():
    (gpt2,) = run_ranks(1, units, Gpt2Like, {})
    assert gpt2 == {"h.0.c_fc.weight": "h.0", "h.1.c_fc.weight": "h.1"}
    (bert,) = run_ranks(1, units, BertLike, {})
    assert set(bert.values()) == {"encoder.layer.0", "encoder.layer.1"} and len(bert) == 6


def test_the_boundary_is_the_lowest_match_and_strictness_is_honoured():
    lowest = {"hook_boundary_predicate": lambda n, m: "attention" in n or n.endswith((".0", ".1"))}
    (bert,) = run_ranks(1, units, BertLike, lowest)
    assert bert["encoder.layer.0.attention.query.weight"] == "encoder.layer.0.attention.query"

    def never(name, module):
        return False

    parent = {"hook_boundary_predicate": never, "hook_boundary_strict": False}
    (bert,) = run_ranks(1, units, BertLike, parent)
    assert bert["encoder.layer.0.attention.query.weight"] == "encoder.layer.0.attention.query"
    with pytest.raises(AssertionError) as error:
        run_ranks(1, units, BertLike, {"hook_boundary_predicate": never})
    assert "ValueError" in str(error.value)
    assert "encoder.layer.0.attention.query.weight" in str(error.value)
    assert "never" in str(error.value)


# --- meshes (case 26) ----------------------------------------------------------------------------


def train_on(rank, shape, names):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    torch.manual_seed(0)
    model = Net()
    plan = dmuon.dedicate_params(model, mesh)
    if names is not None or len(shape) == 1:  # fully_shard wants names for 2-D
        fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(model)
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(rank))
    model(x).pow(2).mean().backward()
    optimizer.step()
    return plan.mesh_shape, {n: w for n, w in full_weights(model).items() if "proj.weight" in n}


@pytest.mark.parametrize(
    ("world", "shape", "names", "seen"),
    [
        (4, (1, 4), ("replicate", "shard"), (1, 4)),
        (4, (4, 1), ("dp_replicate", "dp_shard"), (4, 1)),
        (1, (1, 1), ("replicate", "shard"), (1, 1)),
        (4, (4,), ("fsdp",), (1, 4)),
        (4, (4,), None, (1, 4)),
        (1, (1,), None, (1, 1)),
        (3, (3,), None, (1, 3)),
    ],
)
def test_every_mesh_form_trains(world, shape, names, seen):
    results = run_ranks(world, train_on, shape, names)
    torch.manual_seed(0)
    start = dict(Net().named_parameters())
    for mesh_shape, weights in results:
        assert mesh_shape == seen
        for name, weight in weights.items():
            assert torch.equal(weight, results[0][1][name])
            assert (weight - start[name]).abs().max() > 1e-4


def bad_mesh(rank, case):
    model = Net()
    if case == "3-D":
        mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("a", "b", "c"))
        dmuon.dedicate_params(model, mesh)
    elif case == "not a mesh":
        dmuon.dedicate_params(model, (2, 2))
    elif case == "other than fully_shard's":
        dmuon.dedicate_params(model, make_mesh("(2,2)"))
        fully_shard(model, mesh=make_mesh("(4)"))
        dmuon.Muon(model)
    elif case == "ddp":
        dmuon.dedicate_params_ddp(model, make_mesh("(2,2)"))


@pytest.mark.parametrize(
    ("case", "error", "words"),
    [
        ("3-D", "ValueError", ["3 dimensions"]),
        ("not a mesh", "TypeError", ["tuple", "(2, 2)"]),
        ("other than fully_shard's", "ValueError", ["replicate=2, shard=2", "shard=4"]),
        ("ddp", "ValueError", ["replicate=2, shard=2"]),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_on_every_rank(case, error, words):
    with pytest.raises(AssertionError) as raised:
        run_ranks(4, bad_mesh, case)
    text = str(raised.value)
    assert text.count(f"{error}: dmuon") == 4, text
    for word in words:
        assert word in text, text


# --- order of calls, disagreement ----------------------------------------------------------------


def wrong_use(rank, case):
    mesh = make_mesh("(4)")
    torch.manual_seed(0)
    model = Net()
    if case == "fully_shard first":
        fully_shard(model, mesh=mesh)
        dmuon.dedicate_params(model, mesh)
    elif case == "twice":
        dmuon.dedicate_params(model, mesh)
        dmuon.dedicate_params(model, mesh, predicate=lambda n, p: "proj.weight" in n)
    elif case == "a bias":
        dmuon.dedicate_params(model, mesh, predicate=lambda n, p: "proj" in n)
    elif case == "no dedicate":
        fully_shard(model, mesh=mesh)
        dmuon.Muon(model)
    elif case == "ranks differ":
        dmuon.dedicate_params(Net(((8, 6), (5 + (rank == 2), 6))), mesh)
    elif case == "options differ":
        dmuon.dedicate_params(model, mesh, reshard_after_forward=rank != 3)
    elif case == "meta":
        with torch.device("meta"):
            model = Net()
        dmuon.dedicate_params(model, mesh)
        dmuon.Muon(model)
    elif case == "cost":
        dmuon.dedicate_params(model, mesh, cost="guess")
    elif case == "adamw":
        dmuon.dedicate_params(model, mesh)
        owned = [p for p in model.parameters() if isinstance(p, dmuon.OwnedTensor)]
        dmuon.Muon(model, param_groups=[{"params": owned, "algorithm": "adamw"}])


@pytest.mark.parametrize(
    ("case", "error", "words"),
    [
        ("fully_shard first", "ValueError", ["layers.0.up_proj.weight", "before fully_shard"]),
        ("twice", "ValueError", ["layers.0.up_proj.weight", "already"]),
        ("a bias", "ValueError", ["layers.0.up_proj.bias", "(8,)"]),
        ("no dedicate", "ValueError", ["no parameter is dedicated", "dedicate_params"]),
        ("ranks differ", "ValueError", ["ranks 0 and 2", "5", "6"]),
        ("options differ", "ValueError", ["ranks 0 and 3", "reshard_after_forward"]),
        ("meta", "RuntimeError", ["meta", "to_empty"]),
        ("cost", "ValueError", ["guess", "measured"]),
        ("adamw", "ValueError", ["layers.0.up_proj.weight", "muon group"]),
    ],
)
def test_wrong_use_is_refused_on_every_rank(case, error, words):
    with pytest.raises(AssertionError) as raised:
        run_ranks(4, wrong_use, case, timeout=10.0)
    text = str(raised.value)
    assert text.count(f"{error}: dmuon") == 4, text
    for word in words:
        assert word in text, text


# --- deferred initialisation, views, tied parameters --------------------------------------------


def meta_init(rank):
    mesh = make_mesh("(2,2)")
    with torch.device("meta"):
        model = Net()
    dmuon.dedicate_params(model, mesh)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.fill_(0.5)
    optimizer = dmuon.Muon(model)
    out = model(torch.ones(2, 4))
    out.sum().backward()
    optimizer.step()
    return out.detach(), full_weights(model)


def test_a_model_on_meta_is_materialised_after_wrapping():
    reference = Net()
    for parameter in reference.parameters():
        nn.init.constant_(parameter, 0.5)
    expected = reference(torch.ones(2, 4)).detach()
    for out, weights in run_ranks(4, meta_init):
        assert torch.allclose(out, expected)
        assert all(torch.isfinite(w).all() for w in weights.values())


def at_rest(rank):
    model, _ = distribute(Net(), "(2,2)")
    weight = model.layers[0].up_proj.weight
    seen = [
        isinstance(weight, DTensor),
        weight.dtype == torch.float32,
        weight.device.type == "cpu",
        tuple(weight.shape) == (8, 6),
        sum(1 for _ in model.parameters()) == sum(1 for _ in Net().parameters()),
        list(model.state_dict()) == list(Net().state_dict()),
        [n for n, _ in model.named_parameters()] == [n for n, _ in Net().named_parameters()],
    ]
    model(torch.randn(2, 4)).sum().backward()
    return [
        *seen,
        model.layers[0].up_proj.weight is weight,
        isinstance(weight.grad, dmuon.OwnedTensor),
    ]


def test_a_parameter_at_rest_tells_the_truth():
    assert run_ranks(4, at_rest) == [[True] * 9] * 4


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(6, 6, bias=False)]) for _ in range(1))
        self.extra = nn.Linear(6, 6, bias=False)
        self.extra.weight = self.layers[0][0].weight

    def forward(self, x):
        return self.extra(torch.tanh(self.layers[0][0](x)))


def tied(rank):
    torch.manual_seed(0)
    model = Tied()
    dmuon.dedicate_params(model, make_mesh("(2,2)"), predicate=lambda n, p: True)
    same = model.extra.weight is model.layers[0][0].weight
    optimizer = dmuon.Muon(model)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))
    model(x).pow(2).mean().backward()
    gradient = model.extra.weight.grad.full_tensor()
    optimizer.step()
    return same, gradient, dmuon.stats(model).orthogonalizations


def test_tied_matrices_are_one():
    torch.manual_seed(0)
    reference = Tied()
    for rank in range(4):
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))
        (reference(x).pow(2).mean() / 4).backward()
    results = run_ranks(4, tied)
    assert all(same for same, _, _ in results)
    assert sum(count for _, _, count in results) == 1
    for _, gradient, _ in results:
        assert torch.allclose(gradient, reference.extra.weight.grad, atol=1e-6)
