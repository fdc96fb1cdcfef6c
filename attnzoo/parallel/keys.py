"""The softmax side over fragments: a cache of the keys before each fragment, from which the variant's own form goes on.

Keys are carried to the end of their fragment where they are, over the fragments between where they arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from attnzoo.algebra.fragments import carried, joined, times
from attnzoo.algebra.gate import expand_heads
from attnzoo.algebra.parts import PARTS
from attnzoo.algebra.transitions import HeadGate, Identity, heads_first
from attnzoo.forms.additive import AdditiveForms
from attnzoo.forms.caches.state import KVCache
from attnzoo.forms.protocol import REFERENCE
from attnzoo.forms.softmax import SoftmaxForms
from attnzoo.parallel.collectives import Works, tied
from attnzoo.parallel.fragments import Fragment, Fragments
from attnzoo.parallel.pruned import Needed, allowed
from attnzoo.parallel.rows import Rows, of_all_fragments
from attnzoo.precision import wide_dtype
from attnzoo.recurrences.products import transition_of


@dataclass(frozen=True, eq=False)
class Earlier:
    """Keys, values and gates that fragments have sent, by fragment in the order of the text.

    Args:
        k: carried to the fragment's end, ``[B, n, G or H, K]``.
        v: ``[B, n, G or H, V]``.
        log_decay: ``[B, n, H]``, or None.
        totals: of the transitions of each fragment; None for the identity.
    """

    k: Sequence[Tensor]
    v: Sequence[Tensor]
    log_decay: Sequence[Tensor] | None
    totals: Sequence[Tensor] | None

    def cache(self, number: int, last: int, angle: Tensor | None) -> KVCache | None:
        """The ``last`` keys before fragment ``number``, carried to its start; None for no keys."""
        keys, values, gates, total = [], [], [], None
        for n in reversed(range(number)):
            here = slice(max(0, self.k[n].shape[1] - last), None)
            last -= self.k[n][:, here].shape[1]
            keys.append(times(total, self.k[n][:, here].transpose(1, 2)).transpose(1, 2))
            values.append(self.v[n][:, here])
            if self.log_decay is not None:
                gates.append(self.log_decay[n][:, here])
            if not last:
                break
            if self.totals is not None:
                total = joined(self.totals[n], total)
        if not sum(k.shape[1] for k in keys):
            return None
        k, v, g = (torch.cat(xs[::-1], 1) if len(xs) > 1 else xs[0] if xs else None for xs in (keys, values, gates))
        phase = None if angle is None else angle.new_zeros(1, 1, 1, angle.shape[-1], dtype=torch.float64)
        return KVCache(cast(Tensor, k), cast(Tensor, v), g, phase=phase, carried=self.totals is not None)


def with_earlier_keys(forms: SoftmaxForms, form: str, rows: Rows, fragments: Fragments, pruned: bool) -> Any:
    """The outputs of this rank's rows, with ``return_lse`` beside their log-sum-exps.

    What needs no keys of other ranks is computed while those are on their way.

    Args:
        pruned: whether only those keys travel of which ``prune`` says that a row may need them.
    """
    gate, options = rows.gate.per_token(rows.q), rows.options
    rows = replace(rows, gate=gate)
    k, totals = _to_the_ends(forms, rows, fragments)
    heads = k.shape[2]
    v, g = expand_heads(rows.v, heads), gate.log_decay
    rows = replace(rows, k=expand_heads(rows.k, heads), v=v)
    sent = [k, v] if g is None else [k, v, g]
    knots, all_totals = [], None
    if totals is not None:
        (all_totals,), knot = of_all_fragments(fragments, totals)
        knots.append(knot)
    needed, works = None, Works()
    if pruned:
        needed = Needed.of(rows, fragments, heads)
        options = replace(options, prune=allowed(options.prune))
    arrived, knot = (fragments if needed is None else needed).send(works, *sent)
    knots.append(knot)

    def attended(piece: Rows, row: Fragment, last: int, k: list[Tensor], v: list[Tensor], *g: list[Tensor]) -> Any:
        number, gate = fragments.table.index(row), piece.gate
        cache = Earlier(k, v, g[0] if g else None, all_totals).cache(number, last, gate.angle)
        if cache is None:
            return forms.whole(form, piece.q, piece.k, piece.v, gate, options)
        if needed is not None:
            cache, gate = needed.hide(number, cache, gate)
        return forms.go_on(form, piece.q, piece.k, piece.v, gate, cache, options)[0]

    calls = []
    for piece, row in zip(rows.cut(fragments), fragments.own, strict=True):
        last = row.start - max(border for border in fragments.borders if border <= row.start)  # of its document
        if options.window is not None:
            last = min(last, options.window - 1)
        if needed is not None:
            last = needed.most(fragments.table.index(row))
        calls.append((piece, row, last))
    here = [fragments.own_pieces(x) for x in sent]
    outputs = {row: attended(piece, row, n, *here) for piece, row, n in calls if fragments.has_before(row, n)}
    works.wait()
    here = arrived()
    found = [outputs[row] if row in outputs else attended(piece, row, n, *here) for piece, row, n in calls]
    if not options.return_lse:
        return tied(torch.cat(found, 1), *knots)
    o, lse = (torch.cat(xs, 1) for xs in zip(*found, strict=True))
    return tied(o, *knots), lse


def keys_after(forms: SoftmaxForms, form: str, rows: Rows, fragments: Fragments) -> KVCache:
    """The cache that one process would have after all tokens, on every rank."""
    gate, options = rows.gate, rows.options
    if isinstance(forms, AdditiveForms):
        names = [name for name in gate.parts if getattr(gate, name).ndim > 1]
        sent = [rows.k, rows.v, *(getattr(gate, name) for name in names)]
        k, v, *parts = (torch.cat(xs, 1) for xs in fragments.of_all_tokens(*sent)[0])
        gate = replace(gate, **dict(zip(names, parts, strict=True)))
        dtype = None if form == REFERENCE else v.dtype
        return forms.remember(expand_heads(k, rows.q.shape[2]), k, v, gate, None, options, dtype)[1]
    k, totals = _to_the_ends(forms, rows, fragments)
    g = gate.per_token(rows.q).log_decay
    (keys, values, *gates), _ = fragments.of_all_tokens(k, rows.v, *([] if g is None else [g]))
    all_totals = None if totals is None else of_all_fragments(fragments, totals)[0][0]
    found = Earlier(keys, values, gates[0] if gates else None, all_totals)
    return cast(KVCache, found.cache(len(fragments.table), fragments.tokens, None))


def _to_the_ends(forms: SoftmaxForms, rows: Rows, fragments: Fragments) -> tuple[Tensor, list[Tensor] | None]:
    """The keys of each fragment carried to its end, and the totals of its transitions (None for the identity)."""
    transition = forms.transition
    if isinstance(transition, Identity):
        transition = transition_of(rows.gate.parts)
    if isinstance(transition, Identity):
        return rows.k, None
    G, H = rows.k.shape[2], rows.q.shape[2]
    own = any(PARTS[part].carries and getattr(rows.gate, part).shape[2] not in (1, G) for part in rows.gate.parts)
    heads, keys, totals = H if own else G, [], []
    for piece in rows.cut(fragments):
        k = heads_first(piece.k, heads, wide_dtype(piece.k.dtype))
        gate = replace(piece.gate, log_decay=None)
        one = carried(transition, k, k, HeadGate.of(gate, k.transpose(1, 2)))
        keys.append(one.k.transpose(1, 2))
        totals.append(cast(Tensor, one.total))
    return torch.cat(keys, 1), totals
