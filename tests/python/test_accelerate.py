"""Hugging Face Accelerate, by its own calls: the same bits as without it, and its checkpoints."""

from __future__ import annotations

from contextlib import nullcontext

import huggingface  # first: it sets the environment
import pytest
import torch
from checkpoint_model import Additive, backward, batch, different, everything
from models import full, make_mesh
from ranks import run_ranks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dmuon

accelerate = pytest.importorskip("accelerate")

MICRO = 2  # micro-batches in a step
STEPS = 4
HIGH = 1e6  # norms may differ in the last bit: none is clipped, so that weights may not
COLUMNS = 8 + 5 + 14 + 14 + 14  # of the model's output


def accelerator_for(layout, kind):
    """An Accelerator, and the mesh over its ranks."""
    if layout == "ddp":
        return accelerate.Accelerator(cpu=True, gradient_accumulation_steps=MICRO), make_mesh(
            layout
        )
    accelerate.PartialState(cpu=True)
    huggingface.pretend_accelerators()
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type=kind, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
    )  # fmt: skip
    mesh = make_mesh(layout)
    parallel = None
    if layout == "(2,2)":
        parallel = accelerate.ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    accelerator = accelerate.Accelerator(
        gradient_accumulation_steps=MICRO, fsdp_plugin=plugin, parallelism_config=parallel
    )
    if parallel is not None:
        mesh = accelerator.torch_device_mesh[tuple(parallel.fsdp_dim_names)]
    return accelerator, mesh


def prepared(rank, layout, seed, kind="SHARDED_STATE_DICT"):
    huggingface.launched(rank, 4)
    accelerator, mesh = accelerator_for(layout, kind)
    torch.manual_seed(seed)
    model = Additive()
    dedicate = dmuon.dedicate_params_ddp if layout == "ddp" else dmuon.dedicate_params
    dedicate(model, mesh)
    optimizer = dmuon.Muon(model, lr=0.02, weight_decay=0.1, adamw_lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    return accelerator, *accelerator.prepare(model, optimizer, schedule)


def train(accelerator, model, optimizer, schedule, steps, rank):
    """The norm of the gradients and the learning rates of every step."""
    seen = []
    for step in steps:
        for micro in range(MICRO):
            with accelerator.accumulate(model):
                x, t = batch(MICRO * step + micro, rank, 4, COLUMNS)
                accelerator.backward(4 * MICRO * (model(x) * t).sum())
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), HIGH)
                    seen.append((full(norm).item(), [g["lr"] for g in optimizer.param_groups]))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    return seen


def plain(rank, layout, rates):
    """The same without Accelerate."""
    torch.manual_seed(0)
    model = Additive()
    mesh = make_mesh(layout)
    called = model
    if layout == "ddp":
        dmuon.dedicate_params_ddp(model, mesh)
        called = DistributedDataParallel(model)
    else:
        dmuon.dedicate_params(model, mesh)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(model, lr=0.02, weight_decay=0.1, adamw_lr=3e-3)
    norms = []
    for step in range(STEPS):
        for group, rate in zip(optimizer.param_groups, rates[step]):
            group["lr"] = rate
        for micro in range(MICRO):
            with dmuon.no_sync(called) if micro < MICRO - 1 else nullcontext():
                backward(called, MICRO * step + micro, rank, 4)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), HIGH)
        norms.append(full(norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, everything(model, optimizer)


def train_and_save(rank, layout, kind, folder):
    accelerator, model, optimizer, schedule = prepared(rank, layout, 0, kind)
    if layout == "ddp":  # on all ranks, before rank 0 saves alone
        accelerator.register_save_state_pre_hook(
            lambda models, weights, folder: optimizer.optimizer.consolidate_state_dict()
        )
    inner = accelerator.unwrap_model(model)
    seen = train(accelerator, model, optimizer, schedule, range(2), rank)
    accelerator.save_state(folder, safe_serialization=False)  # which refuses tied weights
    seen += train(accelerator, model, optimizer, schedule, range(2, STEPS), rank)
    return seen, everything(inner, optimizer.optimizer)


def load_and_train(rank, layout, kind, folder):
    accelerator, model, optimizer, schedule = prepared(rank, layout, 1, kind)
    accelerator.load_state(folder)
    seen = train(accelerator, model, optimizer, schedule, range(2, STEPS), rank)
    return seen, everything(accelerator.unwrap_model(model), optimizer.optimizer)


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("(4)", "SHARDED_STATE_DICT"),
        ("(2,2)", "SHARDED_STATE_DICT"),
        ("(4)", "FULL_STATE_DICT"),
        ("ddp", ""),
    ],
)
def test_accelerate_trains_saves_and_resumes_bit_for_bit(layout, kind, tmp_path):
    folder = str(tmp_path / "state")
    trained = run_ranks(4, train_and_save, layout, kind, folder)
    resumed = run_ranks(4, load_and_train, layout, kind, folder)
    seen = trained[0][0]
    rates = [rate for _, rate in seen]
    assert len({rate[0] for rate in rates}) == STEPS  # the schedule is in force
    for (norms, expected), (with_it, state), (after, loaded) in zip(
        run_ranks(4, plain, layout, rates), trained, resumed
    ):
        assert with_it == seen and after == seen[2:]
        assert [norm for norm, _ in seen] == pytest.approx(norms, rel=1e-6)
        assert different(state, expected) == []
        assert different(loaded, expected) == []
