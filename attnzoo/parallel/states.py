"""The linear side over fragments: ranks send each other a state and a product of transitions per fragment."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from attnzoo.algebra.fragments import carried, read, starts
from attnzoo.algebra.transitions import HeadGate, compute_dtype, heads_first
from attnzoo.forms.linear import LinearForms
from attnzoo.parallel.collectives import tied
from attnzoo.parallel.fragments import Fragments
from attnzoo.parallel.rows import Rows, of_all_fragments


def scan_states(forms: LinearForms, form: str, rows: Rows, fragments: Fragments) -> tuple[Tensor, Tensor]:
    """The outputs of this rank's rows, and the state ``[B, H, K, V]`` after all tokens.

    Each fragment is computed from an empty state; a scan over the fragments gives the state before each, whose part of
    the outputs is then added.
    """
    q = rows.q
    scale = q.shape[-1] ** -0.5 if rows.options.scale is None else rows.options.scale
    outputs, found, left = [], [], []
    for piece in rows.cut(fragments):
        o, state = forms.go_on(form, piece.q, piece.k, piece.v, piece.gate, None, piece.options)
        queries = heads_first(piece.q, q.shape[2], compute_dtype(q))
        found.append(carried(forms.transition, queries, queries, HeadGate.of(piece.gate, piece.q)))
        outputs.append(o)
        left.append(state.matrix)
    kinds = [left, [one.decay for one in found]]
    if found[0].total is not None:
        kinds.append([cast(Tensor, one.total) for one in found])
    (states, decays, *totals), knot = of_all_fragments(fragments, *kinds)
    of_all = [totals[0] if totals else [None] * len(states), decays, states]
    *before, end = starts(*([*xs, xs[-1]] for xs in of_all))  # as if a fragment came after the last
    for n, row in enumerate(fragments.own):
        more = read(found[n], before[fragments.table.index(row)], scale).transpose(1, 2)
        outputs[n] = (outputs[n] + more).to(rows.v.dtype)
    return tied(torch.cat(outputs, 1), knot), end
