"""Faults that reviews found, each with the behaviour that must hold now."""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
import os
import pickle
import subprocess
import sys

import pytest
import torch
import torch.nn as nn
from models import full, full_weights, make_mesh
from ranks import run_ranks
from torch.utils.checkpoint import checkpoint

import dmuon


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x):
        return self.fc2(torch.tanh(self.fc1(x)))


class Model(nn.Module):
    """Dedicated matrices only, so that nothing else gets in the way of what is tested."""

    def __init__(self, call=None):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.call = call or (lambda layer, x: layer(x))

    def forward(self, x):
        for layer in self.layers:
            x = self.call(layer, x)
        return x


def inputs(rank, seed=0):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * seed + rank))


def build(layout, call=None, **options):
    torch.manual_seed(0)
    model = Model(call)
    if layout == "ddp":
        dmuon.dedicate_params_ddp(model, predicate=lambda n, p: True, **options)
    else:
        dmuon.dedicate_params(model, make_mesh(layout), predicate=lambda n, p: True, **options)
    return model


def plain_gradients(call=None, loss=lambda m, x: m(x).pow(2).sum()):
    torch.manual_seed(0)
    model = Model(call)
    for rank in range(4):
        (loss(model, inputs(rank)) / 4).backward()
    return {n: p.grad for n, p in model.named_parameters()}


