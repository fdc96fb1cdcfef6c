r"""Adaptive Computation Pruning (ACP) in reference form: certified block boundaries.

Keys 0..b may be dropped for a row block when their total weight in every row i is at most eps. With the
running gate sum c, :math:`U_i \ge \max_j s_{ij}`, any lower bound :math:`l_i` of the row's log-sum-exp (here
:math:`s_{ii}`) and :math:`n_b = \sum_{l \le b} e^{c_b - c_l}`,

.. math:: U_i - l_i + (c_i - c_b) + \log n_b \le \log \epsilon

is enough, because the weight of keys 0..b is at most :math:`e^{U_i + c_i} \sum_{l \le b} e^{-c_l} / Z_i`. Only
:math:`|R_t| \le 1` is used, so the bound serves ALiBi, FoX and PaTH-FoX alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from attnzoo.algebra.block_decay import open_sums
from attnzoo.algebra.gate import is_closed
from attnzoo.algebra.validation import check_flag
from attnzoo.errors import unknown

Bound = Literal["tail", "paper"]


@dataclass(frozen=True)
class Prune:
    """Which attention weights may be skipped: at most a mass ``eps`` per query row.

    Args:
        eps: largest total attention weight that may be dropped from one row, in (0, 1).
        bound: ``"tail"`` sums the weight of the keys that are dropped (the certificate at the top of
            ``attnzoo/algebra/pruning.py``); ``"paper"`` is the threshold of Lin et al., "Adaptive Computation Pruning
            for the Forgetting Transformer", 2025, section 3.

    Raises:
        ValueError: ``eps`` outside (0, 1) or an unknown ``bound``.
    """

    eps: float = math.exp(-10.0)
    bound: Bound = "tail"

    def __post_init__(self) -> None:
        if not isinstance(self.eps, (float, int)) or not 0.0 < self.eps < 1.0:  # torch 2.7 compiles no |
            raise ValueError(f"eps: expected a float in (0, 1), got {self.eps!r}")
        if self.bound not in get_args(Bound):
            raise unknown("bound", self.bound, get_args(Bound))

    @property
    def log_eps(self) -> float:
        return math.log(self.eps)


@dataclass(frozen=True)
class Evict:
    """The rule by which a cache evicts keys: no later row loses more than the weight ``eps`` over all evicted keys.

    Args:
        eps: largest total attention weight, in (0, 1).
        offload: move keys to the host's memory instead of evicting them, and bring them back for a row that would lose
            more than ``eps``. No bound on later queries is then needed.

    Raises:
        TypeError: ``offload`` is neither True nor False.
        ValueError: ``eps`` outside (0, 1).
    """

    eps: float = math.exp(-10.0)
    offload: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.eps, bool) or not isinstance(self.eps, (float, int)) or not 0.0 < self.eps < 1.0:
            raise ValueError(f"evict: expected a weight in (0, 1), got {self.eps!r}")
        check_flag("offload", self.offload)

    @staticmethod
    def of(evict: float | str | Evict) -> Evict:
        """The rule that a user's value stands for: a weight, ``"offload"``, or an object of this class.

        Raises:
            ValueError: none of these.
        """
        if isinstance(evict, Evict):
            return evict
        if isinstance(evict, str):
            if evict != "offload":
                raise ValueError(f"evict: expected a weight in (0, 1) or 'offload', got {evict!r}")
            return Evict(offload=True)
        return Evict(evict)


@dataclass(frozen=True, eq=False)
class QueryBounds:
    """Bounds of all later query rows, per head ``[H]`` (or per sequence and head, ``[B, H]``).

    Args:
        query: a bound of the length of a scaled query.
        own: a bound of minus a row's score with its own key.
        score: a bound of every score with an old key, or None to use ``query`` times the keys' norms.
    """

    query: Tensor
    own: Tensor
    score: Tensor | None = None

    def clone(self) -> QueryBounds:
        """A copy with its own tensors."""
        return QueryBounds(self.query.clone(), self.own.clone(), None if self.score is None else self.score.clone())

    def copy_(self, other: QueryBounds) -> None:
        """Copy the values of ``other`` in place."""
        self.query.copy_(other.query)
        self.own.copy_(other.own)
        if self.score is not None and other.score is not None:
            self.score.copy_(other.score)


def may_prune(queries: int, keys: int, rows: int = 128, cols: int = 64) -> bool:
    """Whether a block of rows begins after a whole block of keys; else no bound can prune any.

    Args:
        queries: T, the last of the keys.
        keys: S.
        rows: rows per block.
        cols: keys per block.
    """
    if torch.compiler.is_compiling():  # a compiled graph serves other lengths
        return True
    return keys - queries + (queries - 1) // rows * rows >= cols


def first_kept_keys(
    q: Tensor,
    k: Tensor,
    log_decay: Tensor,
    prune: Prune,
    logit_bound: Tensor | None = None,
    *,
    lower: Tensor | None = None,
    rows: int = 128,
    cols: int = 64,
) -> Tensor:
    """The first computed key of each block of rows; all keys before it may be pruned.

    Args:
        q: scaled queries ``[B, H, T, K]``, the last T of S tokens.
        k: keys ``[B, H, S, K]``; keys carried by non-expansive transitions serve as well.
        log_decay: gates ``[B, H, S]``, <= 0, closed ones too.
        prune: bound and eps.
        logit_bound: ``[H]``, a bound of every ``|q . k|``; the smaller of it and the bound from the norms counts. None:
            the norms alone.
        lower: l, a lower bound of each row's log-sum-exp, ``[B, H, T]``; None: the logit of its own key.
        rows: rows per block.
        cols: keys per block: boundaries are multiples of it.

    Returns:
        ``[B, H, ceil(T / rows)]`` int64, non-decreasing along the last axis.
    """
    T, S = q.shape[2], k.shape[2]
    with torch.no_grad():
        c, _ = open_sums(log_decay.double())
        if lower is None and prune.bound == "tail":
            lower = (q.double() * k[:, :, S - T :].double()).sum(-1)
        upper = q.double().norm(dim=-1) * k.double().norm(dim=-1).amax(-1)[..., None]
        behind = keys_behind_closed(log_decay, torch.arange(S - T, S, rows, device=q.device))
        return certified_starts(upper, c, prune, logit_bound, lower, behind, rows=rows, cols=cols)


def certified_starts(
    upper: Tensor, c: Tensor, prune: Prune, logit_bound: Tensor | None, lower: Tensor | None,
    behind: Tensor | None = None, *, rows: int, cols: int,
) -> Tensor:  # fmt: skip
    """The first computed key of each block of rows by the certificate, in float64, from norms and running sums.

    Args:
        upper: U, at least every score of each row, ``[B, H, T]``.
        c: running sums of the gates ``[B, H, S]`` in which closed ones count as open. That makes the sum over dropped
            keys larger and the certificate stricter.
        logit_bound: ``[H]`` or None.
        lower: l ``[B, H, T]``, which the bound ``"tail"`` needs.
        behind: keys that are behind a closed gate, ``[B, H, ceil(T / rows)]``, or None.
    """
    T, S = upper.shape[2], c.shape[2]
    starts = torch.arange(S - T, S, rows, device=c.device)
    if logit_bound is not None:
        upper = upper.minimum(logit_bound.double()[:, None])
    if prune.bound == "paper":
        worst = 2 * upper.amax(-1, keepdim=True) + math.log(S) + c[..., starts]
        tail = -c
    else:
        worst = torch.nn.functional.pad(upper - cast(Tensor, lower) + c[..., S - T :], (0, -T % rows), value=-math.inf)
        worst = worst.unflatten(-1, (-1, rows)).amax(-1)
        tail = torch.logcumsumexp(-c, -1)
    # keys up to b are dropped while worst + tail_b <= log eps: the tail only grows with b. A row of NaN prunes nothing.
    worst = worst.masked_fill(worst.isnan(), math.inf)
    count = torch.searchsorted(tail.contiguous(), (prune.log_eps - worst).contiguous(), right=True)
    if behind is not None:
        count = torch.maximum(count, behind)
    kept = torch.minimum(count, starts) // cols * cols
    # a backward pass over keys needs boundaries that never fall from one row block to the next
    monotone: Tensor = kept.flip(-1).cummin(-1).values
    return monotone.flip(-1)


def keys_behind_closed(log_decay: Tensor, at: Tensor) -> Tensor:
    """How many keys lie behind the last closed gate up to the tokens ``at``: ``[B, H, len(at)]``."""
    index = torch.arange(log_decay.shape[-1], device=log_decay.device)
    return torch.where(is_closed(log_decay), index, 0).cummax(-1).values[..., at]


def evictable(longest: Tensor, tails: Tensor, total: Tensor, log_eps: float, bounds: QueryBounds) -> Tensor:
    r"""How many of the first groups of keys no later row needs, whatever it asks: with b the last key of a group,

    .. math:: U_\mathrm{old} + U + (c_t - c_b) + \log n_b \le \log \epsilon

    where no later row's score with itself is below -U, and none with an old key above
    :math:`U_\mathrm{old} = Q \max_{j \le b} |k_j|`. The norms of old keys do not bound U, as later keys may be longer.
    Later gates only lower :math:`c_t`. The weight counts all keys up to b, those evicted before too, so evictions do
    not add up. The derivation is in the docs (pruning.11).

    Args:
        longest: the longest key up to the end of each of N groups, ``[B, H, N]``.
        tails: ``log n_b - c_b`` there, ``[B, H, N]`` float64, which never falls; closed gates count as open.
        total: c of the last token, ``[B, H]`` float64.
        log_eps: logarithm of the weight that a row may lose.
        bounds: Q and U.

    Returns:
        ``[B, H]`` int64, from 0 to N. The caller leaves out groups that are not complete.
    """
    return negligible(longest, tails, total, log_eps, bounds).cumprod(-1).sum(-1)


def negligible(longest: Tensor, tails: Tensor, total: Tensor, log_eps: float, bounds: QueryBounds) -> Tensor:
    """A mask ``[B, H, N]`` of the keys that, with all keys before them, no later row needs.

    The arguments are those of :func:`evictable` with single keys, in any order, in place of groups."""
    old = bounds.query.double()[..., None] * longest.double()
    if bounds.score is not None:
        old = old.minimum(bounds.score.double()[..., None])
    return old + bounds.own.double()[..., None] + total[..., None] + tails <= log_eps


def kept_fraction(
    first_kept: Tensor, keys: int, *, queries: int | None = None, rows: int = 128, cols: int = 64
) -> Tensor:
    """Share of the causal blocks that are computed, per head ``[H]``, mean over the batch.

    Args:
        first_kept: from :func:`first_kept_keys`, ``[B, H, N]``.
        keys: S, the number of keys.
        queries: T, the number of rows, which are the last of the keys; default: all of them.
        rows: rows per block.
        cols: keys per block.

    Raises:
        ValueError: the row blocks do not fit ``queries`` or ``keys``.
    """
    N, T = first_kept.shape[-1], keys if queries is None else queries
    if -(-T // rows) != N:
        raise ValueError(f"queries: expected {(N - 1) * rows + 1} to {N * rows} for {N} blocks of {rows} rows, got {T}")
    if keys < T:
        raise ValueError(f"keys: expected at least as many as the {T} queries, got {keys}")
    ends = keys - T + (torch.arange(1, N + 1, device=first_kept.device) * rows).clamp(max=T)
    causal = -(-ends // cols)
    kept = causal - first_kept // cols
    return kept.sum(-1).double().div(causal.sum()).mean(0)


def dropped_mass(weights: Tensor, first_kept: Tensor, *, rows: int = 128) -> Tensor:
    """The attention weight that pruning really drops, per row.

    Args:
        weights: unpruned softmax weights ``[B, H, T, S]``.
        first_kept: from :func:`first_kept_keys` with the same ``rows``.
        rows: rows per block.

    Returns:
        ``[B, H, T]``, by the certificate at most ``prune.eps``.
    """
    T, S = weights.shape[-2:]
    first = first_kept.repeat_interleave(rows, -1)[..., :T, None]
    return weights.masked_fill(torch.arange(S, device=weights.device) >= first, 0.0).sum(-1)
