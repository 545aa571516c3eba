"""An optimizer whose model may be wrapped after it was built.

``fully_shard`` puts new parameters in the place of those that it shards, and some trainers
(Accelerate) build the optimizer first, shard then, and exchange the parameters in its groups as far
as they can tell them apart.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from ._fsdp import named_sharded
from ._muon_groups import check_parameter, plain_name
from ._muon_load import copy_state
from ._muon_state import init_adamw_state
from ._owned_tensor import OwnedTensor
from ._runtime import _ORDER, Runtime


class FollowingOptimizer(torch.optim.Optimizer):
    """Finds the parameters of its model again by their names, and takes their state along."""

    _names: dict[int, str]
    _runtimes: list[Runtime]

    def _prepare_to_follow(self, following: bool = True) -> None:
        self._following = following
        self._names = {}  # by the id of a parameter
        self._order: list[str] = []  # of the parameters of all groups
        self._members: dict[int, str] = {}  # see _note_members
        # The groups' lists, if nothing can come in the place of what they hold any more.
        self._final: list[list[torch.Tensor]] | None = None
        self._model: weakref.ref[nn.Module] | None = None

    @property
    def state(self) -> Any:
        """Per parameter, as in torch. Whoever reads it finds the model's parameters of now, in
        ``param_groups`` too: torch's checkpoint functions look here first, and some of them once
        for every parameter, so it must not take long."""
        if self.__dict__.get("_following") and not self._is_final():
            self.follow_model()
        return self._states

    @state.setter
    def state(self, value: Any) -> None:
        self.__dict__["state"] = value

    @property
    def _states(self) -> Any:
        return self.__dict__["state"]

    @torch.no_grad()
    def follow_model(self, last: bool = False) -> None:
        """Takes over the parameters that have come in the place of those the optimizer knows.

        Called by itself wherever that may matter, ``last`` in the first step.

        Raises:
            RuntimeError: one that cannot be found again, or a dedicated one that was replaced.
            ValueError: one that its group's algorithm cannot take.
        """
        if not self._following or not self.param_groups:
            return
        model = None if self._model is None else self._model()
        now = parameters_now(model, self.param_groups, self._names, self._order)
        if model is None:
            self._check_still_there()
        if now is not None:
            self._take(now)
        self._following = not last
        listed: list[list[torch.Tensor]] = [group["params"] for group in self.param_groups]
        self._final = None if may_be_sharded(listed) else listed

    def _note_members(self) -> None:
        """Of an optimizer that was given parameters, not the model: which of them are in a model
        with dedicated ones."""
        if self._model is not None or not self._following:
            return
        listed = {id(p) for group in self.param_groups for p in group["params"]}
        for runtime in self._runtimes:
            named = named_sharded(runtime.model)
            self._members.update((id(p), plain_name(n)) for n, p in named if id(p) in listed)

    def _check_still_there(self) -> None:
        """Such an optimizer cannot find again what was replaced."""
        if not self._members:
            return
        there = {id(p) for runtime in self._runtimes for _, p in named_sharded(runtime.model)}
        for group in self.param_groups:
            for p in group["params"]:
                if id(p) in self._members and id(p) not in there:
                    raise RuntimeError(
                        f"dmuon: parameter {self._members[id(p)]!r} was replaced after the "
                        f"optimizer was built from parameters, not from the model; {_ORDER}"
                    )

    def _is_final(self) -> bool:
        groups, final = self.param_groups, self._final
        return (
            final is not None
            and len(final) == len(groups)
            and all(group["params"] is params for group, params in zip(groups, final))
        )

    def _take(self, now: list[torch.Tensor]) -> None:
        states = self._states
        before = {self._names[id(p)]: p for p in states if id(p) in self._names}
        named = iter(zip(self._order, now))
        for group in self.param_groups:
            mine = [next(named) for _ in group["params"]]
            group["params"] = [p for _, p in mine]
            for name, p in mine:
                if id(p) not in self._names:
                    init_adamw_state(states[p], p)
                    copy_state(states.pop(before[name]), states[p])
                    del self._names[id(before[name])]
                    self._names[id(p)] = name


def may_be_sharded(listed: list[list[torch.Tensor]]) -> bool:
    """Whether ``fully_shard`` may still replace one of these parameters."""
    every = [p for params in listed for p in params]
    sharding = any(isinstance(p, OwnedTensor) and not p._view.plain_scalars for p in every)
    return sharding and not all(isinstance(p, DTensor) for p in every)


def parameters_now(
    model: nn.Module | None, groups: list[dict[str, Any]], names: dict[int, str], order: list[str]
) -> list[torch.Tensor] | None:
    """The parameters in a model's places of those in ``groups``, one list for all groups.

    ``fully_shard`` and its like give a model new ones, under the same names; some trainers exchange
    those in the groups then, also for wrong ones. ``names`` by ``id`` and ``order``, of all groups,
    are as they were.

    Returns:
        None if the groups hold them already.

    Raises:
        RuntimeError: one that cannot be found again, or a dedicated one that was replaced.
        ValueError: one that its group's algorithm cannot take.
    """
    current = {} if model is None else {plain_name(n): p for n, p in named_sharded(model)}
    ids = {id(p) for p in current.values()}
    listed = [(p, group["algorithm"]) for group in groups for p in group["params"]]
    if len({id(p) for p, _ in listed}) == len(listed) and all(
        id(p) in names and (id(p) in ids or names[id(p)] not in current) for p, _ in listed
    ):
        return None
    found: list[torch.Tensor] = []
    for (p, algorithm), name in zip(listed, order):
        now: Any = current.get(name, p)
        known = id(now) in names or (algorithm == "adamw" and name in current)
        if not known or len(listed) != len(order):
            raise RuntimeError(
                f"dmuon: parameter {name!r}, now {tuple(p.shape)}, was replaced or exchanged after "
                f"the optimizer was built; {_ORDER}"
            )
        check_parameter(now, name, algorithm)
        found.append(now)
    return found
