"""What a monkey-patch would replace: every function of the parts of torch that dmuon works with."""

from __future__ import annotations

import importlib


def torch_functions():
    """Code objects of everything in FSDP2, DTensor and nn.Module that a patch would replace."""
    found = {}
    for name in (
        "torch.distributed.fsdp._fully_shard._fully_shard",
        "torch.distributed.fsdp._fully_shard._fsdp_init",
        "torch.distributed.fsdp._fully_shard._fsdp_param",
        "torch.distributed.fsdp._fully_shard._fsdp_param_group",
        "torch.distributed.fsdp._fully_shard._fsdp_state",
        "torch.distributed.tensor._api",
        "torch.nn.modules.module",
        "torch.nn.parallel.distributed",
        "torch.nn.utils.clip_grad",
        "torch.optim.optimizer",
        "torch.distributed.distributed_c10d",
    ):
        module = importlib.import_module(name)
        for key, value in vars(module).items():
            if isinstance(value, type):
                for attribute, member in vars(value).items():
                    if callable(member) or isinstance(
                        member, (property, classmethod, staticmethod)
                    ):
                        found[name, key, attribute] = id(member)
            elif callable(value):
                found[name, key] = id(value)
    return found
