r"""One-Pass Forgetting with memory O(T), for any softmax variant: what :mod:`attnzoo.algebra.forgetting` defines.

Everything that runs along time (the minimum so far, the running mean of attention, the utility pooled over later rows)
belongs to one key. So a call is cut into *panels* of few keys with all their rows: each holds its keys' whole history,
which blocks of rows would have to hand from one to the next, and to keep for the backward pass, T / C times T numbers.
A panel adds to three sums per row,

.. math:: N_t = \sum_j e^{a_{tj} + B_{tj} - L_t} v_j, \quad Z_t = \sum_j e^{a_{tj} + B_{tj} - L_t}

and the expected number of kept keys, with the teacher's log-sum-exp L as the constant: no bias is above 0 or below
:math:`-B_{max}`, so that Z is in :math:`[e^{-B_{max}}, 1]`. The output is N / Z. Sums keep nothing for the backward
pass, which computes each panel again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnzoo.algebra.forgetting import (
    Forgetting,
    budget_gap,
    divergence,
    expected_kept,
    forgetful_bias,
    full_bias,
    least,
    squashed,
)
from attnzoo.algebra.gate import Gate
from attnzoo.algebra.transitions import ClosedForm, HeadGate, compute_dtype, heads_first, open_sums
from attnzoo.algebra.values import in_transform
from attnzoo.forms.options import existing
from attnzoo.forms.readout import Band
from attnzoo.forms.softmax import AdditiveForms, SoftmaxForms

COLUMNS = 64  # keys of a panel
NOTHING = math.log(torch.finfo(torch.float64).tiny)  # logarithm of a contribution of 0


@dataclass(frozen=True, eq=False)
class Panel:
    """The keys ``start .. stop`` with all rows from the first of them on: R rows, n keys.

    Args:
        start: the first key, which is the first row too.
        stop: the end of the keys.
        age: tokens from key to row, ``[B or 1, 1, R, n]``; negative above the diagonal.
        logits: :func:`~attnzoo.algebra.forgetting.squashed`, mean over the query heads of a key head, ``[B, G, R, n]``;
            None where the network looks at no pairs.
        attention: :func:`~attnzoo.algebra.forgetting.running_mean` of the attention to the key, likewise.
    """

    start: int
    stop: int
    age: Tensor
    logits: Tensor | None = None
    attention: Tensor | None = None


Retention = Callable[[Panel], Tensor]  # logits of r, [B, G, R, n], from what is known at each row


@dataclass(frozen=True, eq=False)
class Forgotten:
    """What a student gives.

    Args:
        o: ``[B, T, H, V]``.
        distillation: L_r, where it was asked for.
        budget: L_b, likewise.
        kept: expected share of its tokens that a row still sees, mean over all rows.
    """

    o: Tensor
    distillation: Tensor | None = None
    budget: Tensor | None = None
    kept: Tensor | None = None


class Logits:
    """The teacher's logits in panels, and which of them exist.

    Args:
        forms: of the softmax variant.
        q: ``[B, T, H, K]``.
        k: ``[B, T, G, K]``.
        gate: of the variant.
        scale: of the scores; None for ``1 / sqrt(K)``.
        valid: tokens that exist, ``[B, T]`` bool, or None for all. The others are first or last.
        cu_seqlens: borders ``[N + 1]`` of packed sequences, or None.
        window: rows see that many tokens; None for all.
    """

    def __init__(
        self, forms: SoftmaxForms, q: Tensor, k: Tensor, gate: Gate, *, scale: float | None = None,
        valid: Tensor | None = None, cu_seqlens: Tensor | None = None, window: int | None = None,
    ) -> None:  # fmt: skip
        (_, T, H, K), dtype, device = q.shape, compute_dtype(q), q.device
        if valid is not None:
            q, k = existing(valid, q, k)
        self.heads, self.valid, self.columns = k.shape[2], valid, COLUMNS
        gate = forms.separated(gate, q, valid, cu_seqlens)
        local = None if isinstance(forms, AdditiveForms) else HeadGate.of(gate, q).cut(self.columns)
        if isinstance(forms, AdditiveForms):
            q, k, _, _ = forms.place(q, k, gate, None, valid)
        q = heads_first(q, H, dtype) * (K**-0.5 if scale is None else scale)
        k = heads_first(k, H, dtype)
        self.q, self.k, self.carry = q, k, forms.transition.carry
        self.own = (q * k).sum(-1)  # [B, H, T]: no transition lies between a row and itself
        self.blocks: ClosedForm | None = None
        if local is not None:
            self.blocks = forms.transition.block(_cut(q, self.columns), _cut(k, self.columns), local)
        decay = gate.per_token(q.transpose(1, 2)).log_decay
        self.sums = None if decay is None else open_sums(heads_first(decay, H, dtype))
        self.position = torch.arange(T, device=device)[None] if valid is None else valid.cumsum(1) - 1
        self.segment = None
        if cu_seqlens is not None:
            self.segment = torch.searchsorted(cu_seqlens.long(), torch.arange(T, device=device), right=True)
        self.band = Band.of(window, valid, T, device)

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(B, H, T)``."""
        B, H, T = self.own.shape
        return B, H, T

    def panels(self) -> Iterator[tuple[int, int]]:
        """First and last + 1 key of each panel."""
        T = self.own.shape[-1]
        return ((start, min(start + self.columns, T)) for start in range(0, T, self.columns))

    def age(self, start: int, stop: int) -> Tensor:
        """Tokens from each key of a panel to each row, ``[B or 1, 1, R, n]``."""
        return (self.position[:, start:, None] - self.position[:, None, start:stop])[:, None]

    def exists(self, start: int, stop: int) -> Tensor:
        """Which rows of a panel see which keys, ``[B or 1, 1, R, n]`` bool."""
        T, device = self.own.shape[-1], self.own.device
        rows, keys = torch.arange(start, T, device=device)[:, None], torch.arange(start, stop, device=device)
        there = (keys <= rows)[None]
        if self.valid is not None:
            there = there & self.valid[:, start:, None] & self.valid[:, None, start:stop]
        if self.segment is not None:
            there = there & (self.segment[start:, None] == self.segment[start:stop])
        if self.band is not None:
            there = there & (keys >= self.band.starts[:, start:, None])
        return there[:, None]

    def panel(self, start: int, stop: int, there: Tensor) -> Tensor:
        """``s_tj + d_tj`` of a panel, ``[B, H, R, n]``; -inf where nothing is seen (:meth:`exists`)."""
        if self.blocks is None:
            scores = self.q[:, :, start:] @ self.k[:, :, start:stop].mT
        else:
            scores = self._carried(start // self.columns, self.blocks)[:, :, : self.shape[2] - start, : stop - start]
        if self.sums is not None:
            sums, closed = self.sums
            decay = (sums[..., start:, None] - sums[..., None, start:stop]).to(scores.dtype)
            if closed is not None:
                decay = decay.masked_fill(closed[..., start:, None] != closed[..., None, start:stop], -torch.inf)
            scores = scores + decay
        return scores.masked_fill(~there, -torch.inf)

    def _carried(self, n: int, blocks: ClosedForm) -> Tensor:
        """The scores of block n's keys with the rows of its own block and of all after it."""
        rows = [blocks.scores[:, :, n]]
        keys = blocks.k[:, :, n].mT  # [B, H, K, C]: laid out as a state, to be carried as one
        for m in range(n + 1, blocks.q.shape[2]):
            rows.append(blocks.q[:, :, m] @ keys)
            keys = self.carry(cast(Tensor, blocks.total)[:, :, m], keys)
        return torch.cat(rows, 2)


def _cut(x: Tensor, size: int) -> Tensor:
    """``[B, H, T, K]`` in blocks ``[B, H, N, size, K]``, the last one filled up with zeros."""
    return rearrange(F.pad(x, (0, 0, 0, -x.shape[2] % size)), "b h (n c) k -> b h n c k", c=size)


def forgetful_attention(
    logits: Logits, v: Tensor, lse: Tensor, retention: Retention, options: Forgetting, temperature: float, *,
    teacher: Tensor | None = None, sink: Tensor | None = None, shares: Tensor | None = None, losses: bool = False,
) -> Forgotten:  # fmt: skip
    """The student's output, and what its retention loses.

    Args:
        logits: the teacher's.
        v: ``[B, T, G, V]``.
        lse: the teacher's log-sum-exps ``[B, T, H]``, its sink's among them.
        retention: gives the logits of r for a panel.
        options: see :class:`~attnzoo.algebra.forgetting.Forgetting`.
        temperature: tau.
        teacher: its output ``[B, T, H, V]``; given, L_r is computed.
        sink: ``[H]`` logits without a value.
        shares: of the budget, ``[G]`` with mean 1; None for all the same.
        losses: compute L_b and the share of kept keys.
    """
    (B, H, T), G = logits.shape, logits.heads
    dtype = logits.own.dtype
    if logits.valid is not None:
        [v] = existing(logits.valid, v)
    values, lse = v.to(dtype).transpose(1, 2), rearrange(lse.detach().to(dtype), "b t h -> b h t")
    goal = None if teacher is None else _Goal.of(logits, values, lse, teacher, options, temperature)

    def panel(start: int, stop: int) -> tuple[Tensor, ...]:
        there = logits.exists(start, stop)
        a = logits.panel(start, stop, there)
        x, age = _retention(logits, a, there, start, stop, retention, options)
        r = x.sigmoid().masked_fill((age < options.window) | ~there, 1.0)
        r = r.cummin(-2).values if options.monotone else r
        bias = forgetful_bias(r, options, temperature).repeat_interleave(H // G, 1)
        weights = (a + bias - lse[..., start:, None]).exp()
        N = weights @ values[:, :, start:stop].repeat_interleave(H // G, 1)
        found = [torch.cat([N, weights.sum(-1, keepdim=True)], -1)]
        if losses:
            found.append(expected_kept(r, options, temperature).masked_fill(~there, 0.0).sum(-1))
        if goal is not None:
            target = goal.panel(a, there, start, stop).to(dtype)
            each = divergence(target, x, options.divergence)
            found.append(each.masked_fill(~there | (age < options.window), 0.0).sum())
        return tuple(found)

    again = torch.is_grad_enabled() and not in_transform() and logits.columns < T
    total = values.new_zeros(B, H, T, values.shape[-1] + 1)
    kept, loss = values.new_zeros(B, G, T), values.new_zeros(())
    for start, stop in logits.panels():
        found = cast(Any, checkpoint)(panel, start, stop, use_reentrant=False) if again else panel(start, stop)
        total = total + F.pad(found[0], (0, 0, start, 0))
        kept = kept + F.pad(found[1], (start, 0)) if losses else kept
        loss = loss + found[-1] if goal is not None else loss
    N, Z = total[..., :-1], total[..., -1]
    if sink is not None:
        Z = Z + (sink.to(dtype)[:, None] + full_bias(options, temperature) - lse).exp()
    o = rearrange(N / least(Z)[..., None], "b h t v -> b t h v").to(v.dtype)
    if not losses and goal is None:
        return Forgotten(o)
    tokens, old = _counts(logits, options)
    tokens, rows = tokens.expand(kept.shape), tokens > 0
    share = (kept.detach() / tokens.clamp(min=1)).sum() / rows.expand(kept.shape).sum().clamp(min=1)
    return Forgotten(
        o,
        None if goal is None else loss / (old * (B // logits.position.shape[0]) * G).clamp(min=1),
        budget_gap(kept, tokens, options, shares) if losses else None,
        share if losses else None,
    )


def _retention(
    logits: Logits, a: Tensor, there: Tensor, start: int, stop: int, retention: Retention, options: Forgetting
) -> tuple[Tensor, Tensor]:
    """Logits of r ``[B, G, R, n]`` and the ages of a panel."""
    age, G = logits.age(start, stop), logits.heads
    if not options.of_pairs:
        return retention(Panel(start, stop, age)), age
    own = logits.own[..., start:, None]
    share = reduce((a - own).sigmoid(), "b (g r) t j -> b g t j", "mean", g=G)
    mean = running_mean(share, options.memory, logits.columns)
    logit = reduce(squashed(a), "b (g r) t j -> b g t j", "mean", g=G)
    return retention(Panel(start, stop, age, logit, mean)), age


def running_mean(x: Tensor, memory: float, rows: int = COLUMNS) -> Tensor:
    """:func:`attnzoo.algebra.forgetting.running_mean` of a panel ``[B, G, R, n]`` that begins with row and key 0.

    Within a chunk of ``rows``, and from chunk to chunk, it is a product with powers of ``memory``, none above 1.
    """
    R, n = x.shape[-2:]
    row = torch.arange(R, device=x.device)[:, None]
    first = row == torch.arange(n, device=x.device)
    x = F.pad(torch.where(first, x, (1 - memory) * x), (0, 0, 0, -R % rows))
    x = rearrange(x, "b g (m c) j -> b g m c j", c=rows)

    def powers(size: int, step: int, late: int) -> Tensor:
        gap = torch.arange(size, device=x.device)[:, None] - torch.arange(size, device=x.device) - late
        return (memory ** (step * gap.clamp(min=0).to(x.dtype))).masked_fill(gap < 0, 0.0)

    inside = powers(rows, 1, 0) @ x
    before = powers(x.shape[2], rows, 1) @ inside[..., -1, :]  # what each chunk begins with
    fade = memory ** torch.arange(1, rows + 1, dtype=x.dtype, device=x.device)
    mean = inside + fade[:, None] * before[..., None, :]
    return mean.flatten(2, 3)[..., :R, :].masked_fill(row < torch.arange(n, device=x.device), 0.0)


@torch.no_grad()
def _counts(logits: Logits, options: Forgetting) -> tuple[Tensor, Tensor]:
    """Keys that each row sees, ``[B or 1, 1, T]``, and how many pairs are not in the remember window."""
    tokens, old = [], []
    for start, stop in logits.panels():
        there = logits.exists(start, stop)
        tokens.append(F.pad(there.sum(-1), (start, 0)))
        old.append((there & (logits.age(start, stop) >= options.window)).sum())
    return torch.stack(tokens).sum(0), torch.stack(old).sum()


@dataclass(frozen=True, eq=False)
class _Goal:
    """What the retention of a panel should be, by the teacher's later rows.

    Args:
        logits: the teacher's.
        lse: ``[B, H, T]``.
        value: ``log |v|^2``, ``[B, G, T]`` float64.
        output: ``log |y|^2``, likewise.
        options: how utilities are pooled.
        temperature: tau.
        unit: what the utilities of each row are measured by, ``[B, G, T]``.
    """

    logits: Logits
    lse: Tensor
    value: Tensor
    output: Tensor
    options: Forgetting
    temperature: float
    unit: Tensor

    @staticmethod
    @torch.no_grad()
    def of(
        logits: Logits, values: Tensor, lse: Tensor, teacher: Tensor, options: Forgetting, temperature: float
    ) -> _Goal:
        (B, _, T), G = logits.shape, logits.heads
        output = reduce(teacher.double().square(), "b t (g r) v -> b g t", "sum", g=G)
        unit = output.new_zeros(B, G, T)
        value = least(values.double().square().sum(-1)).log()
        goal = _Goal(logits, lse, value, least(output).log(), options, temperature, unit)
        for start, stop in logits.panels():
            there = logits.exists(start, stop)
            utility = goal.utility(logits.panel(start, stop, there), there, start, stop)
            if options.normalize == "max":
                unit[..., start:] = unit[..., start:].maximum(utility.amax(-1))
            else:
                unit[..., start:] += utility.sum(-1)
        if options.normalize == "mean":
            unit /= _counts(logits, options)[0].clamp(min=1)
        return goal

    @torch.no_grad()
    def panel(self, a: Tensor, there: Tensor, start: int, stop: int) -> Tensor:
        """The target of a panel, ``[B, G, R, n]`` float64 in [0, 1]."""
        utility, unit = self.utility(a, there, start, stop), self.unit[..., start:, None]
        if self.options.normalize == "max":
            return utility / least(unit)
        return utility / least(utility + unit)

    def utility(self, a: Tensor, there: Tensor, start: int, stop: int) -> Tensor:
        """S of a panel: the contributions of all rows, pooled from the last to the first."""
        G = self.logits.heads
        weights = 2 * (a.double() - self.lse.double()[..., start:, None])
        log_s = rearrange(weights, "b (g r) t j -> b g r t j", g=G).logsumexp(2)
        log_s = log_s + self.value[:, :, None, start:stop] - self.output[..., start:, None]
        found = pooled(log_s.clamp(min=NOTHING), there, self.options, self.temperature)
        return found.masked_fill(~there | (found < math.exp(NOTHING + 1)), 0.0)


def pooled(log_s: Tensor, there: Tensor, options: Forgetting, temperature: float) -> Tensor:
    """:func:`attnzoo.algebra.forgetting.future_utility` of a panel, from the logarithms of its contributions.

    With ``"softmax"`` and a discount below 1 the exponentials of one row are no multiples of those of the next:
    each row then sums over all later ones, in time O(T) for every pair.

    Args:
        log_s: ``[B, G, R, n]`` float64.
        there: ``[B or 1, 1, R, n]``.
    """
    R = log_s.shape[-2]
    if options.pool == "softmax" and options.discount < 1:
        rows = []
        for t in range(R):
            age = torch.arange(R - t, dtype=log_s.dtype, device=log_s.device)[:, None]
            x = options.discount**age * log_s[..., t:, :].exp()
            w = (temperature * x).masked_fill(~there[..., t:, :], -torch.inf).softmax(-2)
            rows.append((w * x).sum(-2))
        return torch.stack(rows, -2).nan_to_num(0.0)
    fade = torch.arange(R, dtype=log_s.dtype, device=log_s.device)[:, None] * math.log(options.discount)
    log_x = (log_s + fade).masked_fill(~there, -torch.inf)  # all discounted from the panel's first row
    if options.pool == "max":
        return (log_x.flip(-2).cummax(-2).values.flip(-2) - fade).exp()
    logits = temperature * (log_x if options.pool == "power" else log_s.exp())
    logits = logits.masked_fill(~there, -torch.inf)
    total, weighed = (x.flip(-2).logcumsumexp(-2).flip(-2) for x in (logits, logits + log_x))
    return (weighed - total - fade).exp().nan_to_num(0.0)
