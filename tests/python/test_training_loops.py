"""What people do in training loops: accumulation, switches, checkpointing, unused parameters,
clipping."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn as nn
from models import Net, distribute, full, full_weights
from ranks import run_ranks
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import dmuon

LAYOUTS = ["(4)", "(2,2)", "ddp"]


def inputs(step, rank, micro=0):
    g = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randn(5, 4, generator=g)


def gradients(model):
    inner = getattr(model, "module", model)
    return {n: None if p.grad is None else full(p.grad) for n, p in inner.named_parameters()}


def reference_gradients(steps=1, micros=1, loss=lambda m, x: m(x).pow(2).mean(), divisor=4.0):
    """Plain autograd, one process: the mean over the ranks, the sum over steps and
    micro-batches."""
    torch.manual_seed(0)
    model = Net()
    for step in range(steps):
        for micro in range(micros):
            for rank in range(4):
                (loss(model, inputs(step, rank, micro)) / divisor).backward()
    return {n: p.grad for n, p in model.named_parameters()}


def build(layout, **options):
    torch.manual_seed(0)
    return distribute(Net(), layout, **options)[0]


def assert_close(got, expected, atol=1e-6):
    for name, value in expected.items():
        if value is None:
            assert got[name] is None, name
        else:
            assert (got[name] - value).abs().max().item() <= atol, name


# --- accumulation -------------------------------------------------------------------------------


def accumulate(rank, layout, how):
    model = build(layout)
    inner = getattr(model, "module", model)
    calls = []
    for micro in range(4):
        last = micro == 3
        if how == "no_sync" and not last:
            with dmuon.no_sync(model):
                model(inputs(0, rank, micro)).pow(2).mean().backward()
        else:
            if how == "fsdp":
                model.set_requires_gradient_sync(last)
            elif how == "all_reduce":
                model.set_requires_all_reduce(last)
            with model.no_sync() if how == "ddp" and not last else nullcontext():
                model(inputs(0, rank, micro)).pow(2).mean().backward()
        reduced = {k: v for k, v in dmuon.stats(inner).bytes.items() if k.startswith("reduce/")}
        calls.append({k: v["calls"] for k, v in reduced.items()})
    return gradients(model), calls


@pytest.mark.parametrize(
    ("layout", "how"),
    [
        ("(4)", "no_sync"),
        ("(2,2)", "no_sync"),
        ("ddp", "no_sync"),
        ("ddp", "ddp"),
        ("(2,2)", "fsdp"),
        ("(2,2)", "all_reduce"),
        ("(4)", "all_reduce"),
        ("(2,2)", "every"),
    ],
)
def test_four_micro_batches_are_one_large_batch(layout, how):
    expected = reference_gradients(micros=4)
    for got, calls in run_ranks(4, accumulate, layout, how):
        assert_close(got, expected, atol=2e-6)
        if how in (
            "no_sync",
            "fsdp",
            "ddp",
        ):  # no collective while accumulating, one reduction a unit
            assert all(set(c.values()) == {0} for c in calls[:3]), calls
            assert set(calls[3].values()) == {3}
        if how == "all_reduce" and layout == "(2,2)":
            assert calls[3] == {"reduce/shard": 12, "reduce/replicate": 3}


def dropped(rank, layout):
    model = build(layout)
    inner = getattr(model, "module", model)
    optimizer = dmuon.Muon(inner, weight_decay=0.5)
    before = full_weights(model)
    with dmuon.no_sync(model):
        model(inputs(0, rank)).pow(2).mean().backward()
    model(inputs(1, rank)).pow(2).mean().backward()
    optimizer.zero_grad()
    optimizer.step()
    unchanged = all(torch.equal(before[n], w) for n, w in full_weights(model).items())
    model(inputs(0, rank)).pow(2).mean().backward()
    return unchanged, gradients(model)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_zero_grad_drops_everything(layout):
    expected = reference_gradients()
    for unchanged, got in run_ranks(4, dropped, layout):
        assert unchanged
        # DDP and FSDP2 keep their own no_sync gradients through zero_grad; ours are gone.
        dedicated = {n: g for n, g in expected.items() if "proj.weight" in n}
        assert_close({n: got[n] for n in dedicated}, dedicated)


def frozen_between(rank, layout):
    model = build(layout)
    inner = getattr(model, "module", model)
    weight = inner.layers[0].up_proj.weight
    with dmuon.no_sync(model):
        model(inputs(0, rank)).pow(2).mean().backward()
    weight.requires_grad_(False)
    model(inputs(1, rank)).pow(2).mean().backward()
    return None if weight.grad is None else full(weight.grad)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_parameter_frozen_after_no_sync_gets_what_was_accumulated(layout):
    expected = reference_gradients()["layers.0.up_proj.weight"]
    for got in run_ranks(4, frozen_between, layout):
        assert got is not None and (got - expected).abs().max() <= 1e-6


def divide_factor(rank):
    model = build("(2,2)")
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
    model(inputs(0, rank)).pow(2).mean().backward()
    return gradients(model)


def test_the_gradient_divide_factor_of_fsdp2_is_honoured():
    expected = reference_gradients(divisor=1.0)
    for got in run_ranks(4, divide_factor):
        assert_close(got, expected, atol=4e-6)


# --- graphs -------------------------------------------------------------------------------------


class Wrapped(nn.Module):
    """Checkpoints every layer of Net."""

    def __init__(self, net, reentrant, early_stop=True):
        super().__init__()
        self.net, self.reentrant, self.early_stop = net, reentrant, early_stop

    def forward(self, x):
        x = self.net.embed_in(x)
        for layer in self.net.layers:
            extra = {} if self.reentrant else {"early_stop": self.early_stop}
            x = checkpoint(layer, x, use_reentrant=self.reentrant, **extra)
        return self.net.head(x)


def checkpointed(rank, layout, mode):
    from models import make_mesh

    torch.manual_seed(0)
    net = Net()
    if mode == "wrapper":
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        net.layers = nn.ModuleList(checkpoint_wrapper(layer) for layer in net.layers)
        outer: nn.Module = net
    else:
        outer = Wrapped(net, mode == "reentrant", mode != "no early stop")
    mesh = make_mesh(layout)
    dmuon.dedicate_params(outer, mesh, predicate=lambda n, p: "proj" in n and p.ndim == 2)
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(outer, mesh=mesh)
    outer(inputs(0, rank)).pow(2).mean().backward()
    return list(gradients(outer).values())


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant", "no early stop", "wrapper"])
@pytest.mark.parametrize("layout", ["(4)", "(2,2)"])
def test_activation_checkpointing_gives_the_same_gradients(layout, mode):
    expected = list(reference_gradients().values())
    for got in run_ranks(4, checkpointed, layout, mode):
        for g, e in zip(got, expected):
            assert (g - e).abs().max().item() <= 1e-6


def two_forwards(rank, layout, how):
    model = build(layout)
    a, b = inputs(0, rank), inputs(1, rank)
    if how == "twice in one loss":
        (model(a).pow(2).mean() + model(b).pow(2).mean()).backward()
    elif how == "forward forward backward backward":
        first, second = model(a).pow(2).mean(), model(b).pow(2).mean()
        first.backward()
        second.backward()
    elif how == "evaluation between":
        loss = model(a).pow(2).mean()
        with torch.no_grad():
            model(b)
        loss.backward()
        model(b).pow(2).mean().backward()
    elif how == "retain graph":
        loss = model(a).pow(2).mean() + model(b).pow(2).mean()
        (0.5 * loss).backward(retain_graph=True)
        (0.5 * loss).backward()
    return gradients(model)


@pytest.mark.parametrize("layout", ["(4)", "(2,2)"])
@pytest.mark.parametrize(
    "how",
    [
        "twice in one loss",
        "forward forward backward backward",
        "evaluation between",
        "retain graph",
    ],
)
def test_several_forwards_give_plain_autograd_s_gradients(layout, how):
    expected = reference_gradients(steps=2)
    for got in run_ranks(4, two_forwards, layout, how):
        assert_close(got, expected, atol=2e-6)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x, use):
        out = {"first": x, "rest": [x * 0.0]}
        for i in use:
            out["first"] = torch.tanh(self.layers[i](out["first"]))
        return out


def unused(rank, layout, per_rank):
    torch.manual_seed(0)
    model, _ = distribute(Branches(), layout, predicate=lambda n, p: True)
    inner = getattr(model, "module", model)
    optimizer = dmuon.Muon(inner, lr=0.1, weight_decay=0.5)
    before = full_weights(model)
    keep = 1.0 if rank in per_rank else 0.0
    out = model(inputs(0, rank), [0, 2])["first"]
    if keep:
        out.sum().backward()
    else:  # a backward that reaches none of the weights
        (inputs(0, rank).requires_grad_() * 2).sum().backward()
        with torch.enable_grad():
            (out * 0.0).sum().backward()
    got = gradients(model)
    optimizer.step()
    after = full_weights(model)
    return got, torch.equal(before["layers.1.weight"], after["layers.1.weight"])


@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_a_parameter_without_gradient_on_any_rank_is_untouched(layout):
    for got, untouched in run_ranks(4, unused, layout, (0, 1, 2, 3)):
        assert got["layers.1.weight"] is None and untouched
        assert got["layers.0.weight"] is not None


class SometimesUnused(nn.Module):
    """The second matrix of the unit takes part in the graph on some ranks only."""

    def __init__(self):
        super().__init__()
        block = nn.Module()
        block.a, block.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        block.forward = lambda x, both: block.a(x) + (block.b(x) if both else 0.0)
        self.layers = nn.ModuleList([block])

    def forward(self, x, both):
        return self.layers[0](x, both)


def partly_unused(rank, layout):
    torch.manual_seed(0)
    model, _ = distribute(SometimesUnused(), layout, predicate=lambda n, p: True)
    model(inputs(0, rank), rank == 1).sum().backward()
    return gradients(model)


@pytest.mark.parametrize("layout", ["(4)", "(2,2)"])
def test_a_rank_without_a_gradient_contributes_zeros(layout):
    expected = inputs(0, 1).sum(0).repeat(4, 1) / 4
    for got in run_ranks(4, partly_unused, layout):
        assert torch.allclose(got["layers.0.b.weight"], expected, atol=1e-6)


def after_an_exception(rank, layout):
    model = build(layout)

    def fail(grad):
        raise RuntimeError("broken on purpose")

    x = model.embed_in.register_forward_hook(lambda m, a, out: out.register_hook(fail) and None)
    try:
        model(inputs(1, rank)).pow(2).mean().backward()
    except RuntimeError as error:
        assert "on purpose" in str(error)
    x.remove()
    model.zero_grad()
    model._get_fsdp_state()._reset_iter_state()
    model(inputs(0, rank)).pow(2).mean().backward()
    return gradients(model)


@pytest.mark.parametrize("layout", ["(4)", "(2,2)"])
def test_an_exception_in_backward_leaves_nothing_behind(layout):
    expected = reference_gradients()
    for got in run_ranks(4, after_an_exception, layout):
        assert_close(got, expected)


# --- clipping, freezing, precision --------------------------------------------------------------


def clipped(rank, layout):
    model = build(layout)
    model(inputs(0, rank)).pow(2).mean().backward()
    inner = getattr(model, "module", model)
    norm = full(nn.utils.clip_grad_norm_(inner.parameters(), 0.05))
    return norm.item(), gradients(model)


@pytest.mark.parametrize("layout", ["(4)", "(2,2)"])
def test_stock_clipping_sees_every_matrix_once(layout):
    torch.manual_seed(0)
    reference = Net()
    for rank in range(4):
        (reference(inputs(0, rank)).pow(2).mean() / 4).backward()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.05).item()
    for norm, got in run_ranks(4, clipped, layout):
        assert abs(norm - expected) < 1e-5 * expected
        assert_close(got, {n: p.grad for n, p in reference.named_parameters()})


def frozen(rank, layout):
    torch.manual_seed(0)
    net = Net()
    net.layers[1].requires_grad_(False)
    net.layers[2].up_proj.weight.requires_grad_(False)
    model, _ = distribute(net, layout)
    inner = getattr(model, "module", model)
    optimizer = dmuon.Muon(inner, lr=0.1, weight_decay=0.5)
    before = full_weights(model)
    for step in range(2):
        model(inputs(step, rank)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    after = full_weights(model)
    same = {n: torch.equal(before[n], after[n]) for n in before}
    inner.layers[1].up_proj.weight.requires_grad_(True)
    model(inputs(5, rank)).pow(2).mean().backward()
    return (
        same,
        inner.layers[1].up_proj.weight.grad is not None,
        {u.name: u.reduces for u in dmuon.stats(inner).units},
    )


@pytest.mark.parametrize("layout", ["(4)", "(2,2)"])
def test_frozen_parameters_keep_their_bits_and_move_no_gradient(layout):
    for same, later, reduces in run_ranks(4, frozen, layout):
        for name, equal in same.items():
            assert equal == ("layers.1" in name or name == "layers.2.up_proj.weight"), name
        assert later
        assert reduces == {"layers.0": 3, "layers.1": 1, "layers.2": 3}


def mixed_precision(rank, layout, inherited):
    torch.manual_seed(0)
    net = Net()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if inherited:
        from models import make_mesh

        mesh = make_mesh(layout)
        dmuon.dedicate_params(net, mesh)
        for layer in net.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        model = fully_shard(net, mesh=mesh, mp_policy=policy)
    else:
        net = net.bfloat16()
        model, _ = distribute(net, layout)
    seen = []
    net.layers[0].up_proj.register_forward_hook(
        lambda m, a, out: seen.append((m.weight.dtype, out.dtype))
    )
    optimizer = dmuon.Muon(model, lr=0.02)
    losses = []
    for _ in range(8):
        x = inputs(0, rank).to(torch.float32 if inherited else torch.bfloat16)
        loss = (model(x) - 1).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weight = net.layers[0].up_proj.weight
    state = optimizer.state[weight]
    return seen[0], weight.dtype, {k: v.dtype for k, v in state.items()}, losses


@pytest.mark.parametrize("inherited", [True, False])
def test_half_precision_forward_with_fp32_state(inherited):
    half, wide = torch.bfloat16, torch.float32
    for seen, dtype, state, losses in run_ranks(4, mixed_precision, "(2,2)", inherited):
        assert seen == (half, half)
        assert dtype == (wide if inherited else half)
        expected = {"momentum_buffer": wide} | ({} if inherited else {"master": wide})
        assert state == expected
        assert losses[-1] < 0.9 * losses[0]


def evaluation_between(rank, layout, reshard):
    model = build(layout, reshard_after_forward=reshard)
    inner = getattr(model, "module", model)
    optimizer = dmuon.Muon(inner, lr=0.1)
    model(inputs(0, rank)).pow(2).mean().backward()
    with torch.no_grad():
        model(inputs(1, rank))
    optimizer.step()
    optimizer.zero_grad()
    out = model(inputs(2, rank)).detach()
    plain = Net()
    plain.load_state_dict(full_weights(model))
    return out, plain(inputs(2, rank)).detach()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reshard", [True, False], ids=["Z3", "Z2"])
def test_an_evaluation_before_the_step_does_not_keep_old_weights(transport, layout, reshard):
    for got, expected in run_ranks(4, evaluation_between, layout, reshard):
        assert torch.allclose(got, expected, atol=1e-6)


class OnlyInner(nn.Module):
    """Calls a block's submodules, never the block; and reads a weight from another module."""

    def __init__(self):
        super().__init__()
        self.layers = Net().layers

    def forward(self, x):
        for layer in self.layers:
            x = layer.down_proj(layer.up_proj(x))
        return x


def test_a_block_whose_own_forward_never_runs_still_gets_its_weights():
    torch.manual_seed(0)
    reference = OnlyInner()
    for layer in reference.layers:  # plain blocks: dedicated alone, nothing for fully_shard in them
        layer.up_proj.bias = None
    for rank in range(4):
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))
        (reference(x).pow(2).mean() / 4).backward()
    for got in run_ranks(4, bare_inner_only, "(2,2)"):
        for name, value in got.items():
            expected = dict(reference.named_parameters())[name].grad
            if expected is not None:
                assert (value - expected).abs().max() <= 1e-6, name


def bare_inner_only(rank, layout):
    from models import make_mesh

    torch.manual_seed(0)
    model = OnlyInner()
    for layer in model.layers:
        layer.up_proj.bias = None
    dmuon.dedicate_params(
        model, make_mesh(layout), predicate=lambda n, p: n.endswith("proj.weight")
    )
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))
    model(x).pow(2).mean().backward()
    return {n: g for n, g in gradients(model).items() if g is not None}
