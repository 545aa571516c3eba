"""Momenta that other Muon implementations keep."""

from __future__ import annotations

from typing import Any

import torch


def ema_momentum(state_dict: dict[str, Any], momentum: float | None = None) -> dict[str, Any]:
    """A state dict whose momenta are plain sums, in the form that ``dmuon.Muon`` keeps.

    ``dmuon.Muon`` and ``torch.optim.Muon`` keep an average, ``buf += (1 - momentum)(g - buf)``;
    others keep a sum, ``buf = momentum * buf + g``, which is the average divided by
    ``1 - momentum`` (K. Jordan's first Muon, Moonlight's, and others). The direction is the same up
    to that factor, which orthogonalization takes away; but where one run goes on from the other's
    buffer, the new gradients would count 1 / (1 - momentum) times too little or too much. A state
    dict does not say which form it holds, so this is for the user to call:

    >>> optimizer.load_state_dict(dmuon.ema_momentum(torch.load("theirs.pt")))

    Args:
        state_dict: of an optimizer, with the state "momentum_buffer" per parameter.
        momentum: with which the sums were built; None: the option "momentum" of each group.

    Returns:
        A new state dict; every "momentum_buffer" is a new tensor, the rest is shared. Groups of
        other algorithms (without "momentum_buffer") stay as they are.

    Raises:
        ValueError: momentum outside [0, 1), or neither given nor an option of a group with momenta.
    """
    state = {key: dict(values) for key, values in state_dict["state"].items()}
    for number, group in enumerate(state_dict["param_groups"]):
        holding = [state[i] for i in group["params"] if "momentum_buffer" in state.get(i, {})]
        if not holding:
            continue
        mu = group.get("momentum") if momentum is None else momentum
        if mu is None or not 0 <= float(mu) < 1:
            raise ValueError(
                f"dmuon: ema_momentum: group {number} needs a momentum in [0, 1), got {mu!r}; pass "
                "momentum= if the state dict does not hold it"
            )
        for values in holding:
            buffer = values["momentum_buffer"]
            if isinstance(buffer, torch.Tensor):  # some keep None until the first gradient
                values["momentum_buffer"] = buffer * (1 - float(mu))
    return {**state_dict, "state": state}
