"""The linear side over fragments: ranks send each other a state and a product of transitions per fragment.

A recurrence is linear in the state before it: what that adds to the outputs are products with the queries, carried back
to the fragment's start. So each fragment is computed from an empty state by the variant's own form, forward once for
all columns and backward once more from the state before it. The same products give the gradient of that state, which
the fragments before it wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnzoo.algebra.block_decay import edge_decay
from attnzoo.algebra.transitions import HeadGate, Identity, heads_first
from attnzoo.forms.caches.state import RecurrentState
from attnzoo.forms.linear import LinearForms
from attnzoo.forms.options import LinearOptions
from attnzoo.forms.protocol import Call
from attnzoo.parallel.collectives import gather
from attnzoo.parallel.fragments import Fragments
from attnzoo.parallel.rows import Rows, of_all_fragments
from attnzoo.precision import wide_dtype


def scan_states(
    forms: LinearForms, form: str, rows: Rows, fragments: Fragments, ends: bool = False
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The outputs of this rank's rows, and the state ``[B, H, K, V]`` after all tokens, with a gradient if ``ends``."""
    named = rows.named()
    call = _Fragmented(forms, form, fragments, tuple(named), replace(rows.options, write=None), ends)
    o, end = _Scan.apply(call, *named.values())  # type: ignore[no-untyped-call]
    return o, end


@dataclass(frozen=True, eq=False)
class _Fragmented:
    """A form over this rank's fragments, for tensors by these names."""

    forms: LinearForms
    form: str
    fragments: Fragments
    names: tuple[str, ...]
    options: LinearOptions
    ends: bool

    def pieces(self, tensors: Sequence[Tensor]) -> list[Rows]:
        return Rows.of(dict(zip(self.names, tensors, strict=True)), self.options).cut(self.fragments)

    def after(self, state: Tensor | None, piece: Rows) -> tuple[Tensor, Tensor]:
        """The outputs of a fragment after a state, and the last state."""
        past = None if state is None else RecurrentState(state, 0)
        o, last = self.forms.go_on(self.form, piece.q, piece.k, piece.v, piece.gate, past, piece.options)
        return o, last.matrix

    def alone(self, piece: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of a fragment after an empty state: outputs ``[B, n, H, V]``; scaled queries carried back to its start, ``[B,
        H, n, K]``; the last state; and the transposed product of its transitions and decays, ``[B, H, K, K]``.

        The queries and the product are the outputs and the last state of columns that write nothing, after the
        identity.
        """
        q, v, dtype = piece.q, piece.v, wide_dtype(piece.q.dtype)
        (B, n, H, K), V = q.shape, v.shape[3]
        eye = torch.eye(K, dtype=dtype, device=q.device).expand(B, H, K, K)
        if isinstance(self.forms.transition, Identity):
            g = HeadGate.of(piece.gate, q).log_decay
            entry, _, decay = edge_decay(q.new_zeros(B, H, n, dtype=dtype) if g is None else g)
            scale = K**-0.5 if piece.options.scale is None else piece.options.scale
            queries = heads_first(q, H, dtype) * (scale * entry.exp()[..., None])
            o, left = self.after(None, piece)
            return o, queries.to(v.dtype), left, eye * decay.exp()[..., None, None]
        silent = v.new_zeros(*v.shape[:3], K)
        wide, start = torch.cat([v, silent], -1), torch.cat([eye.new_zeros(B, H, K, V), eye], -1)
        asked = Call(q, piece.k, wide, piece.gate, RecurrentState(start, 0), True, piece.options)
        if self.forms.refuses(self.form, asked):  # more columns than the kernel takes
            (o, left), (read, total) = self.after(None, piece), self.after(eye, replace(piece, v=silent))
        else:
            o, last = self.after(start, replace(piece, v=wide))
            (o, read), (left, total) = o.split([V, K], -1), last.split([V, K], -1)
        return o, read.transpose(1, 2), left, total


class _Scan(torch.autograd.Function):
    """The outputs of this rank's rows and the state after all tokens; backward, every fragment runs again, after the
    state before it."""

    @staticmethod
    def forward(ctx: Any, call: _Fragmented, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        fragments = call.fragments
        outputs, queries, left, totals = zip(*map(call.alone, call.pieces(tensors)), strict=True)
        (of_all, products), _ = of_all_fragments(fragments, left, totals)
        states = [torch.zeros_like(of_all[0])]
        for product, more in zip(products, of_all, strict=True):
            states.append(product @ states[-1] + more)
        before = [states[fragments.table.index(row)] for row in fragments.own]
        ctx.call = call
        ctx.save_for_backward(*tensors, torch.stack(products), *before, *queries)
        pieces = zip(outputs, queries, before, strict=True)
        found = [o + _times(read, state).transpose(1, 2).to(o.dtype) for o, read, state in pieces]
        return torch.cat(found, 1), states[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, of_end: Tensor | None) -> tuple[Tensor | None, ...]:
        call, fragments = ctx.call, ctx.call.fragments
        own = [fragments.table.index(row) for row in fragments.own]
        saved, n = ctx.saved_tensors, len(own)
        (*tensors, products), before, queries = saved[: -2 * n], saved[-2 * n : -n], saved[-n:]
        grad = torch.zeros_like(before[0])  # of the state after a fragment
        if do is None:
            B, H, _, V = grad.shape
            do = queries[0].new_zeros(B, fragments.count(fragments.rank), H, V)
        of_outputs = fragments.cut(do)
        pairs = zip(queries, of_outputs, strict=True)
        (read,), _ = of_all_fragments(fragments, [_times(q.mT, one.transpose(1, 2)).to(grad) for q, one in pairs])
        if call.ends:  # on all ranks, whichever of them have used the state
            of_end = grad if of_end is None else of_end
            grad = gather(fragments.group, fragments.ranks, of_end)[0][0].sum(0)
        of_ends = [grad] * len(read)
        for number in reversed(range(len(read))):
            of_ends[number] = grad
            grad = products[number].mT @ grad + read[number]
        needs = ctx.needs_input_grad[1:]
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(need) for x, need in zip(tensors, needs, strict=True)]
            found = [call.after(*pair) for pair in zip(before, call.pieces(leaves), strict=True)]
        outputs, ends = zip(*found, strict=True)
        given = zip((*outputs, *ends), (*of_outputs, *(of_ends[number] for number in own)), strict=True)
        reached, back = zip(*((x, grad) for x, grad in given if x.requires_grad), strict=True)
        wanted = [x for x in leaves if x.requires_grad]
        grads = iter(torch.autograd.grad(reached, wanted, back, allow_unused=True))
        return None, *(next(grads) if need else None for need in needs)


def _times(x: Tensor, y: Tensor) -> Tensor:
    """The product of rows and a state in the dtype of the rows; float16 has no range for sums over many tokens."""
    dtype = torch.float32 if x.dtype == torch.float16 else x.dtype
    return x.to(dtype) @ y.to(dtype)
