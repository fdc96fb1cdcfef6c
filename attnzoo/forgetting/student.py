r"""The student of One-Pass Forgetting with memory O(T), for any softmax variant; :mod:`attnzoo.forgetting.rules`
defines it.

Every scan along time (the minimum so far, the running mean of attention, the utility pooled over later rows) runs over
the rows of one key. So a call is cut into *panels* of few keys with all their rows, each of which holds the whole scan.
Blocks of C rows would have to pass scan states on and keep T / C times T numbers for the backward pass. A panel adds to
three sums per row,

.. math:: N_t = \sum_j e^{a_{tj} + B_{tj} - L_t} v_j, \quad Z_t = \sum_j e^{a_{tj} + B_{tj} - L_t}

and the expected number of kept keys, with the teacher's log-sum-exp L as the constant: no bias is above 0 or below
:math:`-B_{max}`, so that Z is in :math:`[e^{-B_{max}}, 1]`. The output is N / Z. The backward pass computes each panel
again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnzoo.algebra.gate import expand_heads
from attnzoo.algebra.values import in_transform
from attnzoo.forgetting.panels import Logits
from attnzoo.forgetting.rules import (
    Forgetting,
    divergence,
    excess,
    expected_kept,
    forgetful_bias,
    full_bias,
    least,
    squashed,
)
from attnzoo.forgetting.target import CHUNK, Goal, counts, so_far
from attnzoo.forms.options import existing
from attnzoo.forms.readout import least_logit


@dataclass(frozen=True, eq=False)
class Panel:
    """The n keys ``start .. stop`` with the R rows from ``start`` on.

    Args:
        start: the first key, which is the first row too.
        stop: the end of the keys.
        age: tokens from key to row, ``[B or 1, 1, R, n]``; negative above the diagonal.
        logits: :func:`~attnzoo.forgetting.rules.squashed`, mean over the query heads of a key head, ``[B, G, R, n]``;
            None where the network reads no pairs. No gradient flows into it.
        attention: :func:`~attnzoo.forgetting.rules.running_mean` of the attention to the key, of the same shape; None
            likewise.
    """

    start: int
    stop: int
    age: Tensor
    logits: Tensor | None = None
    attention: Tensor | None = None


Retention = Callable[[Panel], Tensor]  # a panel -> the logits of r, [B, G, R, n]


@dataclass(frozen=True, eq=False)
class Forgotten:
    """The output of a student and the terms of its loss.

    Args:
        o: ``[B, T, H, V]``.
        distillation: L_r, or None where it was not computed.
        excess: the rows' :func:`~attnzoo.forgetting.rules.excess` over the budget ``[B, G, T]``, or None where it was
            not computed.
        kept: expected share of its tokens that a row still sees, mean over all rows.
    """

    o: Tensor
    distillation: Tensor | None = None
    excess: Tensor | None = None
    kept: Tensor | None = None

    @property
    def budget(self) -> Tensor | None:
        """L_b of the layer alone, or None where it was not computed."""
        return None if self.excess is None else self.excess.abs().sum()


def forgetful_attention(
    logits: Logits, v: Tensor, lse: Tensor, retention: Retention, options: Forgetting, temperature: float, *,
    teacher: Tensor | None = None, sink: Tensor | None = None, shares: Tensor | None = None, losses: bool = False,
) -> Forgotten:  # fmt: skip
    """The student's output, and the losses of its retention.

    Args:
        logits: the teacher's logits, in panels.
        v: ``[B, T, G, V]``.
        lse: the teacher's log-sum-exp per row ``[B, T, H]``, with the sink's logit in the sum.
        retention: a function of a panel that returns the logits of r.
        options: see :class:`~attnzoo.forgetting.rules.Forgetting`.
        temperature: tau.
        teacher: the teacher's output ``[B, T, H, V]``; L_r is computed where it is given.
        sink: ``[H]`` logits without a value.
        shares: each key head's share of the budget, ``[G]`` with mean 1; None for equal shares.
        losses: compute L_b and the share of retained keys.
    """
    (B, H, T), G = logits.shape, logits.heads
    dtype = logits.own.dtype
    if logits.valid is not None:
        [v] = existing(logits.valid, v)
    values, lse = v.to(dtype).transpose(1, 2), rearrange(lse.detach().to(dtype), "b t h -> b h t")
    goal = None if teacher is None else Goal.of(logits, values, lse, teacher, options, temperature)

    def panel(start: int, stop: int) -> tuple[Tensor, ...]:
        there = logits.exists(start, stop)
        a = logits.panel(start, stop, there)
        x, age, _ = retention_of(logits, a, start, stop, retention, options)
        r = remembered_of(x, age, there, options)
        bias = expand_heads(forgetful_bias(r, options, temperature), H, 1)
        weights = (logits.pruned(a, start, stop) + bias - lse[..., start:, None]).exp()
        N = weights @ expand_heads(values[:, :, start:stop], H, 1)
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
    tokens, old = counts(logits, options)
    distilled = None if goal is None else loss / (old * (B // logits.position.shape[0]) * G).clamp(min=1)
    return Forgotten(o, distilled, *kept_terms(kept, tokens, options, shares) if losses else (None, None))


def kept_terms(kept: Tensor, tokens: Tensor, options: Forgetting, shares: Tensor | None) -> tuple[Tensor, Tensor]:
    """The rows' excess over the budget, and the mean share of their tokens that rows still see.

    Args:
        kept: the expected numbers of these, ``[B, G, T]``.
        tokens: the numbers of tokens, ``[B or 1, 1, T]``.
    """
    tokens, rows = tokens.expand(kept.shape), tokens > 0
    share = (kept.detach() / tokens.clamp(min=1)).sum() / rows.expand(kept.shape).sum().clamp(min=1)
    return excess(kept, tokens, options, shares), share


@dataclass(frozen=True, eq=False)
class LastRow:
    """The scans of all keys at the last row, from which a cache continues.

    Args:
        kept: the least retention so far, ``[B, G, T]``.
        attention: the running mean of the attention to the key, ``[B, G, T]``; None where the network reads no pairs.
        carried: keys carried to the last row, ``[B, H, T, K]``; None where no transition changes keys.
    """

    kept: Tensor
    attention: Tensor | None = None
    carried: Tensor | None = None


def hard_attention(
    logits: Logits, v: Tensor, retention: Retention, options: Forgetting, sink: Tensor | None = None
) -> tuple[Tensor, LastRow]:
    """The student's output in the limit of large tau: each row reads only keys whose retention never fell below the
    threshold, at their full weight, as with a cache that evicts the others.

    Args:
        logits, v, retention, options, sink: as in :func:`forgetful_attention`.

    Returns:
        o ``[B, T, H, V]``, and the scans at the last row.
    """
    (B, H, T), G, dtype = logits.shape, logits.heads, logits.own.dtype
    if logits.valid is not None:
        [v] = existing(logits.valid, v)
    values, nothing = v.to(dtype).transpose(1, 2), least_logit(dtype)
    o, lse = values.new_zeros(B, H, T, values.shape[-1]), values.new_full((B, H, T), nothing)
    if sink is not None:
        lse = sink.to(dtype)[:, None].expand(B, H, T)
    last = torch.full((B,), T - 1, device=v.device)
    if logits.valid is not None:  # the last token of each sequence
        last = torch.where(logits.valid, torch.arange(T, device=v.device), 0).amax(1)
    kept, means = [], []
    for start, stop in logits.panels():
        there = logits.exists(start, stop)
        a = logits.panel(start, stop, there)
        x, age, mean = retention_of(logits, a, start, stop, retention, options)
        r = remembered_of(x, age, there, options)
        gone = expand_heads(r < options.threshold, H, 1)
        a = logits.pruned(a, start, stop).clamp(min=nothing).masked_fill(gone, nothing)
        part, own = a.softmax(-1) @ expand_heads(values[:, :, start:stop], H, 1), a.logsumexp(-1)
        own, part = F.pad(own, (start, 0), value=nothing), F.pad(part, (0, 0, start, 0))
        both = torch.logaddexp(lse, own)
        o = o * (lse - both).exp()[..., None] + part * (own - both).exp()[..., None]
        lse = both
        row = (last - start).clamp(min=0)[:, None, None, None].expand(B, G, 1, stop - start)
        kept.append(r.gather(2, row)[:, :, 0])
        if mean is not None:
            means.append(mean.gather(2, row)[:, :, 0])
    carried = None
    if logits.blocks is not None:
        ends = [logits.carried(n, logits.blocks)[1].mT for n in range(logits.blocks.q.shape[2])]
        carried = torch.cat(ends, 2)[:, :, :T]
    found = LastRow(torch.cat(kept, -1), torch.cat(means, -1) if means else None, carried)
    return rearrange(o, "b h t v -> b t h v").to(v.dtype), found


def remembered_of(x: Tensor, age: Tensor, there: Tensor, options: Forgetting) -> Tensor:
    """:func:`attnzoo.forgetting.rules.remembered` of a panel, from the logits of retention.

    The retention of a network of keys falls with age and so is its own running minimum.
    """
    if not options.of_pairs:
        return x.sigmoid().masked_fill(age < options.window, 1.0)
    r = x.sigmoid().masked_fill((age < options.window) | ~there, 1.0)
    return -so_far(-r, 0.0, largest=True) if options.monotone else r  # running minimum


def retention_of(
    logits: Logits, a: Tensor, start: int, stop: int, retention: Retention, options: Forgetting
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Logits of r ``[B, G, R, n]``, ages, and the running mean of attention (None where not needed) of a panel."""
    age, G = logits.age(start, stop), logits.heads
    if not options.of_pairs:
        return retention(Panel(start, stop, age)), age, None
    a, own = a.detach(), logits.own.detach()[..., start:, None]
    share = reduce((a - own).sigmoid(), "b (g r) t j -> b g t j", "mean", g=G)
    mean = running_mean(share, options.memory)
    logit = reduce(squashed(a), "b (g r) t j -> b g t j", "mean", g=G)
    return retention(Panel(start, stop, age, logit, mean)), age, mean


def running_mean(x: Tensor, memory: float, rows: int = CHUNK) -> Tensor:
    """:func:`attnzoo.forgetting.rules.running_mean` of a panel ``[B, G, R, n]`` that begins with row and key 0.

    Within a chunk of ``rows`` rows and across chunks it is a matrix product with powers of ``memory``, all <= 1.
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
    before = powers(x.shape[2], rows, 1) @ inside[..., -1, :]  # the mean before each chunk
    fade = memory ** torch.arange(1, rows + 1, dtype=x.dtype, device=x.device)
    mean = inside + fade[:, None] * before[..., None, :]
    return mean.flatten(2, 3)[..., :R, :].masked_fill(row < torch.arange(n, device=x.device), 0.0)
