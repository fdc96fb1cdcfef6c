"""From the logits of a block of rows to its output: what is hidden from a row, the softmax, and the sink."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.algebra.gate import is_closed
from attnzoo.algebra.sums import sum_to_the_end
from attnzoo.algebra.transitions import block_decay, decay_between
from attnzoo.algebra.values import readable
from attnzoo.forms.options import SoftmaxOptions
from attnzoo.kernels.common.constants import KEY_UNIT, NEAR_UNITS, ROW_UNIT


def least_logit(dtype: torch.dtype) -> float:
    """A logit that is below every score, and whose arithmetic never makes a NaN, as that of -inf would."""
    return torch.finfo(dtype).min / 4


def logits_of(scores: Tensor, given: SoftmaxOptions, decay: Tensor | None = None) -> Tensor:
    """``s + d``, the logits of scaled scores and of the decays between their tokens (None: without one).

    All reference forms make their logits here.
    """
    return scores if decay is None else scores + decay


@dataclass(frozen=True, eq=False)
class Band:
    """Which keys a window lets each of S tokens see: itself and those before it that exist, ``window`` in all.

    Args:
        window: tokens, padding not counted.
        starts: the first key that each token sees, ``[B or 1, S]``.
        padded: whether some tokens do not exist; then ``starts`` must be read to know where it begins.
    """

    window: int
    starts: Tensor
    padded: bool

    @staticmethod
    def of(window: int | None, valid: Tensor | None, tokens: int, device: torch.device) -> Band | None:
        """The band over ``tokens`` tokens of which ``valid [B, tokens]`` exist; None where the window hides nothing."""
        if window is None or window >= tokens:
            return None
        if valid is None:
            starts = torch.arange(tokens, device=device)[None] - (window - 1)
            return Band(window, starts.clamp(min=0), False)
        rank = valid.cumsum(1)
        return Band(window, torch.searchsorted(rank, rank - window, right=True), True)

    def first(self, row: int) -> int:
        """The first key that any row from ``row`` on may see; 0 where that cannot be known without waiting."""
        if not self.padded:
            return max(0, row - self.window + 1)
        return int(self.starts[:, row].min()) if readable(self.starts) else 0

    def hidden(self, start: int, stop: int, first: int) -> Tensor:
        """Which of the keys ``first .. stop`` are too old for the rows ``start .. stop``, ``[B or 1, 1, C, n]``."""
        keys = torch.arange(first, stop, device=self.starts.device)
        return (keys < self.starts[:, start:stop, None])[:, None]


def block_logits(
    scores: Tensor, log_decay: Tensor, valid: Tensor | None, first_kept: Tensor | None, hidden: Tensor | None,
    given: SoftmaxOptions,
) -> Tensor:  # fmt: skip
    """Logits of a block of rows over the keys up to it, ``[B, H, C, S]``; -inf where the weight is nothing.

    Args:
        scores: ``[B, H, C, S]``, scaled; the last C keys are the block's own. Later ones than a row are not read.
        log_decay: gates of all S tokens, ``[B, H, S]``, closed ones too.
        valid: keys that exist, ``[B, 1 or H, S]``, or None for all.
        first_kept: first key that the block may see, ``[B, H]``, or None.
        hidden: keys that a row may not see, ``[B or 1, 1, C, S]`` bool, or None.
        given: options of the call.
    """
    (C, S), least = scores.shape[-2:], least_logit(scores.dtype)
    P = S - C
    if P:
        inside = block_decay(log_decay[..., P:])
        bias = torch.cat([inside.entry[..., None] + decay_to(log_decay, P)[..., None, :], inside.between], -1)
    else:
        bias = decay_between(log_decay)
    logits = logits_of(scores, given, bias).clamp(min=least)
    if valid is not None:
        logits = logits.masked_fill(~valid[..., None, :], least)
    if first_kept is not None:
        logits = logits.masked_fill(torch.arange(S, device=scores.device) < first_kept[..., None, None], least)
    if hidden is not None:
        logits = logits.masked_fill(hidden, least)
    future = torch.ones(C, S, dtype=torch.bool, device=scores.device).triu(P + 1)
    logits = logits.masked_fill(future, -torch.inf)
    tiny = 0.8 * math.log(torch.finfo(scores.dtype).tiny)  # exponentials below it would be slow denormal numbers
    return logits.masked_fill(logits < logits.detach().amax(-1, keepdim=True) + tiny, -torch.inf)


def near_lse(
    q: Tensor, k: Tensor, log_decay: Tensor, valid: Tensor | None, band: Band | None, given: SoftmaxOptions
) -> Tensor:
    """Log-sum-exp of each row over near keys, a lower bound of the whole row's: what the kernels of FoX prune by.

    Near are the keys of a row's own ``ROW_UNIT`` rows and of ``NEAR_UNITS`` units of keys before them.

    Args:
        q: scaled queries ``[B, H, T, K]``, the last T of S tokens.
        k: ``[B, H, S, K]``.
        log_decay: ``[B, H, S]``.
        valid: keys that exist, ``[B, S]``, or None for all.
        band: which keys a window lets the S tokens see, or None for all.
        given: options of the call.

    Returns:
        ``[B, H, T]``.
    """
    T, S = q.shape[2], k.shape[2]
    found = []
    with torch.no_grad():
        for start in range(0, T, ROW_UNIT):
            stop = min(start + ROW_UNIT, T)
            row, end = S - T + start, S - T + stop
            first = max(0, row // KEY_UNIT - NEAR_UNITS) * KEY_UNIT
            scores = q[:, :, start:stop] @ k[:, :, first:end].mT
            found.append(block_lse(scores, log_decay[..., first:end], first, valid, band, given))
    return torch.cat(found, -1)


def block_lse(
    scores: Tensor, log_decay: Tensor, first: int, valid: Tensor | None, band: Band | None, given: SoftmaxOptions
) -> Tensor:
    """Log-sum-exp ``[B, H, C]`` of a block of rows over the keys from ``first`` up to it; reads the matrix few times.

    Args:
        scores: ``[B, H, C, n]``, scaled; the last C keys are the block's own. Changed.
        log_decay: gates of these n tokens, ``[B, H, n]``.
        valid: keys that exist, of all tokens, ``[B, S]``, or None for all.
        band: which keys a window lets the S tokens see, or None for all.
        given: options of the call.
    """
    C, n = scores.shape[-2:]
    P, scores = n - C, logits_of(scores, given)
    if valid is not None:
        scores.masked_fill_(~valid[:, None, None, first : first + n], -torch.inf)
    if band is not None:
        scores.masked_fill_(band.hidden(first + P, first + n, first), -torch.inf)
    inside = block_decay(log_decay[..., P:])
    future = torch.ones(C, C, dtype=torch.bool, device=scores.device).triu(1)
    lse = scores[..., P:].add_(inside.between).masked_fill_(future, -torch.inf).logsumexp(-1)
    if P:
        before = scores[..., :P].add_(decay_to(log_decay, P)[..., None, :]).logsumexp(-1)
        lse = torch.logaddexp(lse, before + inside.entry)
    return lse


def decay_to(log_decay: Tensor, P: int) -> Tensor:
    """The decay of each of the first P keys up to the last of them, summed from there backwards, ``[..., P]``."""
    if not P:  # a compiler before torch 2.8 cannot pad what is empty
        return log_decay[..., :0]
    later = log_decay[..., 1:P]
    later = F.pad(later.masked_fill(is_closed(later), -torch.inf), (0, 1))
    return sum_to_the_end(later, -1)


def readout(logits: Tensor, v: Tensor, given: SoftmaxOptions) -> tuple[Tensor, Tensor | None]:
    """The softmax of logits ``[..., C, S]`` times v ``[..., S, V]``, and the log-sum-exp ``[..., C]`` where it is asked
    for or a sink needs it, or None."""
    with_lse = given.return_lse or given.sink is not None
    return logits.softmax(-1) @ v, logits.logsumexp(-1) if with_lse else None


def attend_with_sink(o: Tensor, lse: Tensor | None, sink: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """o ``[B, H, T, V]`` and its log-sum-exp ``[B, H, T]`` with a further logit per head, ``sink [H]``, of value 0."""
    if sink is None or lse is None:
        return o, lse
    sink = sink.to(lse.dtype)[:, None]
    return o * (lse - sink).sigmoid()[..., None], torch.logaddexp(lse, sink)
