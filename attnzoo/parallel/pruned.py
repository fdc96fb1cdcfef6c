r"""Which keys a rank needs of the others, by the certificate of pruning, and the sending of these and no others.

The certificate drops a prefix of the keys for all rows of a fragment. Of each fragment and head six numbers say which:
the sum of its gates, the log of :math:`\sum_j e^{-c_j}`, its longest key and query, the largest :math:`c_t - s_{tt}`,
and whether a gate closes in it. All ranks get them, and each counts of its own keys how many every fragment needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attnzoo.algebra.block_decay import open_sums
from attnzoo.algebra.gate import Gate
from attnzoo.algebra.pruning import Prune, keys_behind_closed
from attnzoo.algebra.sums import running_sum
from attnzoo.algebra.transitions import heads_first, scaled_queries
from attnzoo.forms.caches.state import KVCache
from attnzoo.forms.readout import logits_of
from attnzoo.parallel.collectives import Works, swap
from attnzoo.parallel.fragments import Fragments
from attnzoo.parallel.rows import Rows, of_all_fragments
from attnzoo.precision import wide_dtype

UNSENT = 1 / 16  # the part of eps that keys may weigh that are not sent; the rest is for those that are not computed
SLACK = 1e-3  # of a logit: more than what lengths and scores of float32 are wrong by


def allowed(prune: Prune) -> Prune:
    """The pruning that a form may do of the keys that a rank has: eps without the part for keys that are not sent."""
    return replace(prune, eps=prune.eps * (1 - UNSENT))


@dataclass(frozen=True, eq=False)
class Needed:
    """The number of last keys of each fragment that the rows of each later one need.

    Args:
        fragments: of the row.
        counts: ``[fragments a, fragments b, B, heads]`` int64 on the host: of the keys of a, for the rows of b.
    """

    fragments: Fragments
    counts: Tensor

    @staticmethod
    @torch.no_grad()
    def of(rows: Rows, fragments: Fragments, heads: int) -> Needed:
        """The counts for these rows of this rank; ``heads`` of keys are sent."""
        found = [_Sums.of(piece) for piece in rows.cut(fragments)]
        (numbers,), _ = of_all_fragments(fragments, [one.numbers for one in found])
        everywhere = torch.stack(numbers)
        counts = torch.stack([
            _counts(one, fragments.table.index(row), everywhere, fragments, rows.options)
            for one, row in zip(found, fragments.own, strict=True)
        ])  # fmt: skip
        most = counts.unflatten(-1, (heads, -1)).amax(-1)  # of the query heads of a key head
        (of_all,), _ = of_all_fragments(fragments, list(most.double()))
        return Needed(fragments, torch.stack(of_all).long().cpu())

    def most(self, number: int) -> int:
        """The largest number of keys before fragment ``number`` that one of its heads needs."""
        return int(self.counts[:, number].sum(0).max())

    def hide(self, number: int, cache: KVCache, gate: Gate) -> tuple[KVCache, Gate]:
        """The cache and gate with what a head does not need behind a closed gate: it was not sent, and is zeros."""
        g, first = cache.log_decay, gate.log_decay
        assert g is not None
        assert first is not None
        S, counts = g.shape[1], self.counts[:, number].sum(0)  # [B, heads]
        at = (S - counts).to(g.device).repeat_interleave(g.shape[2] // counts.shape[1], 1)[:, None]  # [B, 1, H]
        g = g.masked_fill(torch.arange(S, device=g.device)[:, None] == at, -torch.inf)
        first = torch.cat([first[:, :1].masked_fill(at == S, -torch.inf), first[:, 1:]], 1)
        return replace(cache, log_decay=g), replace(gate, log_decay=first)

    @cached_property
    def by_rank(self) -> Tensor:
        """The number of each fragment's last keys that each rank needs, ``[fragments, ranks, B, heads]``; 0 for its own
        rank."""
        found = self.counts.new_zeros(len(self.counts), self.fragments.ranks, *self.counts.shape[2:])
        for number, row in enumerate(self.fragments.table):
            found[:, row.rank] = found[:, row.rank].maximum(self.counts[:, number])
        for number, row in enumerate(self.fragments.table):
            found[number, row.rank] = 0
        return found

    def send(self, works: Works, *rows: Tensor) -> tuple[Callable[[], list[list[Tensor]]], Tensor]:
        """A function that returns, for each tensor ``rows [B, n, heads or H, C]``, a list of each fragment's keys that
        this rank has; and the knot.

        It is called after ``works.wait()``. This rank has all keys of its own fragments, and of others as many of the
        last as some head needs, with zeros for heads that need fewer.
        """
        fragments, (B, heads), device = self.fragments, self.counts.shape[2:], rows[0].device
        table, rank = fragments.table, fragments.rank
        own = [table.index(row) for row in fragments.own]
        out = self.by_rank[own].transpose(0, 1).flatten(2)  # [ranks, fragments, B heads]
        ends = torch.tensor(fragments.sizes).cumsum(0).repeat(fragments.ranks)
        sent = _places(out.flatten(0, 1), ends, torch.tensor(fragments.count(rank)), torch.tensor(0), heads, device)
        order = sorted(range(len(table)), key=lambda number: table[number].rank)  # as they come, rank by rank
        into = self.by_rank[order, rank].flatten(1)
        most = into.amax(1)
        sizes = most * into.shape[1]
        slots = _places(into, most, most, sizes.cumsum(0) - sizes, heads, device)
        receives = [int(into[[table[n].rank == source for n in order]].sum()) for source in range(fragments.ranks)]
        grouped = [x.unflatten(2, (heads, -1)).flatten(3) for x in rows]
        *coming, knot = _Send.apply(  # type: ignore[no-untyped-call]
            fragments.group, out.sum((1, 2)).tolist(), receives, sent, works, *grouped
        )

        def arrived() -> list[list[Tensor]]:
            found = []
            for x, mine in zip(coming, rows, strict=True):
                blocks = x.new_zeros(int(sizes.sum()), x.shape[1]).index_copy(0, slots, x).split(sizes.tolist())
                here = {n: one.reshape(B, -1, *mine.shape[2:]) for n, one in zip(order, blocks, strict=True)}
                here.update(zip(own, mine.split(fragments.sizes, 1), strict=True))
                found.append([here[n] for n in range(len(table))])
            return found

        return arrived, knot


def _places(counts: Tensor, ends: Tensor, strides: Tensor, starts: Tensor, heads: int, device: torch.device) -> Tensor:
    """Where the last keys of P fragments are, ``counts [P, B heads]`` of each, among rows ``[B, stride, heads]``.

    Args:
        ends: where each fragment ends among its rows, ``[P]``.
        strides, starts: how many rows of each batch there are, and what comes before the first, ``[P]`` or one number.
    """
    number = torch.arange(counts.shape[1])
    last = counts.flatten().cumsum(0).view_as(counts)
    first = (number // heads * strides[..., None] + ends[:, None] - last) * heads + number % heads + starts[..., None]
    shift, of_each = torch.stack([first, counts]).flatten(1).to(device)
    total = int(counts.sum())
    begins: Tensor = shift.repeat_interleave(of_each, output_size=total)
    return begins + torch.arange(total, device=device) * heads


class _Send(torch.autograd.Function):
    """The keys of this rank at ``places`` to all others and of them to it, and their gradients back: one node."""

    @staticmethod
    def forward(
        ctx: Any, group: Any, sends: list[int], receives: list[int], places: Tensor, works: Works, *xs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.sizes, ctx.shapes = group, (sends, receives), [x.shape for x in xs]
        ctx.save_for_backward(places)
        found = [swap(group, x.flatten(0, 2)[places], sends, receives, works) for x in xs]
        return *found, xs[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (places,), (sends, receives) = ctx.saved_tensors, ctx.sizes
        found, works = [], Works()
        back = [swap(ctx.group, grad, receives, sends, works) for grad in grads[:-1]]
        works.wait()
        for shape, grad in zip(ctx.shapes, back, strict=True):
            wide = wide_dtype(grad.dtype)  # a key may have gradients of several ranks
            total = grad.new_zeros(shape[:3].numel(), shape[3], dtype=wide)
            found.append(total.index_add_(0, places, grad.to(wide)).to(grad.dtype).view(shape))
        return None, None, None, None, None, *found


@dataclass(frozen=True, eq=False)
class _Sums:
    """The numbers of one fragment that the certificate reads.

    Args:
        numbers: the six, ``[6, B, H]`` float64: the sum of the gates; the log of the sum of ``exp(-c_j)`` over all
            keys; the longest key; of rows before any closed gate the longest scaled query and the largest
            ``c_t - s_tt``; whether a gate is closed. Closed gates count as open, which makes the certificate stricter.
        tails: the log of the sum up to each key, ``[B, H, n]``.
        behind: keys that are behind the last closed gate, ``[B, H]``.
    """

    numbers: Tensor
    tails: Tensor
    behind: Tensor

    @staticmethod
    def of(piece: Rows) -> _Sums:
        H, gate = piece.q.shape[2], piece.gate.log_decay
        assert gate is not None
        q = scaled_queries(piece.q, piece.options.scale)
        k = heads_first(piece.k, H, q.dtype)
        g = heads_first(gate, H, torch.float64)
        c, closed = open_sums(g)
        tails = torch.logcumsumexp(-c, -1)
        lengths, low = q.norm(dim=-1).double(), c - logits_of((q * k).sum(-1), piece.options).double()
        shut, behind = torch.zeros_like(c[..., 0]), torch.zeros_like(c[..., 0])
        if closed is not None:
            lengths, low = lengths.masked_fill(closed > 0, 0.0), low.masked_fill(closed > 0, -torch.inf)
            shut = (closed[..., -1] > 0).double()
            behind = keys_behind_closed(g, torch.tensor([g.shape[-1] - 1], device=g.device))[..., 0]
        longest = k.norm(dim=-1).double().amax(-1)
        numbers = [c[..., -1], tails[..., -1], longest, lengths.amax(-1), low.amax(-1), shut]
        return _Sums(torch.stack(numbers), tails, behind.long())


def _counts(one: _Sums, number: int, everywhere: Tensor, fragments: Fragments, options: Any) -> Tensor:
    """How many of the last keys of fragment ``number``, of this rank, each fragment needs, ``[fragments, B, H]``.

    ``everywhere`` holds the six numbers of each fragment, ``[fragments, 6, B, H]``.
    """
    total, weight, longest, query, low, shut = everywhere.unbind(1)
    start = running_sum(total, 0) - total  # c before each fragment
    upper = query * longest.cummax(0).values
    if options.logit_bound is not None:
        upper = upper.minimum(options.logit_bound.double())
    worst = upper + low + start
    worst = worst.masked_fill(worst.isnan(), torch.inf)
    limit = math.log(options.prune.eps * UNSENT) - SLACK - worst
    before = torch.logcumsumexp(weight - start, 0)
    tails = one.tails - start[number][..., None]
    if number:
        tails = torch.logaddexp(before[number - 1][..., None], tails)
    n, a = tails.shape[-1], fragments.table[number]
    dropped = torch.searchsorted(tails.contiguous(), limit.permute(1, 2, 0).contiguous(), right=True).permute(2, 0, 1)
    counts = n - dropped.maximum(one.behind)
    between = running_sum(shut, 0) - shut - shut[: number + 1].sum(0) > 0  # a gate is closed in between
    counts = counts.masked_fill(between, 0)
    for other, b in enumerate(fragments.table):
        seen = n if options.window is None else max(0, options.window - 1 - (b.start - a.stop))
        counts[other].clamp_(max=seen if other > number else 0)
    return counts
