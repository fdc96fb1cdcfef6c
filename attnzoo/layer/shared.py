"""A call of a layer on this rank's rows of sequences that ranks share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo.algebra.values import as_given
from attnzoo.forms.protocol import Call
from attnzoo.kernels.common.untraced import untraced
from attnzoo.layer.dispatch import of_all_ranks
from attnzoo.layer.stream import OwnCore
from attnzoo.parallel.attention import attend, read
from attnzoo.parallel.collectives import tied
from attnzoo.parallel.context import Context
from attnzoo.parallel.rows import Rows, of_all_fragments
from attnzoo.registry.variant import Variant


@dataclass(frozen=True, eq=False, kw_only=True)
class SharedStream(OwnCore):
    """Rows that are some fragments of sequences; what a window needs of earlier ones comes from their ranks.

    An empty cache is filled with what one process remembers of the whole sequences. A compiled layer leaves its graph
    here: how much ranks exchange depends on fragments, and with pruning on values.
    """

    context: Context
    states: list[Any] = field(default_factory=list)

    @untraced
    def positions(self) -> Tensor:
        return self.context.fragments.positions().to(self.device).expand(self.shape)

    @untraced
    def windowed(self, name: str, x: Tensor, size: int, fn: Callable[[Tensor], Tensor]) -> Tensor:
        fragments, n = self.context.fragments, size - 1
        if not n:
            return fn(x)
        ends = [F.pad(one, (0, 0, max(0, n - one.shape[1]), 0))[:, -n:] for one in fragments.cut(x)]
        knots = []
        if fragments.ranks > 1:
            (ends,), knot = of_all_fragments(fragments, ends)
            knots.append(knot)
        lasts = [end[:, -min(n, row.size) :] for end, row in zip(ends, fragments.table, strict=True)]
        if self.cache is not None:
            self._remember(name, F.pad(torch.cat(lasts, 1), (0, 0, n, 0)), n)
        spaced, places, at, width = [], [], 0, 0
        for row in fragments.own:
            earlier = lasts[: fragments.table.index(row)]
            borders = [row.start, *(b for b in fragments.borders if row.start < b < row.stop), row.stop]
            for start, stop in pairwise(borders):
                begin = max(b for b in fragments.borders if b <= start)  # of its document
                before = x[:, :0] if start > row.start else torch.cat([x[:, :0], *earlier], 1)
                before = before[:, max(0, before.shape[1] - min(n, start - begin)) :]
                spaced += [F.pad(before, (0, 0, n - before.shape[1], 0)), x[:, at : at + stop - start]]
                places.append(slice(width, width + stop - start))
                at, width = at + stop - start, width + n + stop - start
        out = fn(torch.cat(spaced, 1))
        return tied(torch.cat([out[:, place] for place in places], 1), *knots)

    @untraced
    def run(self, variant: Variant, form: str, call: Call, keys_per_token: int) -> Any:
        """The core's output for this rank's rows."""
        fragments, transport = self.context
        if keys_per_token > 1:
            fragments = fragments.repeat(keys_per_token)
        with as_given(call.q):
            form = of_all_ranks(variant, form, call)
            rows = Rows(call.q, call.k, call.v, call.gate, call.options)
            if self.cache is None:
                return attend(variant.form_set, form, rows, fragments, transport)
            o, state = read(variant.form_set, form, rows, fragments, transport)
        tokens = self.context.fragments.tokens
        self.states.append(replace(state, tokens=tokens) if keys_per_token > 1 else state)
        return o

    def commit(self, layer: nn.Module, x: Tensor, state: Any) -> None:
        whole = replace(self, shape=(self.shape[0], self.context.fragments.tokens))
        super(SharedStream, whole).commit(layer, x, self.states[-1])


@untraced
def shared_rows(context: Context, x: Tensor, cache: Any, **others: object) -> SharedStream:
    """The stream of a call on this rank's rows.

    Raises:
        ValueError: another number of rows, a cache that is not empty, that evicts or whose text has several documents,
            or one of ``others`` that is not None: fragments have no use for it.
    """
    fragments = context.fragments
    expected = fragments.count(fragments.rank)
    if x.shape[1] != expected:
        raise ValueError(f"x: expected the {expected} tokens of rank {fragments.rank}, got {tuple(x.shape)}")
    for name, given in others.items():
        if given is not None:
            raise ValueError(f"{name}: expected None in context_parallel, got {type(given).__name__}")
    if cache is not None and (cache.tokens or cache.evict is not None or len(fragments.borders) > 2):
        got = "documents" if len(fragments.borders) > 2 else "tokens" if cache.tokens else "evict"
        raise ValueError(f"cache: expected an empty one that keeps all of one text in context_parallel, got {got}")
    return SharedStream(None, cache, (x.shape[0], x.shape[1]), x.device, context=context)
