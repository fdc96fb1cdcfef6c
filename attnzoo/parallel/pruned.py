r"""Which keys a rank needs of the others, by the certificate of pruning, and the sending of these and no others.

The certificate drops a prefix of the keys for all rows of a fragment. Of each fragment and head six numbers say which:
the sum of its gates, the log of :math:`\sum_j e^{-c_j}`, its longest key and query, the largest :math:`c_t - s_{tt}`,
and whether a gate closes in it. All ranks get them, and each counts of its own keys how many every fragment needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.algebra.pruning import Prune, keys_behind_closed
from attnzoo.algebra.transitions import heads_first, open_sums, scaled_queries
from attnzoo.forms.caches.state import KVCache
from attnzoo.forms.readout import logits_of
from attnzoo.parallel.collectives import swap
from attnzoo.parallel.fragments import Fragments
from attnzoo.parallel.rows import Rows, of_all_fragments

UNSENT = 1 / 16  # the part of eps that keys may weigh that are not sent; the rest is for those that are not computed
SLACK = 1e-3  # of a logit: more than what lengths and scores of float32 are wrong by


def allowed(prune: Prune) -> Prune:
    """What a form may drop of the keys that a rank has."""
    return replace(prune, eps=prune.eps * (1 - UNSENT))


@dataclass(frozen=True, eq=False)
class Needed:
    """How many of the last keys of each fragment the rows of each later one need.

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
        """How many keys before fragment ``number`` any of its heads needs."""
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
        """Of each fragment, for each other rank: ``[fragments, ranks, B, heads]``; 0 for its own."""
        found = self.counts.new_zeros(len(self.counts), self.fragments.ranks, *self.counts.shape[2:])
        for number, row in enumerate(self.fragments.table):
            found[:, row.rank] = found[:, row.rank].maximum(self.counts[:, number])
        for number, row in enumerate(self.fragments.table):
            found[number, row.rank] = 0
        return found

    def send(self, *rows: Tensor) -> tuple[list[list[Tensor]], Tensor]:
        """Of each of this rank's ``rows [B, n, heads or H, C]``, those of each fragment that are here, and the knot.

        Of this rank's fragments all keys are; of others as many of the last as some head needs, with zeros for those
        that a head does not.
        """
        B, heads = self.counts.shape[2:]
        grouped = [x.unflatten(2, (heads, -1)).transpose(1, 2).flatten(3).contiguous() for x in rows]
        *sent, knot = _Send.apply(self, *grouped)  # type: ignore[no-untyped-call]
        each, found = len(sent) // len(rows), []
        for number, (x, own) in enumerate(zip(rows, grouped, strict=True)):
            mine, others = iter(own.split(self.fragments.sizes, 2)), iter(sent[number * each :])
            here = (next(mine if row.rank == self.fragments.rank else others) for row in self.fragments.table)
            found.append([y.transpose(1, 2).reshape(B, y.shape[2], *x.shape[2:]) for y in here])
        return found, knot

    def _parcels(self, source: int, target: int) -> list[_Parcel]:
        """What one rank sends another, a parcel per fragment."""
        at, found, stride = 0, [], self.fragments.count(source)
        for row in self.fragments.of_rank(source):
            counts = self.by_rank[self.fragments.table.index(row), target].flatten()
            at += row.size
            found.append(_Parcel(counts, at, stride))
        return found


@dataclass(frozen=True, eq=False)
class _Parcel:
    """The last keys of a fragment, as many for each of N heads as ``counts [N]`` says.

    Args:
        end: where the fragment ends among the rows of its rank.
        stride: rows of that rank.
    """

    counts: Tensor
    end: int
    stride: int

    @cached_property
    def total(self) -> int:
        return int(self.counts.sum())

    @cached_property
    def most(self) -> int:
        return int(self.counts.max())

    def rows(self, device: torch.device) -> Tensor:
        """Their places among the ``[N, rows]`` of the rank that sends them, flattened."""
        return self._places(self.stride, self.end, device)

    def slots(self, device: torch.device) -> Tensor:
        """Their places in ``[N, most]`` where they arrive, flattened."""
        return self._places(self.most, self.most, device)

    def _places(self, stride: int, end: int, device: torch.device) -> Tensor:
        counts, heads = self.counts, torch.arange(len(self.counts))
        shift = heads * stride + end - counts.cumsum(0)
        places = shift.to(device).repeat_interleave(counts.to(device), output_size=self.total)
        return places + torch.arange(self.total, device=device)