def gradients(model):
    return {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def check(got, expected):
    assert list(got) == list(expected)
    for name in expected:
        assert torch.allclose(got[name], expected[name], atol=1e-5), name


# --- the end of a process ------------------------------------------------------------------------

TRANSPORTS = ["gloo"] + (["ucx"] if importlib.util.find_spec("libucx") else [])

# Exit codes of the two ranks; -14 would be a rank that hangs.
EXITS = {
    "pending_that_complete": [0, 0],
    "pending_with_python_callbacks": [0, 0],
    "unanswered_with_python_callbacks": [0, 0],
    "unanswered_until_the_limit": [0, 0],
    "one_rank_raises": [1, 1],
    "exit_code_with_pending": [7, 7],
    "os_exit_with_pending": [5, 5],
    "forked_child_ends_first": [0, 0],
}


@functools.cache
def exits(transport):
    """All scenarios in one program: torch is imported once."""
    environment = {**os.environ, "DMUON_TRANSPORT": transport}
    program = os.path.join(os.path.dirname(__file__), "exits.py")
    ended = subprocess.run(
        [sys.executable, program, "2"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0
    return json.loads(ended.stdout)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", EXITS)
def test_a_process_ends_with_its_own_code_whatever_is_pending(name, transport):
    result = exits(transport)[name]
    said = "\n".join(result["said"])
    assert result["codes"] == EXITS[name], said
    assert "terminate called" not in said and "Fatal Python error" not in said, said
    if name == "one_rank_raises":
        assert "rank 1" in result["said"][0], said


class UsesTheGroup(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        try:
            dmuon.reduce_to_owners([torch.ones(2)], [0])
        except RuntimeError as error:
            return str(error)
        return "no error"


def load_data(rank, transport):
    t = torch.full((4,), rank + 1.0)
    dmuon.reduce_to_owners([t], [0], op=torch.distributed.ReduceOp.SUM)
    loader = torch.utils.data.DataLoader(UsesTheGroup(), num_workers=2, batch_size=None)
    messages = []
    for _ in range(2):  # epochs, each with new workers
        messages += list(loader)
        dmuon.broadcast_from_owners([t], [0])
    return messages, t.tolist()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_workers_of_a_data_loader_cannot_use_the_group_and_do_it_no_harm(transport, monkeypatch):
    monkeypatch.setenv("DMUON_TRANSPORT", transport)
    for messages, values in run_ranks(2, load_data, transport):
        assert values == [3.0] * 4
        assert len(messages) == 16
        for message in messages:
            assert "dmuon: " in message and "was forked from process" in message, message


# --- backward -----------------------------------------------------------------------------------


def thrice_reentrant(layer, x):
    for _ in range(3):
        x = checkpoint(layer, x, use_reentrant=True)
    return x


def thrice(layer, x):
    return layer(layer(layer(x)))


def reentrant(rank, layout, reshard):
    model = build(layout, thrice_reentrant, reshard_after_forward=reshard)
    model(inputs(rank).requires_grad_()).pow(2).sum().backward()
    return gradients(model)


@pytest.mark.parametrize("layout", ["(4)", "(2,2)", "ddp"])
@pytest.mark.parametrize("reshard", [True, False], ids=["Z3", "Z2"])
def test_reentrant_checkpointing_of_a_block_called_three_times(layout, reshard):
    expected = plain_gradients(thrice)
    for got in run_ranks(4, reentrant, layout, reshard):
        check(got, expected)


class Opaque:
    """An output that no hook can look into."""

    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Dictionary(dict):
    pass


def opaque(rank, kind):
    wrap = {"object": Opaque, "dict": lambda v: Dictionary(value=v)}[kind]
    unwrap = {"object": lambda o: o.value, "dict": lambda o: o["value"]}[kind]
    model = build("(2,2)")
    for layer in model.layers:
        inner = layer.forward
        layer.forward = lambda x, inner=inner: wrap(inner(x if torch.is_tensor(x) else unwrap(x)))
    out = model(inputs(rank))
    unwrap(out).pow(2).sum().backward()
    return gradients(model)


@pytest.mark.parametrize("kind", ["object", "dict"])
def test_outputs_that_hooks_cannot_see_lose_no_gradient(kind):
    expected = plain_gradients()
    for got in run_ranks(4, opaque, kind):
        check(got, expected)


def exception_in_backward(rank):
    model = build("(2,2)")
    first = model(inputs(rank)).pow(2).sum()
    fail = model(inputs(rank, 1))

    def broken(grad):
        raise RuntimeError("on purpose")

    middle = model.layers[1](inputs(rank, 2))
    middle.register_hook(broken)
    try:
        (model.layers[2](middle).sum() + fail.sum()).backward()
    except RuntimeError as error:
        assert "on purpose" in str(error)
    saved = {k: full(v) for k, v in model.state_dict().items()}
    kinds = {type(p).__name__ for p in model.parameters()}
    model.zero_grad()
    first.backward()  # a loss from before, no forward in between
    return gradients(model), saved, kinds


def test_after_an_exception_in_backward_the_model_is_whole():
    torch.manual_seed(0)
    weights = Model().state_dict()
    expected = plain_gradients()
    for got, saved, kinds in run_ranks(4, exception_in_backward):
        assert kinds == {"OwnedTensor"}
        for name in weights:
            assert torch.equal(saved[name], weights[name])
        check(got, expected)


class Fragile(Model):
    """Calls a module of a block whose own forward does not run, and may fail in it."""

    broken = False

    def forward(self, x):
        if self.broken:
            self.layers[0].fc1(x[..., :1])  # a wrong shape
        return super().forward(self.layers[1].fc2(self.layers[1].fc1(x)))


def fail_outside_the_block(rank):
    torch.manual_seed(0)
    model = Fragile()
    dmuon.dedicate_params(model, make_mesh("(2,2)"), predicate=lambda n, p: True)
    whole = []
    for broken in (True, False, True):
        model.broken = broken
        try:
            model(inputs(rank)).pow(2).sum()
        except RuntimeError as error:
            assert "shape" in str(error)
        model.zero_grad()
        whole.append(all(isinstance(p, dmuon.OwnedTensor) for p in model.parameters()))
    model.broken = False
    model(inputs(rank)).pow(2).sum().backward()
    return whole, gradients(model)


def test_after_an_exception_outside_its_block_a_module_is_at_rest():
    torch.manual_seed(0)
    model = Fragile()
    for rank in range(4):
        (model(inputs(rank)).pow(2).sum() / 4).backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    for whole, got in run_ranks(4, fail_outside_the_block):
        assert whole == [True] * 3
        check(got, expected)


def step_between(rank):
    model = build("(2,2)")
    optimizer = dmuon.Muon(model)
    a, b = model(inputs(rank)).sum(), model(inputs(rank, 1)).sum()
    a.backward()
    optimizer.step()
    try:
        b.backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_backward_after_a_step_is_refused_rather_than_wrong():
    for message in run_ranks(4, step_between):
        assert "layers.2" in message and "between this forward and its backward" in message


def frozen_memory(rank):
    torch.manual_seed(0)
    model = Model()
    for layer in model.layers:
        layer.fc1.weight.requires_grad_(False)
    dmuon.dedicate_params(model, make_mesh("(2,2)"), predicate=lambda n, p: True)
    dmuon.Muon(model)
    (runtime,) = model.__dict__["_dmuon_runtimes"]
    most = 0

    def count(_):
        nonlocal most
        most = max(most, sum(unit.core.unsharded for unit in runtime.units))

    x = inputs(rank).requires_grad_()
    for layer in model.layers:
        layer.register_forward_hook(lambda m, a, out: out.register_hook(count) and None)
    x.register_hook(count)
    model(x).pow(2).sum().backward()
    return most, gradients(model)


def test_partly_frozen_units_are_freed_during_backward():
    expected = {n: g for n, g in plain_gradients().items() if "fc2" in n}
    for most, got in run_ranks(4, frozen_memory):
        assert most <= 2
        check(got, expected)


# --- parameters at rest -------------------------------------------------------------------------


def view_writes(rank):
    model = build("(2,2)")
    w = model.layers[0].fc1.weight
    before = w.full_tensor()
    writes = {
        "orthogonal_": lambda: nn.init.orthogonal_(w),
        "row": lambda: w.data[0].zero_(),
        "item": lambda: w.data.__setitem__((0, 0), 1.0),
        "slice": lambda: w.data.__setitem__(slice(0, 2), 1.0),
        "transpose": lambda: w.data.T.mul_(0),
        "view": lambda: w.data.view(-1).zero_(),
        "chunk": lambda: w.data.chunk(2)[0].zero_(),
    }
    lost = []
    for name, write in writes.items():
        try:
            write()
        except NotImplementedError as error:
            assert "full_tensor" in str(error)
            continue
        if torch.equal(w.full_tensor(), before):
            lost.append(name)
    return lost


def test_writes_through_views_are_refused_not_lost():
    assert run_ranks(4, view_writes) == [[]] * 4


def replaced(rank, how):
    model = build("(2,2)")
    model(inputs(rank))
    zeros = {n: torch.zeros(p.shape) for n, p in model.named_parameters()}
    try:
        if how == "assign":
            model.load_state_dict(zeros, assign=True)
        elif how == "attribute":
            model.layers[1].fc2.weight = nn.Parameter(torch.zeros(4, 8))
        elif how == "functional_call":
            torch.func.functional_call(model, zeros, (inputs(rank),))
        elif how == "to":
            model.to(torch.bfloat16)
        model(inputs(rank))
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("how", ["assign", "attribute", "functional_call", "to"])
def test_a_replaced_parameter_is_refused_not_ignored(how):
    for message in run_ranks(4, replaced, how):
        assert "dmuon: " in message and ("replaced" in message or "exchanged" in message), message


def optimizer_of_parameters(rank):
    model = build("(2,2)")
    optimizer = dmuon.Muon([p for p in model.parameters() if isinstance(p, dmuon.OwnedTensor)])
    reference = build("(2,2)")
    other = dmuon.Muon(reference)
    for step in range(3):
        for m, o in ((model, optimizer), (reference, other)):
            m(inputs(rank, step)).pow(2).sum().backward()
            o.step()
            o.zero_grad()
    a, b = full_weights(model), full_weights(reference)
    inner = dmuon.Muon(model.layers)
    return all(torch.equal(a[n], b[n]) for n in a), inner.param_groups[0]["algorithm"]


def test_an_optimizer_of_parameters_publishes_as_one_of_the_model():
    assert run_ranks(4, optimizer_of_parameters) == [(True, "muon")] * 4


def penalty(rank):
    model = build("(2,2)")
    for micro in range(2):
        loss = model(inputs(rank, micro)).pow(2).sum()
        for p in model.parameters():
            loss = loss + 0.1 * p.pow(2).sum().full_tensor()
        loss.backward()
    return gradients(model)


def test_a_weight_penalty_outside_the_modules_adds_its_gradient():
    torch.manual_seed(0)
    model = Model()
    for micro in range(2):
        for rank in range(4):
            (model(inputs(rank, micro)).pow(2).sum() / 4).backward()
        (0.1 * sum(p.pow(2).sum() for p in model.parameters())).backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    for got in run_ranks(4, penalty):
        check(got, expected)


def wrong_gradient(rank):
    model = build("(2,2)")
    optimizer = dmuon.Muon(model)
    for p in model.parameters():
        p.grad = torch.ones(p.shape)
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_gradient_of_the_wrong_kind_is_refused_on_every_rank():
    for message in run_ranks(4, wrong_gradient, timeout=5.0):
        assert "(8, 4)" in message and "Tensor" in message


def inference_first(rank):
    model = build("(2,2)")
    with torch.inference_mode():
        model(inputs(rank))
    model(inputs(rank)).pow(2).sum().backward()
    return gradients(model)


def test_a_first_forward_in_inference_mode_does_no_harm():
    expected = plain_gradients()
    for got in run_ranks(4, inference_first):
        check(got, expected)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mha = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        return self.mha(x, x, x, need_weights=False)[0]


def attention(rank):
    torch.manual_seed(0)
    model = Attention()
    dmuon.dedicate_params(model, make_mesh("(2,2)"), predicate=lambda n, p: p.ndim == 2)
    model(inputs(rank)[None]).pow(2).sum().backward()
    return {n: full(p.grad) for n, p in model.named_parameters() if p.ndim == 2}


def test_multihead_attention_reads_the_weights_of_its_parts():
    torch.manual_seed(0)
    model = Attention()
    for rank in range(4):
        (model(inputs(rank)[None]).pow(2).sum() / 4).backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.ndim == 2}
    for got in run_ranks(4, attention):
        check(got, expected)


def copies(rank):
    model = build("(2,2)")
    p = model.layers[0].fc1.weight
    twin = copy.deepcopy(p)
    with torch.no_grad():
        twin.zero_()
    try:
        pickle.dumps(p)
    except RuntimeError as error:
        message = str(error)
    norm = nn.utils.get_total_norm([q.detach() for q in model.parameters()], norm_type=torch.inf)
    largest = max(full(q.detach()).abs().max() for q in model.parameters())
    ema = [torch.zeros_like(q.detach()) for q in model.parameters()]
    torch._foreach_lerp_(ema, [q.detach() for q in model.parameters()], 0.5)
    half = all(torch.allclose(full(e), 0.5 * full(q)) for e, q in zip(ema, model.parameters()))
    return (
        isinstance(twin, nn.Parameter) and bool((full(p) != 0).any()),
        message,
        torch.allclose(full(norm), largest),
        half,
    )


def test_copies_pickles_inf_norms_and_foreach():
    for twin, message, norm, half in run_ranks(4, copies):
        assert twin and norm and half
        assert "full_state_dict" in message


def clip_in_ddp(rank):
    torch.manual_seed(0)
    model = Model()
    model.extra = nn.Linear(4, 4)
    dmuon.dedicate_params_ddp(model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    keys = list(model.state_dict())
    model.extra(wrapped(inputs(rank))).sum()
    (wrapped(inputs(rank)).pow(2).sum() + model.extra(inputs(rank)).sum()).backward()
    unclipped = {n: full(p.grad) for n, p in model.named_parameters()}
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return keys, norm, unclipped, {n: full(p.grad) for n, p in model.named_parameters()}


def test_stock_clipping_works_beside_ddp():
    for keys, norm, before, after in run_ranks(4, clip_in_ddp):
        assert "layers.0.fc1.weight" in keys
        expected = torch.linalg.vector_norm(torch.stack([g.norm() for g in before.values()]))
        assert torch.allclose(norm, expected, rtol=1e-5)
        for name in before:
            assert torch.allclose(after[name], before[name] * 0.1 / (expected + 1e-6), atol=1e-6)


# --- optimizer protocol --------------------------------------------------------------------------


def test_the_optimizer_copies_loads_and_schedules_as_torch_s_own():
    w = nn.Parameter(torch.randn(4, 3))
    ours, theirs = dmuon.Muon([w]), torch.optim.Muon([nn.Parameter(w.detach().clone())], lr=0.03)
    theirs.param_groups[0]["params"][0].grad = torch.ones(4, 3)
    theirs.step()
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["lr"] == 0.03
    buffer = theirs.state_dict()["state"][0]["momentum_buffer"]
    assert torch.equal(ours.state[w]["momentum_buffer"], buffer.float())
    w.grad = torch.ones(4, 3)
    ours.step()

    twin = copy.deepcopy(dmuon.Muon([w]))
    twin.param_groups[0]["params"][0].grad = torch.ones(4, 3)
    twin.step()
    torch.optim.lr_scheduler.OneCycleLR(dmuon.Muon([w]), max_lr=0.1, total_steps=10)
    dmuon.Muon([{"params": [w], "layer_name": "first"}])
    dmuon.Muon([w], ns_coefficients=(3.4445, -4.775, 2.0315), adjust_lr_fn=None)
