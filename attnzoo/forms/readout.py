"""The softmax readout of a block of rows: masks, log-sum-exp, and the sink."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.algebra.block_decay import block_decay, decay_between
from attnzoo.algebra.gate import is_closed
from attnzoo.algebra.sums import sum_to_the_end
from attnzoo.algebra.values import readable
from attnzoo.forms.options import SoftmaxOptions
from attnzoo.kernels.common.constants import KEY_UNIT, NEAR_UNITS, ROW_UNIT


def least_logit(dtype: torch.dtype) -> float:
    """A finite logit below every score, which masks without the NaN of -inf - -inf."""
    return torch.finfo(dtype).min / 4


def logits_of(scores: Tensor, given: SoftmaxOptions, decay: Tensor | None = None) -> Tensor:
    """``s + d``, the logits of scaled scores, capped where that is asked for, and of the decays between their tokens
    (None: without one).

    All reference forms make their logits here.
    """
    if given.softcap is not None:
        scores = given.softcap * (scores / given.softcap).tanh()
    return scores if decay is None else scores + decay


@dataclass(frozen=True, eq=False)
class Band:
    """The window of each of S tokens: its own key and those of tokens before it, ``window`` in all without padding.

    Args:
        window: tokens, padding not counted.
        starts: the first visible key of each token, ``[B or 1, S]``.
        padded: whether there is padding, so that the first visible key must be read from ``starts``.
    """

    window: int
    starts: Tensor
    padded: bool

    @staticmethod
    def of(window: int | None, valid: Tensor | None, tokens: int, device: torch.device) -> Band | None:
        """The band over ``tokens`` tokens with mask ``valid [B, tokens]``; None where the window hides nothing."""
        if window is None or window >= tokens:
            return None
        if valid is None:
            starts = torch.arange(tokens, device=device)[None] - (window - 1)
            return Band(window, starts.clamp(min=0), False)
        rank = valid.cumsum(1)
        return Band(window, torch.searchsorted(rank, rank - window, right=True), True)

    def first(self, row: int) -> int:
        """The first visible key of all rows from ``row`` on; 0 where reading it would wait for the device."""
        if not self.padded:
            return max(0, row - self.window + 1)
        return int(self.starts[:, row].min()) if readable(self.starts) else 0

    def hidden(self, start: int, stop: int, first: int) -> Tensor:
        """The mask of keys ``first .. stop`` beyond the window of rows ``start .. stop``, ``[B or 1, 1, C, n]``."""
        keys = torch.arange(first, stop, device=self.starts.device)
        return (keys < self.starts[:, start:stop, None])[:, None]


def block_bias(
    log_decay: Tensor, C: int, valid: Tensor | None, first_kept: Tensor | None, hidden: Tensor | None
) -> Tensor:
    """The decays ``[B, H, C, S]`` of a block of C rows over the keys up to it, with a least logit at masked keys; what
    stands after a row is not defined.

    Args:
        log_decay: gates of all S tokens, ``[B, H, S]``, closed ones too; the last C are the block's own.
        valid: mask of keys that are no padding, ``[B, 1 or H, S]``, or None for all.
        first_kept: first computed key of the block, ``[B, H]``, or None.
        hidden: mask of keys beyond a row's window, ``[B or 1, 1, C, S]`` bool, or None.
    """
    S, least = log_decay.shape[-1], least_logit(log_decay.dtype)
    bias = decays_over(log_decay, S - C) if S > C else decay_between(log_decay)
    if valid is not None:
        bias = bias.masked_fill(~valid[..., None, :], least)
    if first_kept is not None:
        bias = bias.masked_fill(torch.arange(S, device=bias.device) < first_kept[..., None, None], least)
    return bias if hidden is None else bias.masked_fill(hidden, least)


def block_logits(scores: Tensor, bias: Tensor, given: SoftmaxOptions) -> Tensor:
    """The logits ``[B, H, C, S]`` of a block of rows; -inf at later keys and where weights would be denormal.

    Args:
        scores: ``[B, H, C, S]``, scaled. Keys after a row are not read.
        bias: from :func:`block_bias`.
        given: options of the call.
    """
    future = later_keys(scores.shape[-2], scores.shape[-1], scores.device)
    logits = logits_of(scores, given, bias).masked_fill_(future, -torch.inf)
    tiny = 0.8 * math.log(torch.finfo(scores.dtype).tiny)  # smaller exponentials would be denormals, which are slow
    return logits.masked_fill_(logits < logits.detach().amax(-1, keepdim=True) + tiny, -torch.inf)


def later_keys(C: int, S: int, device: torch.device) -> Tensor:
    """The mask ``[C, S]`` of the keys after each of the last C of S tokens."""
    return torch.ones(C, S, dtype=torch.bool, device=device).triu(S - C + 1)


def decays_over(log_decay: Tensor, P: int) -> Tensor:
    """The log-decays from all S tokens to those after the first P, ``[B, H, S - P, S]``, of gates ``[B, H, S]``; 0 from
    later tokens."""
    inside = block_decay(log_decay[..., P:])
    return torch.cat([inside.entry[..., None] + decay_to(log_decay, P)[..., None, :], inside.between], -1)


def near_lse(
    q: Tensor, k: Tensor, log_decay: Tensor, valid: Tensor | None, band: Band | None, given: SoftmaxOptions
) -> Tensor:
    """Log-sum-exp of each row over near keys, a lower bound of the whole row's: what the kernels of FoX prune by.

    Near keys are those of the row's own unit of ``ROW_UNIT`` rows, and ``NEAR_UNITS`` units of keys before it.

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
    """The log-sum-exp ``[B, H, C]`` of a block of rows over the keys from ``first`` up to it, in few passes over the
    scores.

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
    own = scores[..., P:].add_(inside.between).masked_fill_(later_keys(C, C, scores.device), -torch.inf)
    lse = own.logsumexp(-1)
    if P:
        before = scores[..., :P].add_(decay_to(log_decay, P)[..., None, :]).logsumexp(-1)
        lse = torch.logaddexp(lse, before + inside.entry)
    return lse


def decay_to(log_decay: Tensor, P: int) -> Tensor:
    """The log-decay from each of the first P keys to the last of them, summed backwards, ``[..., P]``."""
    if not P:  # torch.compile before 2.8 cannot pad an empty tensor
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
    """The output o ``[B, H, T, V]`` and log-sum-exp ``[B, H, T]`` after adding the logit ``sink [H]`` with value 0."""
    if sink is None or lse is None:
        return o, lse
    sink = sink.to(lse.dtype)[:, None]
    return o * (lse - sink).sigmoid()[..., None], torch.logaddexp(lse, sink)
