"""Methods other than forward as entries, and ZeRO-2 or ZeRO-3 per unit."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from checks import Checks
from models import Net, distribute, full
from ranks import run_ranks

import dmuon


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(6, 5, bias=False)
        self.norm = nn.LayerNorm(5)

    def forward(self, x):
        return self.norm(self.encode(x))

    def encode(self, x):
        return F.linear(x, self.proj.weight)  # proj itself is never called


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Tower(), Tower()])

    def forward(self, x):
        return self.layers[0](x).pow(2).mean() + self.layers[1].encode(x).pow(2).mean()


def data(rank):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))


def entries(rank, layout, reshard):
    torch.manual_seed(0)
    model, _ = distribute(Towers(), layout, reshard_after_forward=reshard)
    bad = Checks((rank, layout))
    bad.refused("without", "at rest", lambda: model.layers[1].encode(data(rank)))
    for tower in model.layers:
        dmuon.register_forward_method(tower, "encode")
    model(data(rank)).backward()
    model.layers[1].encode(data(rank)).pow(2).mean().backward()  # alone
    with torch.no_grad():
        alone = model.layers[1].encode(data(rank))

    torch.manual_seed(0)
    plain = Towers()
    for r in range(4):
        (plain(data(r)) / 4).backward()
        (plain.layers[1].encode(data(r)).pow(2).mean() / 4).backward()
    expected = dict(plain.named_parameters())
    for name, p in model.named_parameters():
        if expected[name].grad is None:
            bad.true(name, p.grad is None)
        else:
            bad.true(name, (full(p.grad) - expected[name].grad).abs().max() < 1e-6)
    bad.true("values", torch.allclose(alone, plain.layers[1].encode(data(rank)), atol=1e-6))

    def fail(x):
        raise KeyError("inside")

    model.layers[0].encode_badly = fail
    dmuon.register_forward_method(model.layers[0], "encode_badly")
    try:
        model.layers[0].encode_badly(data(rank))
        bad.true("passes errors on", False)
    except KeyError:
        pass
    at_rest = isinstance(model.layers[0].proj.weight, dmuon.OwnedTensor)
    bad.true("at rest after an error", at_rest)
    bad.refused("no unit", "not part of a unit", lambda: wrong(model.layers[0].norm))
    return bad.bad


def wrong(module):
    dmuon.register_forward_method(module, "forward")


@pytest.mark.parametrize(
    ("layout", "reshard"), [("(4)", True), ("(2,2)", False), ("(2,2)", True), ("(4,1)", True)]
)
def test_a_method_may_be_an_entry_like_forward(layout, reshard):
    assert run_ranks(4, entries, layout, reshard) == [[]] * 4


def per_unit(rank):
    torch.manual_seed(0)
    model, _ = distribute(
        Net(), "(4)", prefetch=0, reshard_after_forward=lambda name, block: name != "layers.1"
    )
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(rank))
    for _ in range(3):
        model(x).pow(2).mean().backward()
    units = {u.name: u.unshards for u in dmuon.stats(model).units}
    errors = []
    for value in ("no", lambda name, block: None):
        try:
            dmuon.dedicate_params(
                Net(), torch.distributed.init_device_mesh("cpu", (4,)), reshard_after_forward=value
            )
        except ValueError as error:
            errors.append(str(error))
    return units, errors


def test_units_may_choose_between_zero_2_and_zero_3():
    for units, errors in run_ranks(4, per_unit):
        assert units == {"layers.0": 6, "layers.1": 3, "layers.2": 6}
        assert "must be True, False or a function" in errors[0]
        assert "must say True or False, got None for unit 'layers.0'" in errors[1]
