"""QK-Clip: keeps attention logits from growing without bound, by shrinking Q and K weights."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from ._muon import Muon


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Head h's rows of one weight, and the power of its factor that they take."""

    weight: torch.Tensor
    rows: int
    offset: int
    stride: int
    power: float

    def scale(self, weight: torch.Tensor, factors: list[float]) -> None:
        row_factors = torch.ones(weight.shape[0], dtype=torch.float64)
        for head, factor in enumerate(factors):
            first = self.offset + head * self.stride
            row_factors[first : first + self.rows] = factor**self.power
        by_row = row_factors.to(weight.device, weight.dtype)
        weight.mul_(by_row.view(-1, *[1] * (weight.ndim - 1)))


@torch.no_grad()
def max_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    scale: float | None = None,
    *,
    is_causal: bool = False,
    chunk: int = 512,
) -> torch.Tensor:
    """The largest attention logit of each head, for ``QKClip.record``, where the attention itself
    does not show its logits (``scaled_dot_product_attention``).

    Args:
        q: (batch, heads, tokens, dim).
        k: (batch, kv_heads, other tokens, dim); kv_heads divides heads.
        scale: of the logits; None: 1 / sqrt(dim), as in ``scaled_dot_product_attention``.
        is_causal: query i sees the keys up to i.
        chunk: queries at a time; (batch, heads, chunk, other tokens) logits are alive.

    Returns:
        (heads,), fp32, on q's device. Costs what Q K^T costs.
    """
    if q.ndim != 4 or k.ndim != 4 or q.shape[3] != k.shape[3] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"dmuon: max_logits: q {tuple(q.shape)} and k {tuple(k.shape)} must be (batch, heads, "
            "tokens, dim), with heads a multiple of k's"
        )
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    largest = torch.full((q.shape[1],), -math.inf, device=q.device)
    for first in range(0, q.shape[2], chunk):
        part = q[:, :, first : first + chunk]
        logits = (part @ keys.mT).float() * scale
        if is_causal:
            hidden = torch.ones(logits.shape[2:], dtype=torch.bool, device=q.device)
            logits.masked_fill_(hidden.triu(first + 1), -math.inf)
        largest = torch.maximum(largest, logits.amax(dim=(0, 2, 3)))
    return largest


