"""Trains a small Llama on Shakespeare's plays with Muon on sharded data parallelism.

    bash examples/run.sh                            4 processes, mesh 2x2 (HSDP)
    bash examples/run.sh --mode fsdp --no-reshard   one mesh dimension, weights kept till backward
    bash examples/run.sh --compare --plot loss.png  the same run with AdamW, both curves
    bash examples/run.sh --save-every 50 --resume   checkpoints, and on from the newest one

`python examples/train_llama.py` alone trains in one process. On machines with GPUs each rank takes
the GPU of its local rank.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from checkpoint import Checkpoints
from llama import Llama, LlamaConfig, is_projection
from report import Curve, Progress, heading, memory_mb, plot
from text import Text, printable
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import dmuon


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    p = argparse.ArgumentParser(
        description="Train a small Llama on real text with Muon and sharded data parallelism.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--data", metavar="FILE", help="a UTF-8 text (default: Shakespeare's plays)")
    p.add_argument("--mode", choices=("ddp", "fsdp", "hsdp"), default="hsdp")
    p.add_argument("--mesh", metavar="RxG", help="replicas x shards, for hsdp (default: 2x2 of 4)")
    p.add_argument(
        "--reshard",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="free weights after forward (Z3); --no-reshard keeps them till after backward (Z2)",
    )
    p.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    p.add_argument("--compare", action="store_true", help="train with both, one after the other")
    p.add_argument("--steps", type=int, default=240)
    p.add_argument("--rows", type=int, default=4, help="sequences per rank and step")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--lr", type=float, default=0.02, help="Muon's, for the matrices")
    p.add_argument("--muon-adamw-lr", type=float, default=3e-3, help="AdamW's, beside Muon")
    p.add_argument("--adamw-lr", type=float, default=1.5e-3, help="AdamW's, of --optimizer adamw")
    p.add_argument("--weight-decay", type=float, default=0.0)
    p.add_argument("--warmup", type=int, default=20, help="steps")
    p.add_argument("--clip", type=float, default=1.0, help="largest gradient norm")
    p.add_argument("--eval-every", type=int, default=100, metavar="STEPS")
    p.add_argument("--save-every", type=int, default=0, metavar="STEPS", help="0: no checkpoints")
    p.add_argument("--checkpoints", default="checkpoints", metavar="DIR", help="where they are")
    p.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint in DIR, if there is one, on any number of processes",
    )
    p.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="fail when another rank has been silent for so long; without it, after torch's 30 min",
    )
    p.add_argument("--sample", type=int, default=200, metavar="BYTES", help="0: no sample")
    p.add_argument("--plot", metavar="FILE.png", help="draw the loss curves")
    p.add_argument("--tensorboard", metavar="DIR", help="write event files")
    options = p.parse_args(arguments)
    if options.mesh and options.mode != "hsdp":
        p.error(f"--mesh is for --mode hsdp; {options.mode} puts all ranks into one dimension")
    if min(options.steps, options.rows, options.eval_every) < 1:
        p.error("--steps, --rows and --eval-every must be at least 1")
    if options.timeout is not None and options.timeout <= 0:
        p.error(f"--timeout must be more than 0, not {options.timeout}")
    if options.save_every < 0:
        p.error(f"--save-every must be at least 0, not {options.save_every}")
    for option, package in (("plot", "matplotlib"), ("tensorboard", "tensorboard")):
        if getattr(options, option) and importlib.util.find_spec(package) is None:
            p.error(f"--{option} needs a package: pip install {package}")
    return options


def start(options: argparse.Namespace) -> torch.device:
    """Join the process group that torchrun describes, or make one of this process alone."""
    if "RANK" in os.environ:
        timeout = timedelta(seconds=options.timeout) if options.timeout else None
        dist.init_process_group("dmuon", timeout=timeout)
    else:
        dist.init_process_group("dmuon", store=dist.HashStore(), rank=0, world_size=1)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def make_mesh(options: argparse.Namespace, device: torch.device) -> DeviceMesh:
    """Return the (replicate, shard) mesh of hsdp, or the one-dimensional mesh of fsdp and ddp."""
    world = dist.get_world_size()
    if options.mode == "fsdp":
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    if options.mode == "ddp":
        return init_device_mesh(device.type, (world,), mesh_dim_names=("replicate",))
    default = f"2x{world // 2}" if world % 2 == 0 else f"1x{world}"
    text = options.mesh or default
    try:
        replicas, shards = (int(part) for part in text.lower().split("x"))
    except ValueError:
        sys.exit(f"--mesh {text}: write it as RxG, for example 2x2")
    if replicas * shards != world:
        sys.exit(f"--mesh {text} has {replicas * shards} ranks, but {world} are running")
    return init_device_mesh(device.type, (replicas, shards), mesh_dim_names=("replicate", "shard"))


class Trainer:
    """One model with its optimizer, on one mesh."""

    def __init__(
        self, options: argparse.Namespace, kind: str, mesh: DeviceMesh, device: torch.device
    ) -> None:
        self.options, self.kind, self.device = options, kind, device
        self.plan: object = None
        torch.manual_seed(options.seed)  # the same first weights on every rank
        self.llama = Llama(LlamaConfig()).to(device)
        self.model: nn.Module = self.llama  # what is called: DDP wraps it
        self.context = self.llama.config.context
        self.parallelize(mesh)
        self.optimizer = self.make_optimizer()
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.lr_factor)

    def parallelize(self, mesh: DeviceMesh) -> None:
        """Distribute the model. For AdamW this is torch's own recipe, without dmuon."""
        options, model = self.options, self.llama
        if options.mode == "ddp":
            if self.kind == "muon":
                self.plan = dmuon.dedicate_params_ddp(model, mesh, predicate=is_projection)
            self.model = DistributedDataParallel(model)
            return
        reshard = options.reshard
        if self.kind == "muon":
            self.plan = dmuon.dedicate_params(
                model, mesh, predicate=is_projection, reshard_after_forward=reshard
            )
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Muon for the matrices with AdamW beside it, or AdamW for all."""
        options = self.options
        betas = (0.9, 0.95)
        if self.kind == "adamw":
            return torch.optim.AdamW(
                self.model.parameters(), options.adamw_lr, betas, weight_decay=options.weight_decay
            )
        return dmuon.Muon(
            self.llama,
            lr=options.lr,
            weight_decay=options.weight_decay,
            adamw_lr=options.muon_adamw_lr,
            adamw_betas=betas,
        )

    def lr_factor(self, step: int) -> float:
        """Rise to 1 during warm-up, then fall in a line to 0 at the end."""
        options = self.options
        if step < options.warmup:
            return (step + 1) / options.warmup
        return max(0.0, (options.steps - step) / max(1, options.steps - options.warmup))

    def train_step(self, inputs: Tensor, targets: Tensor) -> tuple[float, dict[str, float]]:
        """Take one step; return the loss, averaged over the ranks, and what to log."""
        loss = self.loss(inputs, targets)
        loss.backward()
        norm = whole(nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip))
        lr = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return mean_over_ranks(loss.detach()), {"lr": float(lr), "gradient_norm": norm.item()}

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy, in nats per byte."""
        logits = self.model(inputs.to(self.device))
        return F.cross_entropy(logits.flatten(0, 1), targets.to(self.device).flatten())

    @torch.no_grad()
    def validate(self, text: Text) -> float:
        """Return the loss on text that training never sees; every rank takes its own part."""
        world, rank = dist.get_world_size(), dist.get_rank()
        self.model.eval()
        parts = text.validation_batches(8, self.context, 4 * world)[rank::world]
        losses = torch.stack([self.loss(*part) for part in parts])
        self.model.train()
        return mean_over_ranks(losses.mean())

    @torch.no_grad()
    def sample(self, prompt: bytes, length: int, temperature: float = 0.7) -> str:
        """Continue the prompt. All ranks run it together, as the weights are spread over them."""
        generator = torch.Generator().manual_seed(self.options.seed)
        tokens = list(prompt)
        self.model.eval()
        for _ in range(length):
            window = torch.tensor([tokens[-self.context :]], device=self.device)
            logits = self.model(window)[0, -1].float().cpu()
            chosen = torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)
            tokens.append(int(chosen))
        self.model.train()
        return printable(tokens)


