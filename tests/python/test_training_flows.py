"""How trainers use a model and its optimizer: in the right order, or with an error that says it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_model import (
    Additive,
    backward,
    batch,
    build,
    different,
    everything,
    outputs,
    train,
)
from checks import Checks
from models import distribute, full, make_mesh
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
from torch.distributed.tensor import DTensor, distribute_tensor

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


def decaying(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def two_steps(model, optimizer, schedule, rank):
    for step in range(2):
        train(model, optimizer, [step], rank, 4)
        schedule.step()


def exchanged(optimizer, model, how):
    """What a trainer does to the groups when it has wrapped the model."""
    if how == "by name":
        new = dict(model.named_parameters())
        names = [optimizer._names[id(p)] for g in optimizer.param_groups for p in g["params"]]
        for group in optimizer.param_groups:
            group["params"] = [new[names.pop(0)] for _ in group["params"]]
    elif how == "wrongly":  # as Accelerate, which takes all empty shards for one
        for group in optimizer.param_groups:
            group["params"] = [group["params"][-1]] * len(group["params"])


def wrapped_later(rank, how, folder):
    """Optimizer first, with a state loaded before or none, then ``fully_shard``."""
    checks = Checks(rank)
    torch.manual_seed(0)
    mesh = make_mesh("(2,2)")
    model = Additive()
    dmuon.dedicate_params(model, mesh)
    for layer in model.layers[:1]:
        fully_shard(layer, mesh=mesh)
    optimizer = dmuon.Muon(model, lr=0.02, weight_decay=0.1, adamw_lr=3e-3)
    schedule = decaying(optimizer)
    state = torch.load(f"{folder}/state", weights_only=True)
    whole = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(model, optimizer, state, options=whole)
    for layer in model.layers[1:]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    exchanged(optimizer, model, how)
    found = get_optimizer_state_dict(model, optimizer, options=whole)
    checks.true("state", different(flat(found["state"]), flat(state["state"])) == [])
    two_steps(model, optimizer, schedule, rank)
    expected = torch.load(f"{folder}/end", weights_only=True)
    checks.true("trained", different(everything(model, optimizer), expected) == [])
    checks.true("plain", all(type(p) is not torch.nn.Parameter for p in optimizer.state))
    return checks.bad


def flat(state):
    return {f"{n}:{k}": v for n, values in state.items() for k, v in values.items()}


def wrapped_before(rank, folder):
    """The usual order; leaves its state in between and its end in ``folder``."""
    called, model, optimizer = build("(2,2)")
    train(called, optimizer, range(7, 9), rank, 4)
    whole = StateDictOptions(full_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=whole)
    called, model, optimizer = build("(2,2)")
    set_optimizer_state_dict(model, optimizer, state, options=whole)
    schedule = decaying(optimizer)
    two_steps(model, optimizer, schedule, rank)
    end = everything(model, optimizer)
    if rank == 0:
        torch.save(state, f"{folder}/state")
        torch.save(end, f"{folder}/end")


@pytest.mark.parametrize("how", ["not at all", "by name", "wrongly"])
def test_an_optimizer_may_be_built_before_fully_shard(how, tmp_path):
    run_ranks(4, wrapped_before, str(tmp_path))
    assert run_ranks(4, wrapped_later, how, str(tmp_path)) == [[]] * 4


def groups_of_ones_own(rank):
    """Names that are not the model's, and a parameter that was frozen at first."""
    checks = Checks(rank)
    mesh = make_mesh("(4)")
    model = Additive()
    dmuon.dedicate_params(model, mesh)
    model.table.bias.requires_grad_(False)
    own = [{"params": [("mine", model.tied.bias)], "algorithm": "adamw", "lr": 0.5}]
    optimizer = dmuon.Muon(model, param_groups=own)
    model.table.bias.requires_grad_(True)
    optimizer.add_param_group({"params": [model.table.bias], "lr": 0.25})
    apart = torch.nn.Parameter(torch.ones(2))  # no model's
    optimizer.add_param_group({"params": [apart]})
    fully_shard(model, mesh=mesh)
    backward(model, 0, rank, 4)
    apart.grad = torch.ones(2)
    optimizer.step()
    rates = {id(p): g["lr"] for g in optimizer.param_groups for p in g["params"]}
    checks.true("mine", rates[id(model.tied.bias)] == 0.5)
    checks.true("unfrozen", rates[id(model.table.bias)] == 0.25)
    checks.true("apart", apart[0] < 1)
    checks.true("all", {*model.parameters(), apart} == set(optimizer.state))
    checks.true("sharded", all(isinstance(p, DTensor) for p in model.parameters()))
    return checks.bad


def test_groups_of_ones_own_follow_the_model():
    assert run_ranks(4, groups_of_ones_own) == [[]] * 4