class QKClip:
    """QK-Clip of MuonClip (Kimi Team, "Kimi K2: Open Agentic Intelligence", arXiv 2507.20534).

    After an update, each head h whose largest attention logit S_h was above ``tau`` is scaled by
    gamma_h = tau / S_h: W_q and W_k of that head each by sqrt(gamma_h), so that its logits shrink
    by gamma_h. Other heads keep their bits. Where several Q heads share a K head, K is left alone
    and Q takes the whole factor, as with the shared rotary key in the paper.

    A hook of ``dmuon.Muon``: runs inside ``step``, on the whole matrix where its owner has it,
    before it is published. The attention says what its logits were, on every rank for its own data;
    the largest over all ranks and all calls since the last step counts.

    >>> clip = dmuon.QKClip(tau=100.0)
    >>> for i, layer in enumerate(model.layers):
    ...     clip.add(f"{i}", layer.q_proj.weight, layer.k_proj.weight, heads=16, head_dim=64)
    >>> optimizer.register_update_hook(clip)
    >>> clip.record("3", dmuon.max_logits(q, k, is_causal=True))  # in the attention's forward

    Args:
        tau: the bound; the paper trains with 100.
        group: the process group that the largest logits are taken over; None: the default group, if
            there is one. Every rank of it must step.
    """

    def __init__(self, tau: float = 100.0, group: dist.ProcessGroup | None = None) -> None:
        if not (math.isfinite(tau) and tau > 0):
            raise ValueError(f"dmuon: QKClip: tau must be finite and > 0, got {tau!r}")
        self.tau = float(tau)
        self.group = group
        #: gamma per head of what the last step clipped, by name.
        self.factors: dict[str, list[float]] = {}
        self._heads: dict[str, int] = {}
        self._parts: dict[str, list[_Rows]] = {}
        self._seen: dict[str, torch.Tensor] = {}

    def add(
        self,
        name: str,
        q: torch.Tensor,
        k: torch.Tensor,
        *,
        heads: int,
        head_dim: int,
        kv_heads: int | None = None,
        q_offset: int = 0,
        k_offset: int = 0,
    ) -> None:
        """Watches one attention layer.

        Args:
            name: of the layer, for ``record``.
            q: (at least ``q_offset + heads * head_dim``, n): head h has the rows from ``q_offset +
                h * head_dim`` on.
            k: the same with ``kv_heads`` and ``k_offset``. May be ``q``, for a fused weight.
            heads: number of Q heads.
            head_dim: rows per head.
            kv_heads: number of K heads, a divisor of ``heads``; None: as many.
            q_offset, k_offset: the first row of Q and of K.

        Raises:
            ValueError: heads that do not fit into the weights, or a name that is taken.
        """
        shared = kv_heads is not None and kv_heads != heads
        if shared and (kv_heads < 1 or heads % kv_heads):  # type: ignore[operator]
            raise ValueError(
                f"dmuon: QKClip: kv_heads of {name!r} must divide heads, got {kv_heads} and {heads}"
            )
        if name in self._heads:
            raise ValueError(f"dmuon: QKClip: {name!r} was added already")
        self.add_rows(
            name, q, heads=heads, rows=head_dim, offset=q_offset, power=1.0 if shared else 0.5
        )
        if not shared:
            self.add_rows(name, k, heads=heads, rows=head_dim, offset=k_offset, power=0.5)

    def add_rows(
        self,
        name: str,
        weight: torch.Tensor,
        *,
        heads: int,
        rows: int,
        offset: int = 0,
        stride: int | None = None,
        power: float = 0.5,
    ) -> None:
        """Watches a part of a layer: head h has ``rows`` rows from ``offset + h * stride`` on.

        For layouts that ``add`` does not know. Multi-head latent attention: power 0.5 for the parts
        of Q and K without rotation, 1 for Q's rotary part, and nothing for the shared rotary K.
        Biases of Q and K are parts too.

        Args:
            name: of the layer; may be used again.
            weight: of any dimensions; row i is ``weight[i]``.
            heads, rows, offset: as said; stride: None for ``rows``.
            power: of gamma that the rows are multiplied by.

        Raises:
            ValueError: rows that are not in the weight, or another number of heads than before.
        """
        stride = rows if stride is None else stride
        last = offset + (heads - 1) * stride + rows
        if min(heads, rows) < 1 or offset < 0 or stride < rows or last > weight.shape[0]:
            raise ValueError(
                f"dmuon: QKClip: {heads} heads of {rows} rows from {offset} on, {stride} apart, do "
                f"not fit into the weight of {name!r}, which has shape {tuple(weight.shape)}"
            )
        if self._heads.setdefault(name, heads) != heads:
            raise ValueError(
                f"dmuon: QKClip: {name!r} has {self._heads[name]} heads, but {heads} were given"
            )
        self._parts.setdefault(name, []).append(_Rows(weight, rows, offset, stride, power))

    @torch.no_grad()
    def record(self, name: str, max_logits: torch.Tensor) -> None:
        """Notes the largest logits of one forward on this rank: (heads,), before the softmax.

        The logits as the softmax sees them, with their scale. Nothing waits for the device.
        """
        heads = self._heads.get(name)
        if heads is None or max_logits.shape != (heads,):
            raise ValueError(
                f"dmuon: QKClip: {tuple(max_logits.shape)} logits for {name!r}; known are "
                f"{ {n: (h,) for n, h in self._heads.items()} }"
            )
        values = max_logits.detach().float()
        old = self._seen.get(name)
        self._seen[name] = values.clone() if old is None else torch.maximum(old, values)

    @torch.no_grad()
    def __call__(self, optimizer: Muon) -> None:
        """Clips what was recorded since the last call. A collective over the group."""
        self.factors = {}
        if not self._heads:
            return
        table = self._table()
        if dist.is_initialized() and dist.get_world_size(self.group) > 1:
            dist.all_reduce(table, op=dist.ReduceOp.MAX, group=self.group)
        largest = iter(table.tolist())  # waits for the device once
        self._seen = {}
        for name, heads in self._heads.items():
            factors = [self._factor(next(largest)) for _ in range(heads)]
            if min(factors) == 1.0:
                continue
            self.factors[name] = factors
            for part in self._parts[name]:
                optimizer.edit_weight(
                    part.weight,
                    lambda w, part=part, f=factors: part.scale(w, f),  # type: ignore[misc]
                )

    def _table(self) -> torch.Tensor:
        device = next(iter(self._parts.values()))[0].weight.device
        nothing = {n: torch.full((h,), -math.inf, device=device) for n, h in self._heads.items()}
        return torch.cat([self._seen.get(n, empty).to(device) for n, empty in nothing.items()])

    def _factor(self, largest: float) -> float:
        return self.tau / largest if math.isfinite(largest) and largest > self.tau else 1.0
