"""torch.library registration: fox as two custom ops (forward, backward) with fakes and autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnzoo.kernels.common.constants import CLOSED, GATE_CONST, GATE_FULL, KEY_UNIT, ROW_UNIT
from attnzoo.kernels.common.dense import segment_starts
from attnzoo.kernels.common.gate_sums import gate_gradient, gate_sums
from attnzoo.kernels.common.launching import can_describe, gate_kind
from attnzoo.kernels.fox.portable.backward import fox_backward
from attnzoo.kernels.fox.portable.decode import fox_split_forward, splits_keys
from attnzoo.kernels.fox.portable.forward import fox_forward
from attnzoo.kernels.fox.portable.prune import prune_starts

from .plan import hopper_forward, one_pass


def bounds(
    q: Tensor, k: Tensor, log_decay: Tensor | None, cu_seqlens: Tensor | None, logit_bound: Tensor | None,
    scale: float, window: int, bound: str, log_eps: float,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gate sums c and base, first visible keys and pruning starts: what both passes need before the main kernels."""
    S = k.shape[1]
    doc = None if cu_seqlens is None else segment_starts(cu_seqlens, S)
    c = base = tails = since = start = None
    if log_decay is not None and gate_kind(log_decay) == GATE_FULL:
        c, base, since, tails = gate_sums(log_decay, doc, window if window > 0 else S)
    elif window > 0:
        since = (torch.arange(S, device=q.device, dtype=torch.int32) - (window - 1)).clamp_(min=0)
        since = (since if doc is None else torch.maximum(since, doc)).view(1, 1, S)
    elif doc is not None:
        since = doc.view(1, 1, S)
    if bound:
        assert log_decay is not None
        start = prune_starts(
            q, k, log_decay, c, base, tails, since, scale, bound=bound, log_eps=log_eps, logit_bound=logit_bound
        )
    return c, base, since, start


def _keeps_rest(q: Tensor, v: Tensor, log_decay: Tensor | None, backward: bool) -> bool:
    """Whether the backward needs what the rounding of o drops: in one pass, for the gate's gradient (``hopper/``)."""
    return backward and log_decay is not None and one_pass(q.shape[3], v.shape[3], q.dtype, q.device)