def whole(value: Tensor) -> Tensor:
    """Return a distributed tensor's value, or the plain tensor itself."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def mean_over_ranks(value: Tensor) -> float:
    """Average a scalar over all ranks."""
    value = value.clone()
    dist.all_reduce(value, op=dist.ReduceOp.AVG)
    return value.item()


def run(trainer: Trainer, text: Text) -> Curve:
    """Train, validate, and show the way."""
    options = trainer.options
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(options.seed * 100_003 + rank)  # other data per rank
    checkpoints = Checkpoints(Path(options.checkpoints) / trainer.kind)
    curve = resume(trainer, checkpoints, generator)
    progress = Progress(curve, options.steps, rank == 0, options.tensorboard)
    for step in range(len(curve.losses) + 1, options.steps + 1):
        batch = text.batch(options.rows, trainer.context, generator)
        loss, scalars = trainer.train_step(*batch)
        tokens = options.rows * trainer.context * world
        progress.step(loss, tokens, scalars, memory_mb(trainer.device))
        if step % options.eval_every == 0 or step == options.steps:
            progress.validation(trainer.validate(text))
        if options.save_every and (step % options.save_every == 0 or step == options.steps):
            others = {"schedule": trainer.schedule.state_dict(), "curve": curve.to_json()}
            checkpoints.save(step, trainer.model, trainer.optimizer, others, {"data": generator})
    progress.close()
    return curve


def resume(trainer: Trainer, checkpoints: Checkpoints, generator: torch.Generator) -> Curve:
    """Load the newest checkpoint, if asked for; return the run's history up to there."""
    options = trainer.options
    saved = checkpoints.saved()
    if saved and options.save_every and not options.resume:
        sys.exit(
            f"{checkpoints.folder} holds checkpoints of an earlier run up to step {saved[-1]}: "
            "--resume goes on from there, --checkpoints DIR takes another folder"
        )
    if not saved or not options.resume:
        return Curve(trainer.kind)
    others = checkpoints.load(
        saved[-1],
        trainer.model,
        trainer.optimizer,
        {"schedule": trainer.schedule.state_dict(), "curve": ""},
        {"data": generator},
    )
    trainer.schedule.load_state_dict(others["schedule"])
    if dist.get_rank() == 0:
        print(f"{trainer.kind}: on from step {saved[-1]}", flush=True)
    return Curve.from_json(others["curve"])


