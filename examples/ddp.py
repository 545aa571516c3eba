"""Muon under DistributedDataParallel: every rank holds the model, each matrix has one owner.

torchrun --standalone --nproc-per-node 4 examples/ddp.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import dmuon

dist.init_process_group("dmuon")
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())
mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("replicate",))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
model = model.to(device)
plan = dmuon.dedicate_params_ddp(model, mesh)
ddp = DistributedDataParallel(model)  # reduces the rest: here the biases
optimizer = dmuon.Muon(model, lr=0.02, adamw_lr=1e-3)

torch.manual_seed(dist.get_rank())  # other data on every rank
for step in range(20):
    x = torch.randn(128, 32, device=device)
    loss = (ddp(x) - x.sin().sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step} loss {loss.item():.4f}")

if dist.get_rank() == 0:
    print(plan)
dist.destroy_process_group()
