"""Rows of attention as the ops hand them on: their gate sums and first keys, their outputs, their log-sum-exp."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo.algebra.gate import is_closed
from attnzoo.kernels.common.constants import KEY_UNIT, LOG2E, ROW_UNIT
from attnzoo.kernels.common.options import OpOptions

Some = Tensor | None


class RowGates(NamedTuple):
    """Sums of gates and the first keys of rows, which the main kernels read; None where they do not apply.

    Attributes:
        c, base: running sums of log2 gates, as ``gate_sums`` gives them.
        first_visible: [B or 1, H or 1, S] int32, the first key that the mask allows each position.
        first_computed: [B, H, ceil(T / ROW_UNIT)] int32, the first key of each row unit after pruning.
    """

    c: Some = None
    base: Some = None
    first_visible: Some = None
    first_computed: Some = None

    def pointers(self, like: Tensor) -> tuple[Tensor, ...]:
        """The four tensors as kernels take them: ``like``, which is not read, in place of each that is None."""
        return tuple(like if x is None else x for x in self)

    @property
    def flags(self) -> dict[str, bool]:
        """The constants of a launch that say which first keys there are."""
        return {"HAS_SINCE": self.first_visible is not None, "HAS_START": self.first_computed is not None}

    @property
    def bounded(self) -> bool:
        """Whether some rows may see, or compute, less than all keys before them."""
        return self.first_visible is not None or self.first_computed is not None


class Attended(NamedTuple):
    """Outputs of a forward op.

    Attributes:
        o: [B, T, H, V].
        row_lse: [B, T, H] float32, log-sum-exp of the rows in natural units, where it is asked for.
        lse: [B, H, T] float32, log2-sum-exp in the frame of each row's unit, for the backward pass.
        rows: gate sums and first keys, for the backward pass.
        o_rest: [B, T, H, V], what the rounding of o drops, where a gradient needs it.
    """

    o: Tensor
    row_lse: Some
    lse: Tensor
    rows: RowGates
    o_rest: Some = None


def first_visible_without_gate(doc: Some, window: int, S: int, device: torch.device) -> Some:
    """First visible keys [1, 1, S] int32 of S positions where no gate closes, or None if all see every key before them.

    Args:
        doc: [S] int32, first position of each token's segment, or None.
        window: visible keys per row, 0 for no window.
    """
    if window > 0:
        first = (torch.arange(S, device=device, dtype=torch.int32) - (window - 1)).clamp_(min=0)
        return (first if doc is None else torch.maximum(first, doc)).view(1, 1, S)
    return None if doc is None else doc.view(1, 1, S)


def first_visible_of_closed(log_decay: Tensor, S: int) -> Tensor:
    """First visible keys [1, H, S] int32 of S positions by constant gates [H]: with a closed one a row sees itself."""
    own = torch.arange(S, device=log_decay.device, dtype=torch.int32)
    return (own * is_closed(log_decay)[:, None])[None]


def row_lse(lse: Tensor, log_decay: Some, rows: RowGates, S: int) -> Tensor:
    """The rows' log-sum-exp [B, T, H] in natural units, from log2 in the frame of each row unit [B, H, T].

    Args:
        log_decay: [B, S, H] with its sums in ``rows``, [H] without, or None.
    """
    T, (c, base, *_) = lse.shape[2], rows
    row = torch.arange(T, device=lse.device)
    at, ref = row + (S - T), row // ROW_UNIT * ROW_UNIT + (S - T)
    x = lse.double()
    if c is not None and base is not None:
        x = x + base[..., at // KEY_UNIT] + c[..., at] - base[..., ref // KEY_UNIT] - c[..., ref]
    elif log_decay is not None:
        x = x + (at - ref) * log_decay.masked_fill(is_closed(log_decay), 0.0).double()[:, None] * LOG2E
    return (x / LOG2E).float().transpose(1, 2).contiguous()


def fake_attended(
    q: Tensor, v: Tensor, log_decay: Some, options: OpOptions, *, S: int, return_lse: bool, bounded: bool, rest: bool
) -> Attended:
    """Tensors like the outputs of a forward op.

    Args:
        q: [B, T, H, K]; v: [B, S, G, V]; log_decay: [B, S, H], [H] or None.
        bounded: whether there are first computed keys of row units.
        rest: whether what the rounding of o drops is kept.
    """
    (B, T, H, _), units = q.shape, (S + KEY_UNIT - 1) // KEY_UNIT
    o, lse = q.new_empty((B, T, H, v.shape[3])), q.new_empty((B, H, T), dtype=torch.float32)
    c = base = None
    visible: tuple[int, ...] = (1, 1, S) if options.window > 0 or options.cu_seqlens is not None else ()
    if log_decay is not None:
        visible = (B if log_decay.ndim == 3 else 1, H, S)
    if log_decay is not None and log_decay.ndim == 3:
        c, base = lse.new_empty((B, H, units * KEY_UNIT)), lse.new_empty((B, H, units + 1), dtype=torch.float64)
    first_visible = lse.new_empty(visible, dtype=torch.int32) if visible else None
    n_t = (T + ROW_UNIT - 1) // ROW_UNIT
    first_computed = lse.new_empty((B, H, n_t), dtype=torch.int32) if bounded else None
    rows, natural = RowGates(c, base, first_visible, first_computed), lse.new_empty((B, T, H)) if return_lse else None
    return Attended(o, natural, lse, rows, torch.empty_like(o) if rest else None)


def sink_gradient(sums: Tensor, dlse: Some, sink: Tensor) -> Tensor:
    """Gradient [H] of the sink, whose part of dS is what the sums [B, H, T] of dS over rows lack to dlse [B, H, T]."""
    return (-sums if dlse is None else dlse - sums).sum((0, 2)).to(sink.dtype)


def fake_gradients(x: Any, names: Sequence[str], narrow: Sequence[str] = ()) -> Iterator[Some]:
    """Tensors like the gradients of operands that a backward op's inputs x want, None for the others.

    Args:
        narrow: those in float32 where ``x.unrounded`` says so.
    """
    for name in names:
        operand = getattr(x.given, name)
        if operand is None or not getattr(x.wanted, name):
            yield None
        else:
            yield operand.new_empty(operand.shape, dtype=torch.float32 if x.unrounded and name in narrow else None)
