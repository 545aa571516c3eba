"""``dmuon.Muon``: Muon for matrices, AdamW for the rest, as one ``torch.optim.Optimizer``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from . import _C
from ._boundary import default_predicate
from ._owned_tensor import OwnedTensor
from ._runtime import _ORDER, Runtime, own_gradient, runtimes_of

_MUON_KEYS = (
    "lr", "momentum", "nesterov", "weight_decay",
    "ns_steps", "ns_coefficients", "ns_mode", "ns_dtype", "adjust_lr_fn",
)  # fmt: skip
_ADAMW_KEYS = ("lr", "betas", "eps", "weight_decay")
_HALF = (torch.float16, torch.bfloat16)


class Muon(torch.optim.Optimizer):
    """Muon (K. Jordan et al., 2024), each matrix on its owner alone; AdamW for everything else.

    Matrices follow ``torch.optim.Muon``: ``buf += (1 - momentum)(g - buf)``; orthogonalize
    ``g + momentum (buf - g)`` (nesterov) or ``buf``; ``W *= 1 - lr * weight_decay``;
    ``W -= lr * ratio(m, n) * X``. State: "momentum_buffer", fp32 (fp64 for fp64), and for fp16
    and bf16 parameters an fp32 "master". For the rest: "step", "exp_avg", "exp_avg_sq".

    Args:
        model_or_params: a module: its dedicated parameters go to the group "muon", all others that
            require a gradient to "adamw" (without any dedicated parameter and without sharding, the
            matrices that ``dedicate_params`` would choose go to "muon"). Or parameters: those of 2
            and more dimensions, dedicated or plain, all for Muon: a drop-in for
            ``torch.optim.Muon``.
        lr: learning rate of the matrices, a number or a 0-dim tensor.
        momentum: in [0, 1).
        nesterov: look ahead by the momentum.
        weight_decay: decoupled; times the unadjusted ``lr``.
        ns_steps: steps of the orthogonalization.
        ns_coefficients: "keller", "you", "polar_express", or a list of (a, b, c), one per step.
        ns_mode: "fast", "accurate", "exact", or a list of restarts; see ``dmuon.newton_schulz``.
        ns_dtype: dtype of the iteration; None: fp32 on CPU, fp16 on CUDA.
        adjust_lr_fn: "original" sqrt(max(1, m/n)), "match_rms_adamw" 0.2 sqrt(max(m, n)),
            "spectral_unclamped" sqrt(m/n), or "none".
        adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay: for the group "adamw".
        replicate_async: reserved for hiding the publication of updates under the next forward; the
            step waits for it in this version, with the same results.
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
        adamw_lr: float | torch.Tensor = 1e-3,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 0.0,
        replicate_async: bool = True,
        param_groups: Iterable[dict[str, Any]] | None = None,
    ) -> None:
        self._muon_defaults = {
            "lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay,
            "ns_steps": ns_steps, "ns_coefficients": ns_coefficients, "ns_mode": ns_mode,
            "ns_dtype": ns_dtype, "adjust_lr_fn": adjust_lr_fn,
        }  # fmt: skip
        self._adamw_defaults = {
            "lr": adamw_lr, "betas": tuple(adamw_betas), "eps": adamw_eps,
            "weight_decay": adamw_weight_decay,
        }  # fmt: skip
        self.replicate_async = replicate_async
        self._runtimes: list[Runtime] = []
        self._names: dict[int, str] = {}
        self._configs: dict[Any, _C.NewtonSchulzConfig] = {}
        self._master_versions: dict[int, int] = {}
        groups = self._groups(model_or_params, list(param_groups or []))
        super().__init__(groups, {})
        self.defaults.update(self._muon_defaults)  # schedulers look for "momentum" here

    # --- construction --------------------------------------------------------------------------

    def _groups(self, model_or_params: Any, extra: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if isinstance(model_or_params, nn.Module):
            muon, adamw = self._split(model_or_params)
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
            taken.update(id(p) for p in listed)
            groups.append({**given, "params": listed})
        for name, params in (("muon", muon), ("adamw", adamw)):
            rest = [p for p in params if id(p) not in taken]
            if rest:
                groups.append({"params": rest, "name": name, "algorithm": name})
        if not groups:
            raise ValueError("dmuon: Muon got no parameters")
        return groups

    def _split(self, model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        self._use(runtimes_of(model))
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self._names = {id(p): n for n, p in named}
        if any(isinstance(p, OwnedTensor) for _, p in named):
            muon: list[nn.Parameter] = [p for _, p in named if isinstance(p, OwnedTensor)]  # type: ignore[misc]
        else:
            sharded = next((n for n, p in named if isinstance(p, DTensor)), None)
            if sharded is not None:
                raise ValueError(
                    f"dmuon: no parameter is dedicated, but {sharded!r} is sharded already; "
                    f"{_ORDER}"
                )
            test = default_predicate(model)
            muon = [p for n, p in named if test(n, p)]
            if not muon:
                raise ValueError(
                    "dmuon: found no matrix for Muon inside the blocks of this "
                    f"{type(model).__name__}; pass the parameters, or param_groups with "
                    '"algorithm": "muon"'
                )
        chosen = {id(p) for p in muon}
        return muon, [p for _, p in named if id(p) not in chosen]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As ``torch.optim.Optimizer.add_param_group``, with "algorithm": "muon" or "adamw"."""
        params = param_group["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        params = [p[1] if isinstance(p, tuple) else p for p in params]
        algorithm = param_group.get("algorithm") or (
            "muon" if all(isinstance(p, OwnedTensor) or p.ndim >= 2 for p in params) else "adamw"
        )
        if algorithm not in ("muon", "adamw"):
            raise ValueError(f'dmuon: "algorithm" must be "muon" or "adamw", got {algorithm!r}')
        defaults = self._muon_defaults if algorithm == "muon" else self._adamw_defaults
        group = {**defaults, "name": algorithm, **param_group}
        group.update(params=params, algorithm=algorithm)
        for parameter in params:
            self._check_parameter(parameter, algorithm)
        self._check_options(group)
        super().add_param_group(group)
        for key in set(group) - {*defaults, *param_group, "name", "algorithm"}:
            del group[key]  # the other algorithm's, which the base class filled in
        self._use(_runtimes_behind(params))
        for parameter in params:
            self._init_state(parameter, algorithm)

    def _use(self, runtimes: Iterable[Runtime]) -> None:
        for runtime in runtimes:
            if runtime not in self._runtimes:
                runtime.bind()
                self._runtimes.append(runtime)

    def _check_parameter(self, p: torch.Tensor, algorithm: str) -> None:
        what = (
            f"dmuon: parameter {self._names.get(id(p), '<unnamed>')!r} {tuple(p.shape)} {p.dtype}"
        )
        if not p.is_floating_point():
            raise ValueError(f"{what}: only floating-point parameters can be optimized")
        if algorithm == "adamw":
            if isinstance(p, OwnedTensor):
                raise ValueError(f"{what} is dedicated and must be in a muon group")
            return
        if p.layout != torch.strided:
            raise ValueError(f"{what} has layout {p.layout}; Muon needs a dense matrix")
        if p.ndim < 2:
            raise ValueError(f'{what} is not a matrix; put it in a group with "algorithm": "adamw"')
        if isinstance(p, DTensor) and not isinstance(p, OwnedTensor):
            raise ValueError(f"{what} is sharded as {p.placements} but not dedicated; {_ORDER}")

    def _check_options(self, group: dict[str, Any]) -> None:
        if group["algorithm"] == "muon":
            self._hyper(group)
        else:
            none: list[torch.Tensor] = []
            _C.adamw_update(none, none, none, none, none, **_adamw_options(group))

    def _init_state(self, p: torch.Tensor, algorithm: str) -> None:
        state = self.state[p]
        if algorithm == "muon":
            wide = torch.float32 if p.dtype in _HALF else p.dtype
            local = _local(p).detach()
            state["momentum_buffer"] = _like(p, torch.zeros_like(local, dtype=wide))
            if p.dtype in _HALF:
                state["master"] = _like(p, local.to(wide, copy=True))
                self._master_versions[id(p)] = _local(p)._version
        else:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(p, requires_grad=False)
            state["exp_avg_sq"] = torch.zeros_like(p, requires_grad=False)

    # --- step ----------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step. Parameters whose ``grad`` is None keep their bits, and their state.

        A collective over the mesh where there are dedicated parameters: every rank must call it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updated: set[int] = set()
        for group in self.param_groups:
            if group["algorithm"] == "muon":
                self._step_muon(group, updated)
            else:
                self._step_adamw(group)
        for runtime in self._runtimes:
            runtime.steps += 1
            runtime.publish(updated)
        return loss

    def _hyper(self, group: dict[str, Any]) -> _C.MuonHyper:
        coefficients, mode = group["ns_coefficients"], group["ns_mode"]
        if not isinstance(coefficients, str):
            if len(coefficients) == 3 and isinstance(coefficients[0], (int, float)):
                coefficients = [coefficients] * int(group["ns_steps"])  # torch.optim.Muon's form
            coefficients = tuple(tuple(float(x) for x in step) for step in coefficients)
        if not isinstance(mode, str):
            mode = tuple(int(i) for i in mode)
        key = (coefficients, group["ns_steps"], mode, group["ns_dtype"])
        if key not in self._configs:
            self._configs[key] = make_config(
                coefficients, group["ns_steps"], mode, group["ns_dtype"]
            )
        return _C.MuonHyper(
            float(group["lr"]),
            float(group["momentum"]),
            bool(group["nesterov"]),
            float(group["weight_decay"]),
            group["adjust_lr_fn"] or "original",
            self._configs[key],
        )

    def _step_muon(self, group: dict[str, Any], updated: set[int]) -> None:
        weights, gradients, momenta, halves = [], [], [], []
        for p in group["params"]:
            if p.grad is None:
                continue
            gradient = _local_gradient(p)  # checked on every rank
            updated.add(id(p))
            local = _local(p)
            if local.numel() == 0:
                continue  # another rank's
            state = self.state[p]
            weight = local.detach()
            if "master" in state:
                weight = _local(state["master"])
                if local._version != self._master_versions.get(id(p)):
                    weight.copy_(local)  # loaded or changed from outside since the last step
                halves.append((p, local, weight))
            weights.append(weight)
            gradients.append(gradient)
            for runtime in _runtimes_behind([p]):
                runtime.orthogonalized += p.shape[0] if p.ndim == 3 else 1
            momenta.append(_local(state["momentum_buffer"]))
        _C.muon_update(weights, gradients, momenta, self._hyper(group))
        for p, local, master in halves:
            local.copy_(master)
            self._master_versions[id(p)] = local._version

    def _step_adamw(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        states = [self.state[p] for p in params]
        _C.adamw_update(
            [_local(p).detach() for p in params],
            [_local(p.grad) for p in params],
            [_local(s["exp_avg"]) for s in states],
            [_local(s["exp_avg_sq"]) for s in states],
            [s["step"] for s in states],
            **_adamw_options(group),
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; also forgets what was accumulated under ``no_sync``."""
        super().zero_grad(set_to_none)
        for runtime in self._runtimes:
            runtime.drop_gradients()

    # --- state ---------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        own = {"_muon_defaults": self._muon_defaults, "_adamw_defaults": self._adamw_defaults}
        return {**super().__getstate__(), **own, "replicate_async": self.replicate_async}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_configs" in self.__dict__:
            return  # torch calls this from load_state_dict too
        self._runtimes, self._names, self._configs, self._master_versions = [], {}, {}, {}
        self._use(_runtimes_behind(p for group in self.param_groups for p in group["params"]))
        for p, values in self.state.items():
            if "master" in values:
                self._master_versions[id(p)] = _local(p)._version

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, but into the existing tensors: their dtypes and owners stay.

        A collective over the mesh where ``state_dict`` holds whole or otherwise sharded tensors.
        """
        kept = dict(self.state)
        options = [dict(group) for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, own in zip(self.param_groups, options):
            for key, value in own.items():  # what torch.optim.Muon's groups do not have
                group.setdefault(key, value)
        loaded = state_dict["state"]
        indices = [i for g in state_dict["param_groups"] for i in g["params"]]
        params = [p for g in self.param_groups for p in g["params"]]
        self.state.clear()
        self.state.update(kept)
        for index, p in zip(indices, params):
            for key, value in loaded.get(index, {}).items():
                old = self.state[p].get(key)
                if isinstance(old, torch.Tensor) and isinstance(value, torch.Tensor):
                    old.copy_(value)
                else:
                    self.state[p][key] = value
            if "master" in self.state[p] and "master" in loaded.get(index, {}):
                self._master_versions[id(p)] = _local(p)._version


def make_config(
    coefficients: Any, steps: int, mode: Any, dtype: torch.dtype | None
) -> _C.NewtonSchulzConfig:
    """The engine's configuration from the options of ``Muon`` and ``newton_schulz``."""
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
        named = {"fast": [2], "accurate": [1, 3], "exact": list(range(1, int(steps)))}
        if isinstance(mode, str) and mode not in named:
            raise ValueError(
                f"dmuon: ns_mode must be one of {list(named)} or restarts, got {mode!r}"
            )
        restarts = named[mode] if isinstance(mode, str) else list(mode)
        if isinstance(mode, str):
            restarts = [r for r in restarts if r < steps]
        config = _C.NewtonSchulzConfig(list(coefficients), restarts)
    if dtype is not None:
        config.dtype = dtype
    return config


def _runtimes_behind(params: Iterable[torch.Tensor]) -> Iterator[Runtime]:
    for p in params:
        if isinstance(p, OwnedTensor) and (runtime := p._view.runtime()) is not None:
            yield runtime


def _adamw_options(group: dict[str, Any]) -> dict[str, float]:
    beta1, beta2 = group["betas"]
    return {
        "lr": float(group["lr"]),
        "beta1": float(beta1),
        "beta2": float(beta2),
        "eps": float(group["eps"]),
        "weight_decay": float(group["weight_decay"]),
    }


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _local_gradient(p: torch.Tensor) -> torch.Tensor:
    grad = own_gradient(p) if isinstance(p, OwnedTensor) else p.grad
    assert grad is not None
    return _local(grad)


def _like(p: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    return p.like(local) if isinstance(p, OwnedTensor) else local
