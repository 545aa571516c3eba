"""How trainers use a model and its optimizer: in the right order, or with an error that says it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_model import Additive, backward, different, everything, train
from checks import Checks
from models import make_mesh
from ranks import run_ranks
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dmuon


class ModelPart(Stateful):
    """As torchtitan's ModelWrapper."""

    def __init__(self, model):
        self.model = model

    def state_dict(self):
        return get_model_state_dict(self.model)

    def load_state_dict(self, state_dict):
        set_model_state_dict(self.model, state_dict, options=StateDictOptions(strict=False))


class OptimizerPart(Stateful):
    """As torchtitan's OptimizersContainer: one flat dict, no parameter group by number."""

    options = StateDictOptions(flatten_optimizer_state_dict=True)

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        return get_optimizer_state_dict(self.model, self.optimizer, options=self.options)

    def load_state_dict(self, state_dict):
        set_optimizer_state_dict(self.model, self.optimizer, state_dict, options=self.options)


def titan(rank, layout, seed):
    """On the meta device, then parallel, then with values."""
    mesh = make_mesh(layout)
    with torch.device("meta"):
        model = Additive()
    dmuon.dedicate_params(model, mesh)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        torch.manual_seed(seed)
        for p in model.parameters():
            p.normal_()
        model.seen.zero_()
    return model, dmuon.Muon(model, lr=0.02)


def replicas_agree(model):
    """Whether the shards are the same in both rows of the mesh (2, 2)."""
    parts = {n: p.to_local() for n, p in model.named_parameters() if type(p.data) is DTensor}
    assert parts
    everyone = [None] * 4
    dist.all_gather_object(everyone, parts)
    return different(everyone[0], everyone[2]) == different(everyone[1], everyone[3]) == []


def titan_flow(rank, folder):
    checks = Checks(rank)
    model, optimizer = titan(rank, "(2,2)", seed=0)
    checks.true("replicas agree", replicas_agree(model))
    train(model, optimizer, range(3), rank, 4)
    state = {"model": ModelPart(model), "optimizer": OptimizerPart(model, optimizer)}
    group = dist.new_group(backend="dmuon")
    dcp.async_save(state, checkpoint_id=folder, process_group=group).result()
    before = everything(model, optimizer)
    train(model, optimizer, range(3, 5), rank, 4)
    end = everything(model, optimizer)

    model, optimizer = titan(rank, "(2,2)", seed=1)
    dcp.load(
        {"model": ModelPart(model), "optimizer": OptimizerPart(model, optimizer)},
        checkpoint_id=folder,
    )
    checks.true("loaded", different(everything(model, optimizer), before) == [])
    train(model, optimizer, range(3, 5), rank, 4)
    checks.true("goes on", different(everything(model, optimizer), end) == [])
    return checks.bad


def test_a_flow_as_torchtitans_resumes_bit_for_bit(tmp_path):
    assert run_ranks(4, titan_flow, str(tmp_path)) == [[]] * 4


def wrapped_later(rank, exchange):
    """Trainers that prepare model and optimizer together wrap the model under the optimizer, and
    some exchange the parameters in its groups then."""
    checks = Checks(rank)
    torch.manual_seed(0)
    mesh = make_mesh("(2,2)")
    model = Additive()
    dmuon.dedicate_params(model, mesh)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    optimizer = dmuon.Muon(model, lr=0.02)
    old = dict(model.named_parameters())
    fully_shard(model, mesh=mesh)
    if exchange:
        new = {id(old[n]): p for n, p in model.named_parameters()}
        for group in optimizer.param_groups:
            group["params"] = [new[id(p)] for p in group["params"]]
    backward(model, 0, rank, 4)
    before = everything_of(model)
    checks.refused("step", "then dmuon.Muon", optimizer.step)
    checks.refused("state_dict", "then dmuon.Muon", optimizer.state_dict)
    checks.true("unchanged", different(everything_of(model), before) == [])
    return checks.bad


def everything_of(model):
    return {n: p.detach().full_tensor() for n, p in model.named_parameters()}


@pytest.mark.parametrize("exchange", [False, True])
def test_an_optimizer_that_was_built_before_fully_shard_says_the_order(exchange):
    assert run_ranks(4, wrapped_later, exchange) == [[]] * 4
