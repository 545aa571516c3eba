"""transformers' Trainer with dmuon, under DDP or, on GPUs, FSDP2.

torchrun --standalone --nproc-per-node 4 examples/trainer.py [--fsdp] [--resume]

Needs ``pip install transformers accelerate``.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from text import Text
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import dmuon


class MuonTrainer(Trainer):
    """Under FSDP2 it is enough to give another optimizer. Under DDP Trainer lets rank 0 save
    alone what lies on all ranks."""

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            self.optimizer = dmuon.Muon(model or self.model, lr=self.args.learning_rate)
        return self.optimizer

    def save_model(self, output_dir=None, _internal_call=False):
        if self.is_fsdp_enabled:
            super().save_model(output_dir, _internal_call)
        else:
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            weights = get_model_state_dict(self.model, options=options)
            self._save(output_dir or self.args.output_dir, state_dict=weights)

    def _save_optimizer_and_scheduler(self, output_dir):
        if not self.is_fsdp_enabled:
            self.optimizer.optimizer.consolidate_state_dict()
        super()._save_optimizer_and_scheduler(output_dir)


class Excerpts(torch.utils.data.Dataset):
    """Pieces of a text, one byte a token."""

    def __init__(self, text: Text, length: int) -> None:
        self.bytes, self.length = text.train, length

    def __len__(self) -> int:
        return len(self.bytes) // self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.bytes[index * self.length : (index + 1) * self.length].long()
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    """Train a small Llama on the text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 (needs GPUs) instead of DDP")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", default="trainer-output")
    options = parser.parse_args()

    dist.init_process_group("dmuon")  # before TrainingArguments, which takes what is there
    sharding = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    args = TrainingArguments(
        options.output, max_steps=options.steps, save_steps=max(options.steps // 2, 1),
        per_device_train_batch_size=4, learning_rate=0.01, logging_steps=5, report_to=[],
        use_cpu=not torch.cuda.is_available(), ddp_find_unused_parameters=False,
        fsdp=options.fsdp or None, fsdp_config=sharding if options.fsdp else None,
    )  # fmt: skip
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=128,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(args.device)
    if options.fsdp:  # accelerate's own mesh is over all ranks, too
        mesh = init_device_mesh(args.device.type, (dist.get_world_size(),))
        dmuon.dedicate_params(model, mesh)
    else:
        dmuon.dedicate_params_ddp(model)
    trainer = MuonTrainer(model, args, train_dataset=Excerpts(Text.load(None), 128))
    trainer.train(resume_from_checkpoint=options.resume)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