@torch.library.custom_op("attnzoo::fox_forward", mutates_args=())
def fox_forward_op(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, sink: Tensor | None, cu_seqlens: Tensor | None,
    logit_bound: Tensor | None, scale: float, window: int, bound: str, log_eps: float, backward: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns o, lse, and c, base, since, start, o_rest for the backward pass (empty where they do not apply).

    o_rest [B, T, H, V], what the rounding of o drops, only if a backward pass will follow.
    """
    c, base, since, start = bounds(q, k, log_decay, cu_seqlens, logit_bound, scale, window, bound, log_eps)
    o_rest = q.new_zeros((*q.shape[:3], v.shape[3])) if _keeps_rest(q, v, log_decay, backward) else None
    if splits_keys(q.shape[1], k.shape[1], q.shape[2] // k.shape[2]):
        o, lse = fox_split_forward(q, k, v, log_decay, sink, c, base, since, start, scale)
    elif hopper_forward(q.shape[1], q.shape[3], v.shape[3], q.dtype, q.device) and can_describe(q, k, v):
        from attnzoo.kernels.fox.hopper.forward import fox_forward_hopper

        o, lse = fox_forward_hopper(q, k, v, log_decay, sink, c, base, since, start, scale, o_rest)
    else:
        o, lse = fox_forward(q, k, v, log_decay, sink, c, base, since, start, scale, o_rest)
    c = lse.new_empty(0) if c is None else c
    base = lse.new_empty(0, dtype=torch.float64) if base is None else base
    since = lse.new_empty(0, dtype=torch.int32) if since is None else since
    start = lse.new_empty(0, dtype=torch.int32) if start is None else start
    return o, lse, c, base, since, start, q.new_empty(0) if o_rest is None else o_rest


@fox_forward_op.register_fake
def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, sink: Tensor | None, cu_seqlens: Tensor | None,
    logit_bound: Tensor | None, scale: float, window: int, bound: str, log_eps: float, backward: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    B, T, H, _ = q.shape
    S, V = k.shape[1], v.shape[3]
    full = log_decay is not None and log_decay.ndim == 3
    f32, i32 = torch.float32, torch.int32
    n_u = (S + KEY_UNIT - 1) // KEY_UNIT
    c = q.new_empty((B, H, n_u * KEY_UNIT) if full else (0,), dtype=f32)
    base = q.new_empty((B, H, n_u + 1) if full else (0,), dtype=torch.float64)
    shape: tuple[Any, ...] = (B, H, S) if full else (1, 1, S) if window > 0 or cu_seqlens is not None else (0,)
    start = q.new_empty((B, H, (T + ROW_UNIT - 1) // ROW_UNIT) if bound else (0,), dtype=i32)
    since, o = q.new_empty(shape, dtype=i32), q.new_empty((B, T, H, V))
    o_rest = torch.empty_like(o) if _keeps_rest(q, v, log_decay, backward) else q.new_empty(0)
    return o, q.new_empty((B, H, T), dtype=f32), c, base, since, start, o_rest


@torch.library.custom_op("attnzoo::fox_backward", mutates_args=())
def fox_backward_op(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, log_decay: Tensor | None, sink: Tensor | None,
    cu_seqlens: Tensor | None, c: Tensor, base: Tensor, since: Tensor, start: Tensor, o_rest: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns dq, dk, dv, and the gradients of log_decay and sink (empty where they do not apply)."""
    T, S = q.shape[1], k.shape[1]
    some = [x if x.numel() else None for x in (c, base, since, start)]
    merges = log_decay is None or o_rest.numel() > 0  # determinism may have been asked for in the forward alone
    if merges and one_pass(q.shape[3], v.shape[3], q.dtype, q.device) and can_describe(q, k, v):
        from attnzoo.kernels.fox.hopper.backward import fox_backward_hopper

        kept = o_rest if o_rest.numel() else None
        grads = fox_backward_hopper(
            do, q, k, v, o, kept, lse, log_decay, sink, some[0], some[1], some[2], some[3], scale
        )
    else:
        grads = fox_backward(do, q, k, v, o, lse, log_decay, sink, some[0], some[1], some[2], some[3], scale)
    dq, dk, dv, dkey, drow = grads
    dgate, dsink = lse.new_empty(0), lse.new_empty(0)
    if drow is not None:
        dsink = -drow.sum((0, 2))
    if log_decay is not None and dkey is not None:
        if gate_kind(log_decay) == GATE_CONST:  # the running sum of a constant gate is its multiple of the position
            dc = -dkey.double()
            if drow is not None:
                dc[..., S - T :] += drow
            dgate = (dc * torch.arange(S, device=q.device)).sum((0, 2)).float()
            dgate = dgate.masked_fill(log_decay <= CLOSED, 0.0)
        else:
            doc = None if cu_seqlens is None else segment_starts(cu_seqlens, S)
            dgate = gate_gradient(dkey, drow, log_decay, doc, T)
    return dq, dk, dv, dgate, dsink


@fox_backward_op.register_fake
def _backward_fake(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, log_decay: Tensor | None, sink: Tensor | None,
    cu_seqlens: Tensor | None, c: Tensor, base: Tensor, since: Tensor, start: Tensor, o_rest: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    def dense(x: Tensor) -> Tensor:
        return x.new_empty(x.shape)

    return (
        dense(q),
        dense(k),
        dense(v),
        lse.new_empty(0 if log_decay is None else log_decay.shape),
        lse.new_empty(0 if sink is None else sink.shape),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, log_decay, sink, cu_seqlens, _, scale, *_ = inputs
    ctx.save_for_backward(q, k, v, log_decay, sink, cu_seqlens, *output)
    ctx.scale = scale
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, log_decay, sink, cu_seqlens, o, lse, c, base, since, start, o_rest = ctx.saved_tensors
    none = (None,) * 12
    if do is None:
        return none
    dq, dk, dv, dgate, dsink = fox_backward_op(
        do, q, k, v, o, lse, log_decay, sink, cu_seqlens, c, base, since, start, o_rest, ctx.scale
    )
    dsink = None if sink is None else dsink.to(sink.dtype)
    return (dq, dk, dv, None if log_decay is None else dgate, dsink, *none[5:])


fox_forward_op.register_autograd(_backward, setup_context=_setup)

__all__ = ["KEY_UNIT", "ROW_UNIT", "bounds", "fox_backward_op", "fox_forward_op"]
