"""dmuon.Muon beside torch.optim.Muon: the same training, and its checkpoints."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn as nn
import torch.optim._muon as torch_muon
from models import distribute, full, full_weights
from ranks import run_ranks
from reference import KELLER, Muon, relative

import dmuon

ADJUSTMENTS = ["original", "match_rms_adamw", "spectral_unclamped", "none"]


@pytest.fixture
def fp64_torch(monkeypatch):
    """torch.optim.Muon iterates in bf16 whatever its parameters: here in fp64, else as it is."""
    source = inspect.getsource(torch_muon._zeropower_via_newtonschulz)
    assert source.count("bfloat16") == 1  # ".bfloat16()" or "torch.bfloat16", by version
    namespace = dict(vars(torch_muon))
    exec(source.replace(".bfloat16()", ".double()").replace("bfloat16", "float64"), namespace)
    monkeypatch.setattr(
        torch_muon, "_zeropower_via_newtonschulz", namespace["_zeropower_via_newtonschulz"]
    )


class Network(nn.Module):
    """Matrices only: wide, tall and square."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(6, 16, bias=False),
            nn.Tanh(),
            nn.Linear(16, 16, bias=False),
            nn.Tanh(),
            nn.Linear(16, 4, bias=False),
        )

    def forward(self, x):
        return self.layers(x)


def backward(model, step, rank=0, ranks=1):
    dtype = next(model.parameters()).dtype
    g = torch.Generator().manual_seed(31 * step + rank)
    x = torch.randn(64, 6, generator=g).to(dtype)
    y = torch.sin(x[:, :4] * 2)
    ((model(x) - y).square().mean() / ranks).backward()


class ReferenceOptimizer:
    """The fp64 update of the formulas, as an optimizer."""

    def __init__(self, model, **options):
        self.pairs = [(p, Muon(p.detach(), steps=KELLER, **options)) for p in model.parameters()]

    @torch.no_grad()
    def step(self):
        for p, reference in self.pairs:
            reference.step(p.grad)
            p.copy_(reference.w)
            p.grad = None


@pytest.mark.parametrize("adjust", ADJUSTMENTS)
@pytest.mark.parametrize("nesterov", [True, False])
def test_fifty_steps_of_a_network_equal_torchs_in_fp64(adjust, nesterov, fp64_torch):
    lr = {"match_rms_adamw": 0.01}.get(adjust, 0.02)
    mine, theirs = Network(), Network().double()
    options = {"lr": lr, "momentum": 0.95, "nesterov": nesterov, "weight_decay": 0.1}
    optimizer = dmuon.Muon(
        mine.parameters(), ns_coefficients="keller", adjust_lr_fn=adjust, **options
    )
    if adjust in ("original", "match_rms_adamw"):
        other = torch.optim.Muon(theirs.parameters(), adjust_lr_fn=adjust, **options)
    else:  # torch has no "none", and "spectral_unclamped" in its latest versions only
        other = ReferenceOptimizer(theirs, lr=lr, mu=0.95, nesterov=nesterov, wd=0.1, adjust=adjust)
    for step in range(50):
        for model in (mine, theirs):
            model.zero_grad()
            backward(model, step)
        optimizer.step()
        other.step()
    for a, b in zip(mine.parameters(), theirs.parameters()):
        assert relative(a, b) < 1e-5


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_in_fp64_it_equals_torch_to_the_last_digits(adjust, fp64_torch):
    mine, theirs = Network().double(), Network().double()
    options = {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": adjust}
    optimizer = dmuon.Muon(mine.parameters(), ns_coefficients="keller", **options)
    other = torch.optim.Muon(theirs.parameters(), **options)
    for step in range(50):
        for model, o in ((mine, optimizer), (theirs, other)):
            model.zero_grad()
            backward(model, step)
            o.step()
    for a, b in zip(mine.parameters(), theirs.parameters()):
        assert relative(a, b) < 1e-12


# --- checkpoints ---------------------------------------------------------------------------------


def trained_by_torch(steps):
    model = Network()
    optimizer = torch.optim.Muon(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.1)
    train(model, optimizer, range(steps))
    return model, optimizer


def train(model, optimizer, steps, rank=0, ranks=1):
    for step in steps:
        optimizer.zero_grad()
        for r in range(ranks):
            backward(model, step, r, ranks)
        optimizer.step()


def test_a_checkpoint_of_torchs_muon_goes_on(tmp_path, fp64_torch):
    model, optimizer = trained_by_torch(5)
    torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "theirs")
    weights, state = torch.load(tmp_path / "theirs", weights_only=True)
    mine = Network()
    mine.load_state_dict(weights)
    continued = dmuon.Muon(mine.parameters(), lr=0.7)
    continued.load_state_dict(state)
    group = continued.param_groups[0]
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.02, 0.9, 0.1)
    assert group["ns_coefficients"] == KELLER[0] and group["variant"] == "none"
    for p, q in zip(mine.parameters(), model.parameters()):
        theirs = optimizer.state[q]["momentum_buffer"]
        assert torch.equal(continued.state[p]["momentum_buffer"], theirs)
    train(model, optimizer, range(5, 15))
    train(mine, continued, range(5, 15))
    for p, q in zip(mine.parameters(), model.parameters()):
        assert relative(p, q) < 1e-5


