"""``dmuon.Muon``: Muon for matrices, AdamW for the rest, as one ``torch.optim.Optimizer``."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from . import _C
from ._blocks import blocks_by_name, check_used, resolve_group
from ._clip import clip_grad_norm_
from ._muon_groups import check_gradient, check_parameter, split_model
from ._muon_load import check_state, copy_state, take_options
from ._muon_options import (
    MOMENTUM_DTYPES,
    NS_DTYPES,
    adamw_options,
    dtype_name,
    muon_hyper,
    state_options,
)
from ._muon_state import fit_muon_state, init_adamw_state, like, local_part, owned_states
from ._muon_step import MuonStep, blocks_of
from ._owned_tensor import OwnedTensor
from ._runtime import Runtime, runtimes_of

#: Called inside ``step``; see ``Muon.register_update_hook``.
UpdateHook = Callable[["Muon"], None]

_NONFINITE = ("skip", "raise", "ignore")


class Muon(MuonStep):
    """Muon (K. Jordan et al., 2024), each matrix on its owner alone; AdamW for everything else.

    Matrices follow ``torch.optim.Muon``: ``buf += (1 - momentum)(g - buf)``; orthogonalize
    ``g + momentum (buf - g)`` (nesterov) or ``buf``; ``W *= 1 - lr * weight_decay``;
    ``W -= lr * ratio(m, n) * X``. State: "momentum_buffer", fp32 (fp64 for fp64), and for fp16
    and bf16 parameters an fp32 "master". For the rest: "step", "exp_avg", "exp_avg_sq". A matrix is
    (m, n); each of a stack (E, m, n); (m, the rest) of a convolution; each of ``blocks``.

    All options may differ per group; they are read at every step. Groups hold dtypes by name.

    Args:
        model_or_params: a module: its dedicated parameters go to the group "muon", all others that
            require a gradient to "adamw" (without any dedicated parameter and without sharding, the
            matrices that ``dedicate_params`` would choose go to "muon"). Or parameters: those of 2
            and more dimensions, dedicated or plain, all for Muon: a drop-in for
            ``torch.optim.Muon``.
        lr: learning rate of the matrices, a number or a 0-dim tensor (one on a GPU is waited for).
        momentum: in [0, 1).
        nesterov: look ahead by the momentum.
        weight_decay: decoupled; times the unadjusted ``lr``.
        ns_steps: steps of the orthogonalization.
        ns_coefficients: "keller", "you", "polar_express", "cans", "deepseek" (for ten steps), or a
            list of (a, b, c), one per step.
        ns_mode: "fast", "accurate", "exact", or a list of restarts; see ``dmuon.newton_schulz``.
        ns_dtype: dtype of the iteration; None: fp32 on CPU, fp16 on CUDA.
        adjust_lr_fn: "original" sqrt(max(1, m/n)), "match_rms_adamw" 0.2 sqrt(max(m, n)),
            "spectral_unclamped" sqrt(m/n), or "none".
        blocks: fused weights whose blocks are matrices of their own, beside those that
            ``dedicate_params`` was told of: a ``Blocks`` or ``{"dim": 0, "sizes": [...]}`` for all
            parameters; or a mapping from name patterns to such, or a callable ``(name,
            parameter)``.
        variant: "none"; "normuon" (arXiv 2510.05491): each row of X divided by the root of a
            running mean of its squares; "adamuon" (arXiv 2507.11005): X from the signs of the
            direction, each element divided so, use it with adjust_lr_fn="match_rms_adamw". Adds the
            state "second_momentum_buffer": (m, 1), or of the parameter's shape.
        beta2: of the variant's running mean.
        cautious: weight decay only where update and weight agree in sign (arXiv 2510.12402).
        momentum_dtype: None: fp32 (fp64 for fp64). torch.bfloat16: half the memory, rounded
            stochastically; adds the state "step". The step itself uses the unrounded value.
        seed: of that rounding. It is a function of seed, the parameter's index, "step" and element,
            so that runs can be repeated and a resumed one continues bit for bit.
        adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay: for the group "adamw".
        replicate_async: hide the publication of updates under what comes next: a unit's next
            forward waits for its own. False: the step waits for all. The results are the same.
        nonfinite: what a step does where a gradient on any rank holds a NaN or an infinity. "skip":
            nothing, on all ranks alike, with a warning where it was found; ``skipped_steps`` counts
            them. "raise": RuntimeError on all ranks, with rank and parameter, before anything has
            changed. Both cost a look at the gradients and one small all-reduce, and wait for all of
            them. "ignore": what they say; matrices are then updated as their gradients come in.
        param_groups: more groups, as dicts with "params" and options; parameters named here leave
            the two default groups. "algorithm": "muon" or "adamw"; default by the parameters.

    Raises:
        ValueError: an option out of range, a parameter that Muon cannot take (with its name where
            known), or sharded parameters without any dedicated one.
    """

    def __init__(
        self,
        model_or_params: nn.Module | Iterable[Any],
        lr: float | torch.Tensor = 0.02,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        ns_steps: int = 5,
        ns_coefficients: Any = "you",
        ns_mode: Any = "fast",
        ns_dtype: torch.dtype | None = None,
        adjust_lr_fn: str = "original",
        blocks: Any = None,
        variant: str = "none",
        beta2: float = 0.95,
        cautious: bool = False,
        momentum_dtype: torch.dtype | None = None,
        seed: int = 0,
        adamw_lr: float | torch.Tensor = 1e-3,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 0.0,
        replicate_async: bool = True,
        nonfinite: str = "skip",
        param_groups: Iterable[dict[str, Any]] | None = None,
    ) -> None:
        self._muon_defaults = {
            "lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay,
            "ns_steps": ns_steps, "ns_coefficients": ns_coefficients, "ns_mode": ns_mode,
            "ns_dtype": ns_dtype, "adjust_lr_fn": adjust_lr_fn, "blocks": blocks,
            "variant": variant, "beta2": beta2, "cautious": cautious,
            "momentum_dtype": momentum_dtype, "seed": seed,
        }  # fmt: skip
        self._adamw_defaults = {
            "lr": adamw_lr, "betas": tuple(adamw_betas), "eps": adamw_eps,
            "weight_decay": adamw_weight_decay,
        }  # fmt: skip
        if nonfinite not in _NONFINITE:
            raise ValueError(f"dmuon: nonfinite must be one of {_NONFINITE}, got {nonfinite!r}")
        self.replicate_async = replicate_async
        self.nonfinite = nonfinite
        self.skipped_steps = 0
        self._runtimes: list[Runtime] = []
        self._consolidated = False
        self._configs: dict[Any, _C.NewtonSchulzConfig] = {}
        self._masters_of: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._fitted: dict[int, tuple[Any, ...]] = {}
        self._update_hooks: OrderedDict[int, UpdateHook] = OrderedDict()
        self._workspace = _C.NewtonSchulzWorkspace()
        self._prepare_to_follow()
        groups = self._groups(model_or_params, list(param_groups or []))
        super().__init__(groups, {})
        self.defaults.update(self._muon_defaults)  # schedulers look for "momentum" here
        muon = (p for g in self.param_groups if g["algorithm"] == "muon" for p in g["params"])
        check_used(blocks, [self._names[id(p)] for p in muon])
        self._note_members()

    # --- construction --------------------------------------------------------------------------

    def _groups(self, model_or_params: Any, extra: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if isinstance(model_or_params, nn.Module):
            self._model = weakref.ref(model_or_params)
            self._use(runtimes_of(model_or_params))
            self._names, muon, adamw = split_model(model_or_params)
        else:
            muon, adamw = [], []
            for item in model_or_params:
                if isinstance(item, dict):
                    extra.append(item)
                elif isinstance(item, tuple):
                    self._names[id(item[1])] = item[0]
                    muon.append(item[1])
                else:
                    muon.append(item)
        groups = []
        taken: set[int] = set()
        for given in extra:
            params = given["params"]
            listed = [params] if isinstance(params, torch.Tensor) else list(params)
            taken.update(id(p[1] if isinstance(p, tuple) else p) for p in listed)
            groups.append({**given, "params": listed})
        for name, params in (("muon", muon), ("adamw", adamw)):
            rest = [p for p in params if id(p) not in taken]
            if rest:
                groups.append({"params": rest, "name": name, "algorithm": name})
        if not groups:
            raise ValueError("dmuon: Muon got no parameters")
        return groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As ``torch.optim.Optimizer.add_param_group``, with "algorithm": "muon" or "adamw"."""
        params = param_group["params"]
        given = [params] if isinstance(params, torch.Tensor) else list(params)
        params = [p[1] if isinstance(p, tuple) else p for p in given]
        self._names.update((id(p[1]), p[0]) for p in given if isinstance(p, tuple))
        algorithm = param_group.get("algorithm") or (
            "muon" if all(isinstance(p, OwnedTensor) or p.ndim >= 2 for p in params) else "adamw"
        )
        if algorithm not in ("muon", "adamw"):
            raise ValueError(f'dmuon: "algorithm" must be "muon" or "adamw", got {algorithm!r}')
        defaults = self._muon_defaults if algorithm == "muon" else self._adamw_defaults
        group = {**defaults, "name": algorithm, **param_group}
        group.update(params=params, algorithm=algorithm)
        for position, parameter in enumerate(params):
            place = f"{position} of group {len(self.param_groups)}"
            self._names.setdefault(id(parameter), place)
            check_parameter(parameter, self._names[id(parameter)], algorithm)
        self._settle(group)
        super().add_param_group(group)
        self._expect(params)
        for key in set(group) - {*defaults, *param_group, "name", "algorithm"}:
            del group[key]  # the other algorithm's, which the base class filled in
        self._use(_runtimes_behind(params))
        self._fit_state(group)

    def _settle(self, group: dict[str, Any]) -> None:
        """Checks a group's options and brings them into the form that steps read."""
        if group["algorithm"] == "adamw":
            none: list[torch.Tensor] = []
            _C.adamw_update(none, none, none, none, none, **adamw_options(group))
            return
        muon_hyper(group, self._configs)
        for key, allowed in (("momentum_dtype", MOMENTUM_DTYPES), ("ns_dtype", NS_DTYPES)):
            group[key] = dtype_name(group[key], key, allowed)
        params = group["params"]
        given = resolve_group(group["blocks"], [self._names[id(p)] for p in params], params)
        told: dict[int, Any] = {}
        for runtime in dict.fromkeys(_runtimes_behind(params)):
            told.update(runtime.blocks())
        own = given or [None] * len(params)
        blocks = [entry or told.get(id(p)) for entry, p in zip(own, params)]
        group["blocks"] = blocks if any(blocks) else None

    def _fit_state(self, group: dict[str, Any]) -> None:
        for i, p in enumerate(group["params"]):
            if group["algorithm"] == "adamw":
                if p not in self._states:
                    init_adamw_state(self._states[p], p)
                continue
            fresh = "master" not in self._states[p]
            fit_muon_state(self._states[p], p, group, blocks_of(group, i))
            if fresh and "master" in self._states[p]:
                self._note_master(p)
        self._fitted[id(group)] = state_options(group)

    def _follow_options(self, group: dict[str, Any]) -> None:
        """Fits the state to options that were changed since the last step."""
        if self._fitted.get(id(group)) != state_options(group):
            self._settle(group)
            self._fit_state(group)

    def _use(self, runtimes: Iterable[Runtime]) -> None:
        for runtime in runtimes:
            if runtime not in self._runtimes:
                runtime.check()
                runtime.followers.append(weakref.ref(self))
                self._runtimes.append(runtime)

    # --- step ----------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step. Parameters whose ``grad`` is None keep their bits, and their state.

        A collective over the mesh where there are dedicated parameters: every rank must call it.
        """
        self.follow_model(last=True)
        self._forget_consolidated()
        for runtime in self._runtimes:
            runtime.check_step()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:  # before anything changes
            if group["algorithm"] == "muon":
                self._follow_options(group)
            for p in group["params"]:
                if not isinstance(p, OwnedTensor):  # theirs have been looked at on their way
                    check_gradient(p, self._names[id(p)])
        if self.nonfinite != "ignore" and self._found_nonfinite():
            self.skipped_steps += 1
            return loss
        updated: set[int] = set()
        early = self.replicate_async and not self._update_hooks
        self._step_muon(updated, early)
        for group in self.param_groups:
            if group["algorithm"] == "adamw":
                self._step_adamw(group)
        for hook in list(self._update_hooks.values()):
            hook(self)
        for runtime in self._runtimes:
            runtime.steps += 1
            if not early:
                runtime.publish(updated, wait=not self.replicate_async)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; also forgets what was accumulated under ``no_sync`` or is on its way."""
        if set_to_none:
            for group in self.param_groups:
                for p in group["params"]:
                    if isinstance(p, OwnedTensor):  # without waiting for it
                        p.grad = None
        super().zero_grad(set_to_none)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scales all gradients so that their norm is at most ``max_norm``; returns it as it was.

        torch's own function gives the same; this one needs a single small all-reduce for all
        gradients, and none per matrix. See ``dmuon.clip_grad_norm_``.
        """
        params = (p for group in self.param_groups for p in group["params"])
        return clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)

    # --- hooks ---------------------------------------------------------------------------------

    def register_update_hook(self, hook: UpdateHook) -> RemovableHandle:
        """``hook(optimizer)`` is called in every step, on every rank, between update and publish.

        The place to change whole matrices by ``edit_weight``, as ``QKClip`` does. torch's own step
        hooks run before and after the whole step.

        Returns:
            A handle with ``remove()``.
        """
        handle = RemovableHandle(self._update_hooks)
        self._update_hooks[handle.id] = hook
        return handle

    @torch.no_grad()
    def edit_weight(self, p: torch.Tensor, edit: Callable[[torch.Tensor], Any]) -> None:
        """Changes a whole weight in place: ``edit(W)``, on its owner only if it is dedicated.

        ``W`` is what the update works on: the fp32 master of an fp16 or bf16 parameter. To be
        called on all ranks alike; what was changed outside ``step`` is published at the next
        forward.

        Raises:
            ValueError: a parameter of another optimizer, or one that is sharded, so that no rank
                has the whole matrix.
        """
        if p not in self._states:
            raise ValueError(f"dmuon: a parameter {tuple(p.shape)} is not in this optimizer")
        if isinstance(p, DTensor) and not isinstance(p, OwnedTensor):
            raise ValueError(
                f"dmuon: parameter {self._names.get(id(p))!r} {tuple(p.shape)} is sharded as "
                f"{p.placements}: no rank has the whole of it; dedicate it, or leave it to Muon"
            )
        local = local_part(p)
        if not isinstance(p, OwnedTensor) or p.is_owner:
            weight = self._weight(p)
            edit(weight)
            if "master" in self._states[p]:
                local.copy_(weight)
        increment_version(local)  # on all ranks: the units ask for it
        if "master" in self._states[p]:
            self._note_master(p)

    # --- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As in torch. Dedicated states are DTensors that lie on their owner: for
        ``torch.distributed.checkpoint``, or ``get_optimizer_state_dict`` with full_state_dict=True.
        """
        self.follow_model()
        self._follow_weights()
        state_dict = super().state_dict()
        for group, own in zip(state_dict["param_groups"], self.param_groups):
            names = [self._names[id(p)] for p in own["params"]]
            if own.get("blocks") and " of group " not in names[0]:
                group["blocks"] = blocks_by_name(own["blocks"], names)
        return state_dict

    def consolidate_state_dict(self, to: int = 0) -> None:
        """For trainers in which one rank saves alone, with DDP: lets rank ``to`` write
        ``torch.save(optimizer.state_dict())`` until the next step, with whole, plain tensors in it.

        The name and use are those of ``torch.distributed.optim.ZeroRedundancyOptimizer``. A
        collective: every rank must call it. Rank ``to``, in the default group, then holds all
        momenta in CPU memory; the others one at a time.

        Raises:
            ValueError: there is no such rank.
            RuntimeError: the state of other parameters is sharded (FSDP2): save that with
                ``torch.distributed.checkpoint``, or by ``get_optimizer_state_dict``.
        """
        self.follow_model()
        self._follow_weights()
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if not 0 <= to < ranks:
            raise ValueError(f"dmuon: to must be one of the {ranks} ranks, got {to}")
        keep = ranks == 1 or dist.get_rank() == to
        named = [(self._names[id(p)], values) for p, values in self._states.items()]
        for value in owned_states(named):
            whole = value.full_tensor()
            value._consolidated = whole.cpu() if keep else None
        self._consolidated = keep

    def _forget_consolidated(self) -> None:
        if not self._consolidated:
            return
        self._consolidated = False
        for values in self._states.values():
            for value in values.values():
                if isinstance(value, OwnedTensor):
                    value._consolidated = None

    def __getstate__(self) -> dict[str, Any]:
        own = ("_muon_defaults", "_adamw_defaults", "replicate_async", "nonfinite", "skipped_steps")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_configs" in self.__dict__:
            return  # torch calls this from load_state_dict too
        self._runtimes, self._configs, self._masters_of = [], {}, {}
        self._consolidated = False
        self._prepare_to_follow(False)
        self._update_hooks, self._fitted = OrderedDict(), {}
        self._workspace = _C.NewtonSchulzWorkspace()
        for number, group in enumerate(self.param_groups):
            for position, p in enumerate(group["params"]):
                self._names[id(p)] = f"{position} of group {number}"
        self._use(_runtimes_behind(p for group in self.param_groups for p in group["params"]))
        for p, values in self._states.items():
            if "master" in values:
                self._note_master(p)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, but into the existing tensors: their owners stay.

        Takes the state of ``torch.optim.Muon`` as it is; one whose momentum is a plain sum,
        ``buf = momentum * buf + g``, through ``dmuon.ema_momentum``. Options come from the state,
        as in torch, and with them the dtype of the momentum; what it lacks stays.

        Whole tensors, the same on every rank, go to their owners and shards. A collective over the
        mesh where ``state_dict`` holds otherwise sharded ones.

        Raises:
            ValueError: other groups, another algorithm's state, a shape or option that does not
                fit, naming the parameter; nothing has been changed.
        """
        self.follow_model()
        self._forget_consolidated()
        groups, kept = self.param_groups, {p: dict(values) for p, values in self._states.items()}
        given: dict[str, Any] = {}  # as the hooks have left it
        handle = self.register_load_state_dict_pre_hook(lambda _, state: given.update(state))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        indices = [i for g in given["param_groups"] for i in g["params"]]
        params = [p for g in self.param_groups for p in g["params"]]
        loaded = {p: given["state"].get(index, {}) for index, p in zip(indices, params)}
        self._states.clear()
        self._states.update({p: dict(values) for p, values in kept.items()})
        try:
            for group, own in zip(self.param_groups, groups):
                take_options(group, own)
                self._settle(group)  # the options are the loaded ones now
                self._fit_state(group)
                for p in group["params"]:
                    check_state(loaded[p], self._states[p], self._names[id(p)], group["algorithm"])
        except Exception:
            self.param_groups = groups
            self._states.clear()
            self._states.update(kept)
            raise
        for p in params:
            if "master" in loaded[p]:  # of a half-precision one, which this one may not be
                self._states[p].setdefault("master", like(p, torch.empty_like(local_part(p))))
            copy_state(loaded[p], self._states[p])
            if "master" in loaded[p] and "master" in self._states[p]:
                self._note_master(p)


def _runtimes_behind(params: Iterable[torch.Tensor]) -> Iterator[Runtime]:
    for p in params:
        if isinstance(p, OwnedTensor) and (runtime := p._view.runtime()) is not None:
            yield runtime