def not_followed(rank):
    checks = Checks(rank)
    model = Additive()
    dmuon.dedicate_params(model, make_mesh("(4)"))
    optimizer = dmuon.Muon(model)
    group = optimizer.param_groups[0]
    original = group["params"][0]
    group["params"][0] = torch.nn.Parameter(torch.zeros(8, 6))
    model.layers[0].up_proj.weight = group["params"][0]
    checks.refused("a matrix of Muon", "was replaced or exchanged", optimizer.step)
    model.layers[0].up_proj.weight = original
    group["params"].append(torch.nn.Parameter(torch.zeros(3, 3)))
    checks.refused("another number", "was replaced or exchanged", optimizer.state_dict)
    del group["params"][-1]
    optimizer.step()
    checks.true("found again", group["params"][0] is original)
    return checks.bad


def test_other_changes_of_parameters_are_refused():
    assert run_ranks(4, not_followed) == [[]] * 4


def from_parameters(rank, when):
    """Without the model, which it could look through: groups that were made before or after."""
    mesh, model = make_mesh("(2)"), Additive()
    dmuon.dedicate_params(model, mesh)
    if when == "after":
        fully_shard(model, mesh=mesh)
    matrices = [p for p in model.parameters() if isinstance(p, dmuon.OwnedTensor)]
    others = [p for p in model.parameters() if not isinstance(p, dmuon.OwnedTensor)]
    groups = [{"params": others, "algorithm": "adamw"}, {"params": matrices}]
    optimizer = dmuon.Muon(groups)
    if when == "before":
        fully_shard(model, mesh=mesh)
    before = everything(model, optimizer) if when == "after" else {}
    try:
        train(model, optimizer, range(1), rank, 2)
    except RuntimeError as error:
        return str(error)
    return different(everything(model, optimizer), before)


def test_an_optimizer_that_could_not_follow_its_parameters_says_so():
    for message in run_ranks(2, from_parameters, "before"):
        assert "'table.weight' was replaced" in message and "the order is" in message
    for changed in run_ranks(2, from_parameters, "after"):
        assert {"table.weight", "layers.0.up_proj.weight"} <= set(changed)


def converted(rank):
    """``p.data = p.data.to(dtype)`` between optimizer and ``fully_shard``, as in Accelerate."""
    checks = Checks(rank)
    torch.manual_seed(0)
    mesh, model = make_mesh("(2)"), Additive().bfloat16()
    dmuon.dedicate_params(model, mesh)
    optimizer = dmuon.Muon(model, lr=0.02, weight_decay=0.1, adamw_lr=3e-3)
    for p in model.parameters():
        p.data = p.data.to(torch.float32)
    fully_shard(model, mesh=mesh)
    train(model, optimizer, range(3), rank, 2)
    found = everything(model, optimizer)

    torch.manual_seed(0)
    model, _ = distribute(Additive().bfloat16().float(), "(2)")
    optimizer = dmuon.Muon(model, lr=0.02, weight_decay=0.1, adamw_lr=3e-3)
    train(model, optimizer, range(3), rank, 2)
    expected = everything(model, optimizer)
    checks.true("fp32", different({n: found[n] for n in expected}, expected) == [])

    weight = model.layers[0].up_proj.weight
    weight.data = weight.data * 2
    name = "layers.0.up_proj.weight"
    checks.equal("scaled", full(weight), 2 * expected[name])
    y = batch(0, 0, 1, 1)[0] @ full(weight).T + full(model.layers[0].up_proj.bias)
    checks.true("scaled for all", torch.allclose(outputs(model)[:, :8], y, rtol=1e-6))
    for value in (torch.zeros(8, 6), distribute_tensor(torch.zeros(8, 6), mesh)):
        checks.refused("no owner", "copy_", lambda v=value: setattr(weight, "data", v))
    return checks.bad


def test_what_is_given_to_data_is_in_force():
    assert run_ranks(2, converted) == [[]] * 2


def lost_or_shared(rank):
    checks = Checks(rank)
    model, mesh = Additive(), make_mesh("(2)")
    dmuon.dedicate_params(model, mesh)
    words = "cpu_ram_efficient_loading"
    checks.refused("lost on the meta device", words, lambda: model.to("meta"))
    with torch.device("meta"):
        model = Additive()
    dmuon.dedicate_params(model, mesh)
    model.to("meta")  # nothing is lost
    model, _ = distribute(Additive(), "ddp 2")
    for part in (model.module, model.module.layers[0]):
        words = "copy it before dedicate_params"
        checks.refused("copied", words, lambda p=part: copy.deepcopy(p))
    return checks.bad


def test_what_would_lose_or_share_dedicated_parameters_is_refused():
    assert run_ranks(2, lost_or_shared) == [[]] * 2


def looks(rank, rows):
    """How often the optimizer goes through its model while its state is saved and loaded."""
    model, _ = distribute(Additive(rows=rows), "(2)")
    optimizer = dmuon.Muon(model)
    count = 0
    parameters_now = dmuon._following.parameters_now

    def counting(*args):
        nonlocal count
        count += 1
        return parameters_now(*args)

    dmuon._following.parameters_now = counting
    part = OptimizerPart(model, optimizer)
    part.load_state_dict(part.state_dict())
    return count


def test_saving_and_loading_do_not_go_through_the_model_for_every_parameter():
    few = run_ranks(2, looks, (8,) * 2)
    assert run_ranks(2, looks, (8,) * 20) == few