def test_a_checkpoint_from_before_the_first_step_loads():
    state = torch.optim.Muon(Network().parameters()).state_dict()
    mine = dmuon.Muon(Network().parameters())
    mine.load_state_dict(state)
    assert all(s["momentum_buffer"].abs().sum() == 0 for s in mine.state.values())


class SumMuon:
    """Muon whose momentum is a plain sum, in fp64."""

    def __init__(self, model, lr, mu):
        self.lr, self.mu = lr, mu
        self.references = [(p, Muon(p.detach(), lr=lr, mu=mu, steps=KELLER)) for p in model]
        self.buffers = [torch.zeros_like(p) for p in model]

    def step(self, gradients):
        for (p, reference), buffer, g in zip(self.references, self.buffers, gradients):
            buffer.mul_(self.mu).add_(g)
            reference.step(g)


def test_a_momentum_that_is_a_sum_is_converted():
    generator = torch.Generator().manual_seed(2)
    shapes = [(6, 4), (3, 8)]
    mu = 0.9
    params = [nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
    theirs = SumMuon(params, 0.05, mu)
    for _ in range(5):
        theirs.step([torch.randn(s, generator=generator) for s in shapes])
    state_dict = {
        "state": {i: {"momentum_buffer": b} for i, b in enumerate(theirs.buffers)},
        "param_groups": [{"lr": 0.05, "momentum": mu, "params": [0, 1]}],
    }
    mine = [nn.Parameter(r.w.float()) for _, r in theirs.references]
    optimizer = dmuon.Muon(mine, ns_coefficients="keller")
    optimizer.load_state_dict(dmuon.ema_momentum(state_dict))
    for _ in range(5):
        gradients = [torch.randn(s, generator=generator) for s in shapes]
        theirs.step(gradients)
        for p, g in zip(mine, gradients):
            p.grad = g
        optimizer.step()
    for p, (_, reference) in zip(mine, theirs.references):
        assert relative(p, reference.w) < 1e-5
        assert relative(optimizer.state[p]["momentum_buffer"], reference.buf) < 1e-5


def test_a_sum_needs_to_know_its_momentum():
    buffer = torch.ones(2, 2)
    state = {"state": {0: {"momentum_buffer": buffer}}, "param_groups": [{"params": [0]}]}
    with pytest.raises(ValueError, match="group 0 needs a momentum"):
        dmuon.ema_momentum(state)
    with pytest.raises(ValueError, match=r"1\.0"):
        dmuon.ema_momentum(state, momentum=1.0)
    converted = dmuon.ema_momentum(state, momentum=0.75)
    assert torch.equal(converted["state"][0]["momentum_buffer"], torch.full((2, 2), 0.25))
    assert torch.equal(buffer, torch.ones(2, 2))
    other = {"state": {0: {"exp_avg": buffer}}, "param_groups": [{"params": [0]}]}
    assert dmuon.ema_momentum(other) == other


def load_on_owners(rank, layout, state, weights):
    model = Network()
    model.load_state_dict(weights)
    model, _ = distribute(model, layout, predicate=lambda n, p: True)
    inner = getattr(model, "module", model)
    optimizer = dmuon.Muon(inner)
    optimizer.load_state_dict(state)
    momenta = [full(optimizer.state[p]["momentum_buffer"]) for p in inner.parameters()]
    for step in range(5, 8):
        optimizer.zero_grad()
        backward(model, step, rank)
        optimizer.step()
    return momenta, full_weights(model)


@pytest.mark.parametrize("layout", ["(2,2)", "ddp"])
def test_torchs_checkpoint_goes_on_with_owners(layout, fp64_torch):
    model, optimizer = trained_by_torch(5)
    weights = {n: p.clone() for n, p in model.state_dict().items()}
    state = optimizer.state_dict()
    results = run_ranks(4, load_on_owners, layout, state, weights)
    before = [optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters()]
    train(model, optimizer, range(5, 8), ranks=4)
    for momenta, final in results:
        assert all(torch.equal(a, b) for a, b in zip(momenta, before))
        for name, p in model.named_parameters():
            assert relative(final[name], p) < 1e-5, name
