"""The rows of one call that a rank has, and what it knows of those of the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.parallel.collectives import gather
from attnzoo.parallel.fragments import Fragments
from attnzoo.precision import wide_dtype


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a call: q ``[B, n, H, K]``, k, v, the gate, and the options of the side."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Gate
    options: Any

    @classmethod
    def of(cls, named: Mapping[str, Tensor], options: Any) -> Rows:
        """The rows that have these tensors, by the names of :meth:`named`."""
        parts = dict(named)
        q, k, v = (parts.pop(name) for name in "qkv")
        if "write" in parts:
            options = replace(options, write=parts.pop("write"))
        return cls(q, k, v, Gate(**parts), options)

    def named(self) -> dict[str, Tensor]:
        """q, k, v, the parts of the gate and, where there are some, the write strengths, by name."""
        named = {"q": self.q, "k": self.k, "v": self.v, **{name: getattr(self.gate, name) for name in self.gate.parts}}
        write = getattr(self.options, "write", None)
        return named if write is None else {**named, "write": write}

    def map(self, fn: Callable[[Tensor], Tensor]) -> Rows:
        """The rows with ``fn`` of every tensor that has tokens."""
        return Rows.of({name: x if x.ndim == 1 else fn(x) for name, x in self.named().items()}, self.options)

    def cut(self, fragments: Fragments) -> list[Rows]:
        """The rows of each fragment of this rank."""
        sizes, named = fragments.sizes, self.named()
        if len(sizes) == 1:
            return [self]
        pieces = zip(*([x] * len(sizes) if x.ndim == 1 else x.split(sizes, 1) for x in named.values()), strict=True)
        return [Rows.of(dict(zip(named, piece, strict=True)), self.options) for piece in pieces]


def separated(gate: Gate, q: Tensor, fragments: Fragments) -> Gate:
    """The gate of this rank's rows, closed where a document begins."""
    begins = fragments.begins()
    if begins is None:
        return gate
    gate = gate.per_token(q)
    g = gate.log_decay
    if g is None:
        g = q.new_zeros(q.shape[:3], dtype=wide_dtype(q.dtype))
    return replace(gate, log_decay=g.masked_fill(begins.to(q.device)[:, None], -torch.inf))


def of_all_fragments(fragments: Fragments, *kinds: Sequence[Tensor]) -> tuple[list[list[Tensor]], Tensor]:
    """The tensors of all fragments in the order of the text, a list per kind; and the knot for :func:`tied`.

    Each of ``kinds`` has a tensor for each of this rank's fragments, all of one shape; all kinds are sent together.
    """
    slots = fragments.slots
    stacked = [F.pad(torch.stack(list(xs)), (0, 0) * xs[0].ndim + (0, slots - len(xs))) for xs in kinds]
    found, knot = gather(fragments.group, fragments.ranks, *stacked)
    return [[x[row.rank, fragments.slot(row)] for row in fragments.table] for x in found], knot
