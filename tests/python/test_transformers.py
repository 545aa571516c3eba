"""Real models: three steps of classes of transformers, sharded, equal one process's in fp64.

With gradient checkpointing as their users switch it on, and without.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import torch.nn as nn
from block_reference import Reference
from models import full, make_mesh
from ranks import run_ranks
from reference import relative
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

import dmuon

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

STEPS, LR, ADAMW_LR = 3, 0.005, 1e-3
# Some gradients are zero but for rounding (a bias of keys): AdamW must not make steps of that.
EPS = 1e-4
IMAGE = 31  # the token that stands for a patch

TEXT = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 16,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GROUPED = {**TEXT, "num_key_value_heads": 2}


def vision_language():
    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 8, "patch_size": 4,
    }  # fmt: skip
    return transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision),
        text_config=transformers.LlamaConfig(**GROUPED),
        image_token_index=IMAGE,
    )


def gpt2():
    return transformers.GPT2Config(
        vocab_size=32, n_embd=16, n_layer=2, n_head=4, n_positions=16,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip


MODELS = {
    "llama": ("LlamaForCausalLM", lambda: transformers.LlamaConfig(**GROUPED)),
    "llama, tied": (
        "LlamaForCausalLM",
        lambda: transformers.LlamaConfig(**GROUPED, tie_word_embeddings=True),
    ),
    "qwen2": ("Qwen2ForCausalLM", lambda: transformers.Qwen2Config(**GROUPED)),
    "mistral": (
        "MistralForCausalLM",
        lambda: transformers.MistralConfig(**GROUPED, sliding_window=4),
    ),
    "phi3": ("Phi3ForCausalLM", lambda: transformers.Phi3Config(**GROUPED)),
    "gpt2": ("GPT2LMHeadModel", gpt2),
    "bert": (
        "BertForMaskedLM",
        lambda: transformers.BertConfig(
            **TEXT, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        ),
    ),
    "mixtral": (
        "MixtralForCausalLM",
        lambda: transformers.MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2),
    ),
    "llava": ("LlavaForConditionalGeneration", vision_language),
}
CHECKPOINTING = [None, False, True]  # none, and use_reentrant


def build(name):
    kind, config = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config())
    with torch.no_grad():  # no matrix that starts at zero, no bias that all have in common
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape))
    return model.train()


def options(name):
    """What ``dedicate_params`` is told beside the mesh."""
    if name == "mixtral":  # stacks of experts too, whose parameters are no module's "weight"
        return {"predicate": lambda n, p: "experts" in n or "self_attn" in n}
    if name == "phi3":
        return {
            "blocks": {
                "*.qkv_proj.weight": dmuon.Blocks(0, [16, 8, 8]),
                "*.gate_up_proj.weight": dmuon.Blocks(0, [24, 24]),
            }
        }
    return {}


def batch(name, step, rank, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(3, 31, (2, 7), generator=generator)
    given = {}
    if name == "llava":
        ids[:, 1:5] = IMAGE
        given["pixel_values"] = torch.randn(2, 3, 8, 8, generator=generator).to(dtype)
    return {"input_ids": ids, "labels": ids, **given}


def layers_of(model):
    """(name, module) of what is in a list of layers."""
    return [
        (f"{name}.{i}", layer)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        for i, layer in enumerate(module)
    ]


def train(name, rank, reentrant):
    model = build(name)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    mesh = make_mesh("(2,2)")
    names = [layer for layer, _ in layers_of(model)]
    dmuon.dedicate_params(model, mesh, **options(name))
    for _, layer in layers_of(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(model, lr=LR, adamw_lr=ADAMW_LR, adamw_eps=EPS, weight_decay=0.1)
    runs = []  # of a linear map in the last layer: twice a step if its forward is computed again
    linear = next(
        m for m in layers_of(model)[-1][1].modules() if hasattr(m, "weight") and m.weight.ndim == 2
    )
    linear.register_forward_pre_hook(lambda *_: runs.append(1))
    history = []
    for step in range(STEPS):
        model(**batch(name, step, rank)).loss.backward()
        gradients = {n: p.grad if p.grad is None else full(p.grad) for n, p in parameters(model)}
        optimizer.step()
        optimizer.zero_grad()
        history.append((gradients, {n: full(p.detach()) for n, p in parameters(model)}))
    units = {unit.name for unit in dmuon.stats(model).units}
    dedicated = [n for n, p in parameters(model) if isinstance(p, dmuon.OwnedTensor)]
    assert len(runs) == STEPS * (1 if reentrant is None else 2)
    return history, units == set(names), dedicated


def parameters(model):
    return list(model.named_parameters())


def all_modes(rank, name):
    return [train(name, rank, reentrant) for reentrant in CHECKPOINTING]


def reference(name, dedicated):
    """In fp64, by the formulas, on the mean of the ranks' losses."""
    model = build(name).double()
    if name == "mixtral":
        model.set_experts_implementation("eager")  # the other ones know no fp64
    blocks = {"qkv_proj": (0, [16, 8, 8]), "gate_up_proj": (0, [24, 24])} if name == "phi3" else {}
    muon = {
        n: Reference(p, lr=LR, wd=0.1, blocks=next((b for k, b in blocks.items() if k in n), None))
        for n, p in parameters(model)
        if n in dedicated
    }
    adamw = torch.optim.AdamW(
        [p for n, p in parameters(model) if n not in muon],
        lr=ADAMW_LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0,
    )  # fmt: skip
    history = []
    for step in range(STEPS):
        for rank in range(4):
            (model(**batch(name, step, rank, torch.float64)).loss / 4).backward()
        gradients = {n: p.grad for n, p in parameters(model)}
        adamw.step()
        with torch.no_grad():
            for n, p in parameters(model):
                if n in muon and p.grad is not None:  # llava leaves out a layer of its tower
                    muon[n].step(p.grad)
                    p.copy_(muon[n].w)
        history.append((gradients, {n: p.detach().clone() for n, p in parameters(model)}))
        model.zero_grad()
    return history


