"""The rows of one call that a rank has, and what it knows of those of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.parallel.collectives import gather
from attnzoo.parallel.fragments import Fragments


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a call: q ``[B, n, H, K]``, k, v, the gate, and the options of the side."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Gate
    options: Any

    def map(self, fn: Callable[[Tensor], Tensor]) -> Rows:
        """The rows with ``fn`` of every tensor that has tokens."""
        write = getattr(self.options, "write", None)
        options = self.options if write is None else replace(self.options, write=fn(write))
        q, k, v = map(fn, (self.q, self.k, self.v))
        return Rows(q, k, v, self.gate.map(lambda part: part if part.ndim == 1 else fn(part)), options)

    def cut(self, fragments: Fragments) -> list[Rows]:
        """The rows of each fragment of this rank."""
        if len(fragments.sizes) == 1:
            return [self]
        names, write = self.gate.parts, getattr(self.options, "write", None)
        parts = [getattr(self.gate, name) for name in names]
        given = [self.q, self.k, self.v, *(x for x in (*parts, write) if x is not None and x.ndim > 1)]
        found = []
        for q, k, v, *others in zip(*(x.split(fragments.sizes, 1) for x in given), strict=True):
            rest = iter(others)
            gate = Gate(**{name: x if x.ndim == 1 else next(rest) for name, x in zip(names, parts, strict=True)})
            options = self.options if write is None else replace(self.options, write=next(rest))
            found.append(Rows(q, k, v, gate, options))
        return found


def separated(gate: Gate, q: Tensor, fragments: Fragments) -> Gate:
    """The gate of this rank's rows, closed where a document begins."""
    begins = fragments.begins()
    if begins is None:
        return gate
    gate = gate.per_token(q)
    g = gate.log_decay
    if g is None:
        g = q.new_zeros(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    return replace(gate, log_decay=g.masked_fill(begins.to(q.device)[:, None], -torch.inf))


def of_all_fragments(fragments: Fragments, *kinds: Sequence[Tensor]) -> tuple[list[list[Tensor]], Tensor]:
    """The tensors of all fragments in the order of the text, a list per kind; and the knot for :func:`tied`.

    Each of ``kinds`` has a tensor for each of this rank's fragments, all of one shape; all kinds are sent together.
    """
    slots = fragments.slots
    stacked = [F.pad(torch.stack(list(xs)), (0, 0) * xs[0].ndim + (0, slots - len(xs))) for xs in kinds]
    found, knot = gather(fragments.group, fragments.ranks, *stacked)
    return [[x[row.rank, fragments.slot(row)] for row in fragments.table] for x in found], knot