def show_result(trainer: Trainer, curve: Curve) -> None:
    """Print what the run has come to; every rank calls it, rank 0 prints."""
    options = trainer.options
    prompt = b"\nKING "
    sample = trainer.sample(prompt, options.sample) if options.sample else ""
    if dist.get_rank() != 0:
        return
    heading(f"{curve.label}: {len(curve.losses)} steps in {curve.seconds:.0f} s")
    print(f"validation loss {curve.validation[-1][1]:.4f} nats per byte")
    if sample:
        heading("a sample")
        print(sample.strip())
    if trainer.plan is not None:
        heading("who owns what")
        print(str(trainer.plan).rstrip())
        heading("dmuon.stats(model), rank 0")
        print(dmuon.stats(trainer.llama))


def main() -> None:
    """Train once, or twice to compare."""
    options = parse()
    # A norm over a 2-D mesh takes two all-reduces of one number; torch remarks on it at every step.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    device = start(options)
    text = Text.load(options.data)
    mesh = make_mesh(options, device)
    if dist.get_rank() == 0:
        shape = "x".join(str(size) for size in mesh.shape)
        parameters = sum(p.numel() for p in Llama(LlamaConfig()).parameters())
        print(
            f"{parameters:,} parameters, {len(text.train):,} bytes of text, mode {options.mode}, "
            f"mesh {shape} on {device.type}, {dist.get_world_size()} processes",
            flush=True,
        )
    kinds = ["muon", "adamw"] if options.compare else [options.optimizer]
    curves = []
    for kind in kinds:
        trainer = Trainer(options, kind, mesh, device)
        curves.append(run(trainer, text))
        show_result(trainer, curves[-1])
    if dist.get_rank() == 0:
        if options.compare:
            heading("validation loss")
            for curve in curves:
                print(f"{curve.label:8} {curve.validation[-1][1]:.4f}  in {curve.seconds:.0f} s")
        if options.plot:
            plot(curves, options.plot)
            print(f"\nloss curves: {options.plot}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