@pytest.mark.parametrize("name", MODELS)
def test_three_steps_are_those_of_one_process(name):
    runs = run_ranks(4, all_modes, name)
    dedicated = runs[0][0][2]
    expected = reference(name, dedicated)
    assert len(dedicated) >= 4 * 2 and not any("embed" in n or "lm_head" in n for n in dedicated)
    for run in runs:
        for reentrant, (history, by_layer, _) in zip(CHECKPOINTING, run):
            assert by_layer
            for step, (got, wanted) in enumerate(zip(history, expected)):
                for n, gradient in wanted[0].items():
                    where = (reentrant, step, n)
                    if gradient is None:
                        assert got[0][n] is None, where
                    else:
                        assert (got[0][n] - gradient).abs().max() <= 1e-6, where
                    assert relative(got[1][n], wanted[1][n]) <= 1e-5, where


def use_after_training(rank, folder):
    """Generation with and without ``full_params``, and what ``save_pretrained`` writes."""
    model, mesh = build("llama"), make_mesh("(2,2)")
    dmuon.dedicate_params(model, mesh)
    for _, layer in layers_of(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(model, lr=LR)
    model(**batch("llama", 0, rank)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        build("llama").save_pretrained(folder, state_dict=whole)
    torch.distributed.barrier()
    plain = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    model.eval()
    ids = batch("llama", 1, 0)["input_ids"]
    how = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    expected = plain.generate(ids, **how)
    outside = model.generate(ids, **how)
    with dmuon.full_params(model):
        inside = model.generate(ids, **how)
    assert expected.shape == (2, 12)
    return torch.equal(outside, expected), torch.equal(inside, expected)


def test_a_trained_model_generates_as_what_save_pretrained_wrote_of_it(tmp_path):
    assert run_ranks(4, use_after_training, str(tmp_path)) == [(True, True)] * 4
