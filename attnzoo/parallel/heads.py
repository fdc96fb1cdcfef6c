"""Heads for tokens: each rank gets all tokens of some heads, and any form serves (Jacobs et al., "Ulysses", 2023)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnzoo.algebra.gate import Gate, expand_heads
from attnzoo.algebra.parts import PARTS
from attnzoo.parallel.collectives import exchange, gather
from attnzoo.parallel.fragments import Fragments
from attnzoo.parallel.rows import Rows

MARGIN = 16.0  # of log decays: a key that far back has no weight, more or less


def unshared(heads: int, ranks: int) -> str:
    """Why so many query heads cannot be shared out, or ""."""
    return "" if heads % ranks == 0 else f"expected query heads that {ranks} ranks can share, got {heads}"


def dealt(rows: Rows, fragments: Fragments) -> tuple[Rows, Tensor | None]:
    """The rows with their heads in an order by which ranks get equal shares of what pruning keeps, and that order of
    the query heads; None where nothing is pruned.

    A head keeps about as many keys before a row as its mean decay lets weigh something. Heads are dealt from the one
    that keeps most on, to and fro, so that ranks know their turn without asking the host.
    """
    g, (H, G, W) = rows.gate.log_decay, (rows.q.shape[2], rows.k.shape[2], fragments.ranks)
    if getattr(rows.options, "prune", None) is None or g is None:
        return rows, None
    groups = G if G % W == 0 else H
    with torch.no_grad():
        if g.ndim > 1:
            (of_ranks,), _ = gather(fragments.group, W, g.double().sum((0, 1)))
            g = of_ranks.sum(0) / (fragments.tokens * len(rows.q))
        kept = 1 / (1 / fragments.tokens - g / MARGIN)  # keys, [H]
        turns = kept.unflatten(0, (groups, -1)).sum(1).argsort(descending=True, stable=True).unflatten(0, (-1, W))
        turns[1::2] = turns[1::2].flip(1)
        key_heads = turns.T.flatten()
        heads = (key_heads[:, None] * (H // groups) + torch.arange(H // groups, device=g.device)).flatten()

    def part(name: str) -> Tensor:
        x: Tensor = getattr(rows.gate, name)
        if x.ndim == 1:
            return x[heads] if name == "log_decay" else x
        return x if x.shape[2] == 1 and PARTS[name].per_query_head else ordered(x)

    def ordered(x: Tensor) -> Tensor:
        x = _divisible(x, H, W)
        return x.index_select(2, heads if x.shape[2] == H else key_heads)

    gate = Gate(**{name: part(name) for name in rows.gate.parts})
    q, k, v = map(ordered, (rows.q, rows.k, rows.v))
    return Rows(q, k, v, gate, _per_head(rows.options, lambda x: x[heads], ordered)), heads


def by_heads(rows: Rows, fragments: Fragments) -> Rows:
    """The inputs of all tokens for this rank's share of the heads."""
    H, W = rows.q.shape[2], fragments.ranks

    def shared(x: Tensor) -> Tensor:
        return _to_heads(_divisible(x, H, W), fragments)

    def part(name: str) -> Tensor:
        x = getattr(rows.gate, name)
        if x.ndim == 1:  # of every token: a number per head, or angles for all of them
            return _share(x, fragments) if name == "log_decay" else x
        alike = x.shape[2] == 1 and PARTS[name].per_query_head  # all heads
        return _to_heads(x, fragments) if alike else shared(x)

    q, k, v = map(shared, (rows.q, rows.k, rows.v))
    options = _per_head(rows.options, lambda x: _share(x, fragments), shared)
    return Rows(q, k, v, Gate(**{name: part(name) for name in rows.gate.parts}), options)


def by_tokens(x: Tensor, fragments: Fragments, dealt_as: Tensor | None) -> Tensor:
    """This rank's rows of all heads, from all tokens ``[B, T, heads, ...]`` of its share of them; see :func:`dealt`."""
    order = torch.cat([fragments.index(rank) for rank in range(fragments.ranks)]).to(x.device)
    counts, own = [fragments.count(rank) for rank in range(fragments.ranks)], fragments.count(fragments.rank)
    sent = x.transpose(0, 1).index_select(0, order)  # [T, B, heads, ...], rank by rank
    got = exchange(fragments.group, sent, counts, [own] * fragments.ranks)
    by_rank: Tensor = got.unflatten(0, (fragments.ranks, own))
    found = by_rank.movedim(0, 2).flatten(2, 3).transpose(0, 1)
    return found if dealt_as is None else found.index_select(2, dealt_as.argsort())


def _to_heads(x: Tensor, fragments: Fragments) -> Tensor:
    """All tokens ``[B, T, heads / ranks, ...]`` from this rank's ``[B, n, heads, ...]``; one head goes to all."""
    W = fragments.ranks
    counts, own = [fragments.count(rank) for rank in range(W)], fragments.count(fragments.rank)
    x = x.transpose(0, 1)
    if x.shape[2] == 1:
        x = x.expand(*x.shape[:2], W, *x.shape[3:])
    sent = x.unflatten(2, (W, -1)).movedim(2, 0).flatten(0, 1)  # [W * n, B, heads / W, ...]
    got = exchange(fragments.group, sent, [own] * W, counts)
    order = torch.cat([fragments.index(rank) for rank in range(W)])
    return got.index_select(0, order.argsort().to(x.device)).transpose(0, 1)


def _divisible(x: Tensor, heads: int, ranks: int) -> Tensor:
    """``[B, n, heads, ...]`` that ranks can share: a copy for each query head where key heads are too few."""
    return x if x.shape[2] % ranks == 0 else expand_heads(x, heads)


def _per_head(options: Any, fn: Callable[[Tensor], Tensor], of_rows: Callable[[Tensor], Tensor]) -> Any:
    """The options with ``fn`` of each that has a number per query head, and ``of_rows`` of write strengths."""
    made = {"sink": fn, "logit_bound": fn, "write": of_rows}
    given = {name: getattr(options, name, None) for name in made}
    return replace(options, **{name: made[name](x) for name, x in given.items() if x is not None})


def _share(x: Tensor, fragments: Fragments) -> Tensor:
    """The part of ``x [H]``, a number per query head, that belongs to this rank's share of the heads."""
    return x.chunk(fragments.ranks)[fragments.rank]
