"""The options of ``dmuon.Muon``'s groups, as C++ takes them."""

from __future__ import annotations

from typing import Any

import torch

from . import _C

MOMENTUM_DTYPES = (None, torch.float32, torch.bfloat16)
NS_DTYPES = (None, torch.float16, torch.bfloat16, torch.float32, torch.float64)


def make_config(
    coefficients: Any, steps: int, mode: Any, dtype: torch.dtype | None
) -> _C.NewtonSchulzConfig:
    """The engine's configuration from the options of ``Muon`` and ``newton_schulz``."""
    if int(steps) != steps:
        raise ValueError(f"dmuon: ns_steps must be a whole number, got {steps!r}")
    if isinstance(coefficients, str) and isinstance(mode, str):
        config = _C.NewtonSchulzConfig(coefficients, int(steps), mode)
    else:
        if isinstance(coefficients, str):
            coefficients = _C.NewtonSchulzConfig(coefficients, int(steps), "exact").steps
        elif len(coefficients) != steps:
            raise ValueError(
                f"dmuon: ns_steps is {steps}, but {len(coefficients)} coefficient triples "
                "were given"
            )
        count = int(steps)
        named = {
            "fast": range(2, count, 3),
            "accurate": range(1, count, 2),
            "exact": range(1, count),
        }
        if isinstance(mode, str) and mode not in named:
            raise ValueError(
                f"dmuon: ns_mode must be one of {list(named)} or restarts, got {mode!r}"
            )
        restarts = list(named[mode] if isinstance(mode, str) else mode)
        config = _C.NewtonSchulzConfig(list(coefficients), restarts)
    if dtype is not None:
        config.dtype = dtype
    return config


def muon_hyper(group: dict[str, Any], configs: dict[Any, _C.NewtonSchulzConfig]) -> _C.MuonHyper:
    """A muon group's options for one update, checked; ``configs`` keeps what is costly to check."""
    for option in ("nesterov", "cautious"):
        if not isinstance(group[option], bool):
            raise ValueError(f"dmuon: Muon: {option} must be True or False, got {group[option]!r}")
    for option in ("lr", "momentum", "weight_decay", "beta2"):
        if isinstance(group[option], (str, bool)):
            raise ValueError(f"dmuon: Muon: {option} must be a number, got {group[option]!r}")
    coefficients, mode = group["ns_coefficients"], group["ns_mode"]
    if not isinstance(coefficients, str):
        if len(coefficients) == 3 and isinstance(coefficients[0], (int, float)):
            coefficients = [coefficients] * int(group["ns_steps"])  # torch.optim.Muon's form
        coefficients = tuple(tuple(float(x) for x in step) for step in coefficients)
    if not isinstance(mode, str):
        mode = tuple(int(i) for i in mode)
    key = (coefficients, group["ns_steps"], mode, dtype_of(group["ns_dtype"], "ns_dtype"))
    if key not in configs:
        configs[key] = make_config(*key)
    return _C.MuonHyper(
        float(group["lr"]),
        float(group["momentum"]),
        bool(group["nesterov"]),
        float(group["weight_decay"]),
        group["adjust_lr_fn"] or "original",
        configs[key],
        group["variant"],
        float(group["beta2"]),
        bool(group["cautious"]),
        _seed(group["seed"]),
    )


def adamw_options(group: dict[str, Any]) -> dict[str, float]:
    """An adamw group's options, by the names of C++."""
    beta1, beta2 = group["betas"]
    return {
        "lr": float(group["lr"]),
        "beta1": float(beta1),
        "beta2": float(beta2),
        "eps": float(group["eps"]),
        "weight_decay": float(group["weight_decay"]),
    }


def state_options(group: dict[str, Any]) -> tuple[Any, ...]:
    """The options of a muon group that decide which state its parameters have."""
    return tuple(group.get(key) for key in ("variant", "momentum_dtype", "blocks"))


def dtype_of(value: Any, option: str) -> torch.dtype | None:
    """A dtype from itself or its name; None stays None.

    Groups hold names: torch's distributed checkpoints take numbers and strings only.

    Raises:
        ValueError: no dtype's name, with the option's.
    """
    dtype = getattr(torch, value, None) if isinstance(value, str) else value
    if value is not None and not isinstance(dtype, torch.dtype):
        raise ValueError(f"dmuon: Muon: {option} must be a torch.dtype or None, got {value!r}")
    return dtype


def dtype_name(value: Any, option: str, allowed: tuple[torch.dtype | None, ...]) -> str | None:
    """The form in which a group holds a dtype; ValueError if it is none of the allowed ones."""
    dtype = dtype_of(value, option)
    if dtype not in allowed:
        raise ValueError(f"dmuon: Muon: {option} must be one of {list(allowed)}, got {value!r}")
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _seed(seed: Any) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise ValueError(f"dmuon: Muon: seed must be an integer in [0, 2**64), got {seed!r}")
    return seed
