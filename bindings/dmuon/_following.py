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
from ._runtime import _ORDER, Runtime, runtimes_of


class FollowingOptimizer(torch.optim.Optimizer):
    """Finds the parameters of its model again by their names, and takes their state along."""

    _names: dict[int, str]
    _runtimes: list[Runtime]

    def _prepare_to_follow(self, following: bool = True) -> None:
        self._following = following
        self._names = {}  # for messages, by the id of a parameter
        self._places: dict[int, str] = {}  # names in the model, or the same if it is not there
        self._order: list[str] = []  # places of the parameters of all groups
        self._members: dict[int, str] = {}  # see _note_members
        # The groups' lists, if nothing can come in the place of what they hold any more.
        self._final: list[list[torch.Tensor]] | None = None
        self._model: weakref.ref[nn.Module] | None = None

    def _expect(self, params: list[Any]) -> None:
        """Notes where the parameters of another group are to be found."""
        model = None if self._model is None else self._model()
        found = {id(p): place for place, p in parameters_at_rest(model).items()}
        places = {id(p): found.get(id(p), self._names[id(p)]) for p in params}
        self._places.update(places)
        self._order += places.values()

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
        now = parameters_now(model, self.param_groups, self._places, self._order)
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
            named = parameters_at_rest(runtime.model)
            self._members.update((id(p), n) for n, p in named.items() if id(p) in listed)

    def _check_still_there(self) -> None:
        """Such an optimizer cannot find again what was replaced."""
        if not self._members:
            return
        models = [runtime.model for runtime in self._runtimes]
        there = {id(p) for model in models for p in parameters_at_rest(model).values()}
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
        before = {self._places[id(p)]: p for p in states if id(p) in self._places}
        placed = iter(zip(self._order, now))
        for group in self.param_groups:
            mine = [next(placed) for _ in group["params"]]
            group["params"] = [p for _, p in mine]
            for place, p in mine:
                if id(p) not in self._places:
                    old = before[place]
                    init_adamw_state(states[p], p)
                    copy_state(states.pop(old), states[p])
                    self._names[id(p)] = self._names.pop(id(old))
                    self._places[id(p)] = self._places.pop(id(old))


def parameters_at_rest(model: nn.Module | None) -> dict[str, nn.Parameter]:
    """A model's parameters by name, also in a forward or in ``full_params``, when whole ones stand
    in their places."""
    if model is None:
        return {}
    units = [unit for runtime in runtimes_of(model) for unit in runtime.units]
    rests = {id(live): rest for unit in units for live, rest in zip(unit.lives, unit.rests)}
    return {plain_name(name): rests.get(id(p), p) for name, p in named_sharded(model)}


def may_be_sharded(listed: list[list[torch.Tensor]]) -> bool:
    """Whether ``fully_shard`` may still replace one of these parameters."""
    every = [p for params in listed for p in params]
    sharding = any(isinstance(p, OwnedTensor) and not p._view.plain_scalars for p in every)
    return sharding and not all(isinstance(p, DTensor) for p in every)


def parameters_now(
    model: nn.Module | None, groups: list[dict[str, Any]], places: dict[int, str], order: list[str]
) -> list[torch.Tensor] | None:
    """The parameters in a model's places of those in ``groups``, one list for all groups.

    ``fully_shard`` and its like give a model new ones, under the same names; some trainers exchange
    those in the groups then, also for wrong ones. ``places``, by ``id``, and ``order``, over all
    groups, are where the parameters were in the model.

    Returns:
        None if the groups hold them already.

    Raises:
        RuntimeError: one that cannot be found again, or a dedicated one that was replaced.
        ValueError: one that its group's algorithm cannot take.
    """
    current = parameters_at_rest(model)
    ids = {id(p) for p in current.values()}
    listed = [(p, group["algorithm"]) for group in groups for p in group["params"]]
    if len({id(p) for p, _ in listed}) == len(listed) and all(
        id(p) in places and (id(p) in ids or places[id(p)] not in current) for p, _ in listed
    ):
        return None
    found: list[torch.Tensor] = []
    for (p, algorithm), place in zip(listed, order):
        now: Any = current.get(place, p)
        known = id(now) in places or (algorithm == "adamw" and place in current)
        if not known or len(listed) != len(order):
            raise RuntimeError(
                f"dmuon: parameter {place!r}, now {tuple(p.shape)}, was replaced or exchanged "
                f"after the optimizer was built; {_ORDER}"
            )
        check_parameter(now, place, algorithm)
        found.append(now)
    return found
