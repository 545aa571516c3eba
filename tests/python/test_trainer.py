"""transformers' Trainer, as in ``examples/trainer.py``: its steps are those of one process in fp64,
and a run that is resumed from Trainer's own checkpoint ends like one that was not stopped."""

from __future__ import annotations

import sys
from pathlib import Path

import huggingface  # first: it sets the environment
import pytest
import torch
from block_reference import Reference
from checkpoint_model import different, everything
from models import make_mesh
from ranks import run_ranks
from reference import relative

import dmuon

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from trainer import MuonTrainer

RANKS, STEPS, MICRO, ROWS = 4, 4, 2, 2
LR, CLIP = 0.005, 0.5
CONFIG = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 80

    def __getitem__(self, index):
        ids = torch.randint(3, 31, (7,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


class Recording(MuonTrainer):
    """Notes which sentences a rank trains on."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []

    def training_step(self, model, inputs, *args, **kwargs):
        self.seen.append(inputs["input_ids"].clone())
        return super().training_step(model, inputs, *args, **kwargs)


def build(seed):
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))


def train(rank, mode, folder, seed, resume):
    huggingface.launched(rank, RANKS)
    sharding = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    sharding["state_dict_type"] = "SHARDED_STATE_DICT" if mode == "sharded" else "FULL_STATE_DICT"
    args = transformers.TrainingArguments(
        folder, max_steps=STEPS, save_steps=2, eval_steps=2, eval_strategy="steps", use_cpu=True,
        per_device_train_batch_size=ROWS, gradient_accumulation_steps=MICRO, learning_rate=LR,
        lr_scheduler_type="linear", max_grad_norm=CLIP, logging_steps=1, report_to=[],
        disable_tqdm=True, ddp_find_unused_parameters=False,
        fsdp=None if mode == "ddp" else True, fsdp_config=None if mode == "ddp" else sharding,
    )  # fmt: skip
    model = build(seed)
    if mode == "ddp":
        dmuon.dedicate_params_ddp(model)
    else:
        huggingface.pretend_accelerators()
        dmuon.dedicate_params(model, make_mesh("(4)"))
    trainer = Recording(model, args, train_dataset=Sentences(), eval_dataset=Sentences())
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resume else None)
    logs = trainer.state.log_history
    losses = [[entry[key] for entry in logs if key in entry] for key in ("loss", "eval_loss")]
    optimizer = trainer.optimizer.optimizer
    inner = trainer.accelerator.unwrap_model(trainer.model)
    return trainer.seen, losses, everything(inner, optimizer)


def reference(seen):
    """Weights after every step, in fp64, on all that the ranks have seen."""
    model = build(0).double()
    named = dict(model.named_parameters())
    muon = {n: Reference(p, lr=LR) for n, p in named.items() if "_proj" in n}
    adamw = torch.optim.AdamW(
        [p for n, p in named.items() if n not in muon],
        lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0,
    )  # fmt: skip
    losses = []
    for step in range(STEPS):
        batches = [b for rank in seen for b in rank[MICRO * step : MICRO * (step + 1)]]
        mean = sum(model(input_ids=b, labels=b).loss for b in batches) / len(batches)
        mean.backward()
        losses.append(mean.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        left = 1 - step / STEPS
        adamw.param_groups[0]["lr"] = 1e-3 * left
        adamw.step()
        with torch.no_grad():
            for name, matrix in muon.items():
                matrix.lr = LR * left
                matrix.step(named[name].grad)
                named[name].copy_(matrix.w)
        model.zero_grad()
    return losses, {n: p.detach() for n, p in named.items()}


@pytest.mark.parametrize("mode", ["ddp", "sharded", "full"])
def test_trainer_trains_saves_and_resumes(mode, tmp_path):
    runs = run_ranks(RANKS, train, mode, str(tmp_path), 0, False, limit=120.0)
    seen = [run[0] for run in runs]
    assert all(len(rank) == STEPS * MICRO for rank in seen)
    sentences = {tuple(row) for rank in seen for b in rank for row in b.tolist()}
    assert len(sentences) == RANKS * ROWS * MICRO * STEPS  # every rank has its own
    losses, weights = reference(seen)
    for _, (found, _), state in runs:
        assert found == pytest.approx(losses, rel=1e-5)
        for name, weight in weights.items():
            assert relative(state[name], weight) <= 1e-5, name

    resumed = run_ranks(RANKS, train, mode, str(tmp_path), 1, True, limit=120.0)
    for (_, logged, state), (rest, relogged, other) in zip(runs, resumed):
        assert len(rest) == (STEPS - 2) * MICRO
        assert relogged == logged  # the first steps' are in the checkpoint
        if mode == "ddp":
            # DDP lays out its buckets anew after a run's first step, and Gloo's order of summands
            # depends on the place in them: the last bits of what DDP reduces are not the same.
            for name in state:
                assert relative(other[name], state[name].double()) <= 1e-6, name
        else:
            assert different(other, state) == []
    if mode == "ddp":
        plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
        for name, weight in plain.state_dict().items():
            assert torch.equal(weight, resumed[0][2][name]), name  # which wrote it last