class _Send(torch.autograd.Function):
    """The parcels of this rank to all others and of them to it, and their gradients back: one node for all rows."""

    @staticmethod
    def forward(ctx: Any, needed: Needed, *xs: Tensor) -> tuple[Tensor, ...]:
        fragments, device = needed.fragments, xs[0].device
        ranks = range(fragments.ranks)
        out = [needed._parcels(fragments.rank, rank) for rank in ranks]
        into = [needed._parcels(rank, fragments.rank) for rank in ranks]
        ctx.group, ctx.shapes = fragments.group, [x.shape for x in xs]
        ctx.sends, ctx.receives = ([sum(one.total for one in parcels) for parcels in each] for each in (out, into))
        ctx.rows = [torch.cat([one.rows(device) for one in parcels]) for parcels in out]
        order = [row.rank for row in fragments.table if row.rank != fragments.rank]
        ctx.order = [(rank, order[:n].count(rank)) for n, rank in enumerate(order)]  # of the outputs: rank and slot
        ctx.slots = [[(one.slots(device), one.most) for one in parcels] for parcels in into]
        found = []
        for x in xs:
            flat = x.flatten(0, 2)
            got = swap(ctx.group, torch.cat([flat[rows] for rows in ctx.rows]), ctx.sends, ctx.receives)
            chunks = [
                list(part.split([len(at) for at, _ in slots]))
                for part, slots in zip(got.split(ctx.receives), ctx.slots, strict=True)
            ]
            for rank, slot in ctx.order:
                at, most = ctx.slots[rank][slot]
                full = x.new_zeros(x.shape[0] * x.shape[1] * most, x.shape[3])
                found.append(full.index_copy_(0, at, chunks[rank][slot]).view(*x.shape[:2], most, x.shape[3]))
        return *found, xs[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        found, each = [], len(ctx.order)
        for number, shape in enumerate(ctx.shapes):
            mine = grads[number * each : (number + 1) * each]
            by_rank: list[list[Tensor]] = [[] for _ in ctx.slots]
            for (rank, slot), grad in zip(ctx.order, mine, strict=True):
                by_rank[rank].append(grad.flatten(0, 2)[ctx.slots[rank][slot][0]])
            like = grads[-1].new_empty(0, shape[3], dtype=mine[0].dtype if mine else None)
            back = swap(ctx.group, torch.cat([like, *(x for xs in by_rank for x in xs)]), ctx.receives, ctx.sends)
            wide = torch.promote_types(back.dtype, torch.float32)  # a key may have gradients of several ranks
            total = back.new_zeros(shape[:3].numel(), shape[3], dtype=wide)
            for rows, part in zip(ctx.rows, back.split(ctx.sends), strict=True):
                total.index_add_(0, rows, part.to(wide))
            found.append(total.to(back.dtype).view(shape))
        return None, *found


@dataclass(frozen=True, eq=False)
class _Sums:
    """What the certificate asks of one fragment.

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
    start = total.cumsum(0) - total  # c before each fragment
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
    between = shut.cumsum(0) - shut - shut[: number + 1].sum(0) > 0  # a gate is closed in between
    counts = counts.masked_fill(between, 0)
    for other, b in enumerate(fragments.table):
        seen = n if options.window is None else max(0, options.window - 1 - (b.start - a.stop))
        counts[other].clamp_(max=seen if other > number else 0)
    return counts
