"""Packed sequences as padded rows of similar lengths, for forms without packing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from attnzoo.algebra.gate import Gate


@dataclass(frozen=True, eq=False)
class SimilarRows:
    """Some of N packed sequences as rows, padded at the end to at most twice their length.

    Args:
        sequences: their numbers, ``[R, 1]``.
        index: the packed place of each token, ``[R, L]``; at padding that of the row's first.
        there: mask of the tokens, ``[R, L]``.
    """

    sequences: Tensor
    index: Tensor
    there: Tensor

    def pick(self, x: Tensor) -> Tensor:
        """The rows ``[R, L, ...]`` of packed ``x [1, T, ...]``."""
        return cast(Tensor, x[0].index_select(0, self.index.flatten()).unflatten(0, tuple(self.index.shape)))

    def pick_gate(self, gate: Gate) -> Gate:
        """The rows of a gate, of which parts without tokens stay as they are."""
        return gate.map(lambda part: part if part.ndim == 1 else self.pick(part))

    def pick_options(self, options: Any) -> Any:
        """The options of these rows, without ``cu_seqlens``."""
        per_token = {name: x for name in ("valid", "write") if (x := getattr(options, name, None)) is not None}
        return replace(options, cu_seqlens=None, **{name: self.pick(x) for name, x in per_token.items()})


def similar_rows(borders: Tensor) -> Iterator[SimilarRows]:
    """All sequences with the ``borders [N + 1]`` that have tokens, grouped by similar length."""
    borders = borders.long()
    starts, lengths = borders[:-1], borders.diff()
    like = lengths.new_tensor([n.bit_length() for n in lengths.tolist()])
    for size in like[lengths > 0].unique().tolist():
        chosen = (like == size).nonzero()
        slot = torch.arange(int(lengths[chosen].max()), device=borders.device)
        there = slot < lengths[chosen]
        yield SimilarRows(chosen, torch.where(there, starts[chosen] + slot, starts[chosen]), there)


def in_rows(form: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, gate: Gate, options: Any) -> Any:
    """The output of ``form`` on packed sequences, which run as rows grouped by similar length; no token sees padding.

    Args:
        form: ``form(q, k, v, gate, options)`` of whole sequences, which returns ``[B, T, ...]`` or a tuple of such.
        q, k, v, gate: one row ``[1, T, ...]`` of packed sequences.
        options: the form's checked options, with ``cu_seqlens``.
    """
    place = torch.empty(q.shape[1], dtype=torch.int64, device=q.device)  # index of each token in the outputs
    outputs: list[tuple[Tensor, ...]] = []
    used, single = 0, True
    for rows in similar_rows(options.cu_seqlens.to(q.device)):
        o = form(rows.pick(q), rows.pick(k), rows.pick(v), rows.pick_gate(gate), rows.pick_options(options))
        single = isinstance(o, Tensor)
        outputs.append(tuple(x.flatten(0, 1) for x in ((o,) if single else o)))
        index = rows.index
        place[index[rows.there]] = (used + torch.arange(index.numel(), device=q.device).view_as(index))[rows.there]
        used += index.numel()
    whole = tuple(torch.cat(parts).index_select(0, place)[None] for parts in zip(*outputs, strict=True))
    return whole[0] if single else whole
