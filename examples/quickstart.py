"""The smallest whole program: Muon under torch's own fully_shard, on a 2-D mesh (HSDP).

torchrun --standalone --nproc-per-node 4 examples/quickstart.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from llama import Llama, LlamaConfig
from text import Text
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

import dmuon

dist.init_process_group("dmuon")
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())
R, G = 2, dist.get_world_size() // 2
mesh = init_device_mesh(device, (R, G), mesh_dim_names=("replicate", "shard"))

torch.manual_seed(0)
model = Llama(LlamaConfig()).to(device)
plan = dmuon.dedicate_params(model, mesh, predicate=lambda n, p: "proj" in n and p.ndim == 2)
for layer in model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = dmuon.Muon(model, lr=0.02, ns_steps=5, adamw_lr=1e-3)

text = Text.load(None)
generator = torch.Generator().manual_seed(dist.get_rank())
for step in range(20):
    inputs, targets = text.batch(rows=4, context=128, generator=generator)
    logits = model(inputs.to(device))
    loss = F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step} loss {loss.item():.4f}")

if dist.get_rank() == 0:
    print(plan)
dist.destroy_process_group()
