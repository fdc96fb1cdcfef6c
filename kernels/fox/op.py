"""FoX as three custom ops (forward, backward, inference), with what compilers and autograd must know of them.

Each op adds up the gates (``common/gate_sums.py``), finds the first key of each block of rows where there is pruning
(``portable/prune.py``), and launches the kernels that ``plan.py`` has chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnzoo.algebra.gate import is_closed
from attnzoo.kernels.common.autograd import refuse_second_derivatives
from attnzoo.kernels.common.constants import GATE_CONST, GATE_FULL, KEY_UNIT
from attnzoo.kernels.common.dense import segment_starts, window_starts
from attnzoo.kernels.common.device import machine, on_device_of
from attnzoo.kernels.common.gate_sums import gate_gradient, gate_sums
from attnzoo.kernels.common.launching import can_describe, gate_kind
from attnzoo.kernels.common.plans import Plan, announce
from attnzoo.kernels.common.rows import fake_of_forward, kept_of_forward, row_lse, since_of_closed, since_without_gate
from attnzoo.kernels.fox.plan import Call, few_rows, plan
from attnzoo.kernels.fox.portable.backward import fox_backward
from attnzoo.kernels.fox.portable.decode import fox_split_forward
from attnzoo.kernels.fox.portable.forward import fox_forward
from attnzoo.kernels.fox.portable.prune import prune_starts

Some = Tensor | None


def _plan(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Some = None, *, gate_gradient: bool = False,
    deterministic: bool = False, masked: bool = False, backward: bool = True,
) -> Plan:  # fmt: skip
    """The plan of a call on real tensors, announced; without ``backward`` its own is not asked for."""
    (T, H, K), (S, G), V = q.shape[1:], k.shape[1:3], v.shape[3]
    where = machine(q.device)
    described = (not backward and few_rows(T, S, H // G)) or can_describe(q, k, v)
    lags = gate_gradient and gate_kind(log_decay) == GATE_CONST
    call = Call(T, S, H // G, K, V, q.dtype, gate_gradient, deterministic, masked, described, lags)
    chosen = plan(call, where)
    announce("fox", chosen, where)
    return chosen


def bounds(
    q: Tensor, k: Tensor, log_decay: Some, cu_seqlens: Some, logit_bound: Some, scale: float, window: int, bound: str,
    log_eps: float, valid: Some = None,
) -> tuple[Some, Some, Some, Some]:  # fmt: skip
    """Gate sums c and base, first visible keys, and the first keys that pruning keeps: what the main kernels read."""
    S = k.shape[1]
    doc = None if cu_seqlens is None else segment_starts(cu_seqlens, S)
    c = base = tails = start = None
    since: Some
    counted = window if valid is None else 0  # a window over all keys; over those that exist it comes last
    if log_decay is not None and gate_kind(log_decay) == GATE_FULL:
        c, base, since, tails = gate_sums(log_decay, doc, counted if counted > 0 else S)
    else:
        since = since_without_gate(doc, counted, S, q.device)
        if log_decay is not None:
            since = later_of(since, since_of_closed(log_decay, S))
    if valid is not None and window > 0:
        since = later_of(since, window_starts(valid, window).int()[:, None])
    if bound:
        assert log_decay is not None
        start = prune_starts(
            q, k, log_decay, c, base, tails, since, scale, bound=bound, log_eps=log_eps, logit_bound=logit_bound,
            valid=valid,
        )  # fmt: skip
    return c, base, since, start


def later_of(a: Some, b: Tensor) -> Tensor:
    """The later of two first visible keys, [B or 1, H or 1, S]."""
    return b if a is None else torch.maximum(a, b)


def _launch(
    chosen: Plan, q: Tensor, k: Tensor, v: Tensor, log_decay: Some, sink: Some, c: Some, base: Some, since: Some,
    start: Some, scale: float, *, o_rest: Some = None, valid: Some = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o, and lse in the frame of the row unit, by the forward of the plan; c and base may have room for more keys."""
    given = (q, k, v, log_decay, sink)
    if chosen.forward == "split":
        return fox_split_forward(*given, c, base, since, start, scale, valid)
    if c is not None and base is not None:
        units = (k.shape[1] + KEY_UNIT - 1) // KEY_UNIT
        c, base = c[..., : units * KEY_UNIT].contiguous(), base[..., : units + 1].contiguous()
    if chosen.forward == "hopper":
        from attnzoo.kernels.fox.hopper.forward import fox_forward_hopper

        return fox_forward_hopper(*given, c, base, since, start, scale, o_rest)
    return fox_forward(*given, c, base, since, start, scale, chosen.of("fwd"), o_rest=o_rest, valid=valid)


@torch.library.custom_op("attnzoo::fox_forward", mutates_args=())
def fox_forward_op(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, sink: Tensor | None, cu_seqlens: Tensor | None,
    logit_bound: Tensor | None, scale: float, window: int, bound: str, log_eps: float, gate_gradient: bool,
    deterministic: bool, return_lse: bool, to_q: Tensor | None = None, to_k: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns o, the rows' log-sum-exp, and what the backward pass needs (empty where it does not apply).

    The log-sum-exp [B, T, H] is there with ``return_lse``; for the backward lse, c, base, since, start, and o_rest
    [B, T, H, V], what the rounding of o drops. With to_q and to_k the gradients of q and k go there, unrounded.
    """
    chosen = _plan(q, k, v, log_decay, gate_gradient=gate_gradient, deterministic=deterministic)
    with on_device_of(q):
        c, base, since, start = bounds(q, k, log_decay, cu_seqlens, logit_bound, scale, window, bound, log_eps)
        o_rest = None
        if chosen.keeps_rest:  # the split-key forward leaves it as it is, the others fill it
            o_rest = (q.new_zeros if chosen.forward == "split" else q.new_empty)((*q.shape[:3], v.shape[3]))
        o, lse = _launch(chosen, q, k, v, log_decay, sink, c, base, since, start, scale, o_rest=o_rest)
        rows = row_lse(lse, log_decay, c, base, k.shape[1]) if return_lse else lse.new_empty(0)
    return o, rows, lse, *kept_of_forward(lse, c, base, since, start), q.new_empty(0) if o_rest is None else o_rest


@fox_forward_op.register_fake
def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, sink: Tensor | None, cu_seqlens: Tensor | None,
    logit_bound: Tensor | None, scale: float, window: int, bound: str, log_eps: float, gate_gradient: bool,
    deterministic: bool, return_lse: bool, to_q: Tensor | None = None, to_k: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    # what the rounding drops is kept or not whatever the lengths are: they may be symbols here
    lags = gate_gradient and gate_kind(log_decay) == GATE_CONST
    call = Call(1, 1, 1, int(q.shape[3]), int(v.shape[3]), q.dtype, gate_gradient, deterministic, lags=lags)
    return fake_of_forward(
        q, v, k.shape[1], return_lse, log_decay=log_decay, bands=window > 0 or cu_seqlens is not None,
        starts=bool(bound), rest=plan(call, machine(q.device)).keeps_rest,
    )  # fmt: skip


def fox_infer(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, c: Tensor | None, base: Tensor | None,
    since: Tensor | None, tails: Tensor | None, longest: Tensor | None, sink: Tensor | None, valid: Tensor | None,
    cu_seqlens: Tensor | None, logit_bound: Tensor | None, scale: float, window: int, bound: str, log_eps: float,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention without a gradient; keys may not exist (``valid``), and gates may be summed already.

    Returns o and the rows' log-sum-exp [B, T, H], the latter empty without ``return_lse``.

    Args:
        c, base, since, tails, longest: of a ``GateSums`` of the S keys, with their room; None without one.
    """
    chosen = _plan(q, k, v, masked=valid is not None, backward=False)
    T, S = q.shape[1], k.shape[1]
    with on_device_of(q):
        if c is None or base is None or since is None or tails is None:
            c, base, since, start = bounds(
                q, k, log_decay, cu_seqlens, logit_bound, scale, window, bound, log_eps, valid
            )
        else:
            log_decay, start = c.new_empty(1, 1, 1), None  # a gate per token, already summed
            first = S - T if chosen.forward == "split" else 0  # of the rows whose first keys the kernel reads
            since = since[..., first:S]
            if window > 0:
                if valid is None:
                    begins = torch.arange(first, S, device=q.device, dtype=torch.int32) - (window - 1)
                else:
                    begins = window_starts(valid, window)[:, None, first:].int()
                since = torch.maximum(since, begins)
            if bound:
                start = prune_starts(
                    q, k, log_decay, c, base, tails, since, scale, bound=bound, log_eps=log_eps,
                    logit_bound=logit_bound, valid=valid, longest=longest,
                )  # fmt: skip
        o, lse = _launch(chosen, q, k, v, log_decay, sink, c, base, since, start, scale, valid=valid)
        return o, row_lse(lse, log_decay, c, base, S) if return_lse else lse.new_empty(0)


fox_infer_op = torch.library.custom_op("attnzoo::fox_infer", fox_infer, mutates_args=())


@fox_infer_op.register_fake
def _infer_fake(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, c: Tensor | None, base: Tensor | None,
    since: Tensor | None, tails: Tensor | None, longest: Tensor | None, sink: Tensor | None, valid: Tensor | None,
    cu_seqlens: Tensor | None, logit_bound: Tensor | None, scale: float, window: int, bound: str, log_eps: float,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(
        q.shape[:3] if return_lse else (0,), dtype=torch.float32
    )


@torch.library.custom_op("attnzoo::fox_backward", mutates_args=())
def fox_backward_op(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, log_decay: Tensor | None,
    sink: Tensor | None, cu_seqlens: Tensor | None, c: Tensor, base: Tensor, since: Tensor, start: Tensor,
    o_rest: Tensor, scale: float, deterministic: bool, unrounded: bool, wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, log_decay and sink, empty where they are not ``wanted``.

    Args:
        dlse: [B, T, H] gradient of the rows' log-sum-exp, or None.
        unrounded: whether those of q and k are wanted in float32.
    """
    some = [x if x.numel() else None for x in (c, base, since, start)]
    of_q, of_k, of_v, of_gate, of_sink = wanted
    # without what rounding dropped, the gate's gradient takes the portable kernels
    without_rest = of_gate and not o_rest.numel()
    chosen = _plan(q, k, v, log_decay, gate_gradient=of_gate, deterministic=deterministic or without_rest)
    row_dlse = None if dlse is None else dlse.float().transpose(1, 2).contiguous()
    given = (do, q, k, v, o, lse, log_decay, sink, some[0], some[1], some[2], some[3], scale, row_dlse)
    keys, rows = of_k or of_v or of_gate, of_q or of_gate or of_sink
    with on_device_of(q):
        if chosen.backward == "hopper" and keys:
            from attnzoo.kernels.fox.hopper.backward import fox_backward_hopper

            dq, dk, dv, dkey, drow = fox_backward_hopper(*given, o_rest if o_rest.numel() else None, unrounded)
        else:
            dq, dk, dv, dkey, drow = fox_backward(
                *given, chosen.of("dq"), chosen.of("dkdv"), rows=rows, keys=keys, unrounded=unrounded
            )
        dgate, dsink = lse.new_empty(0), lse.new_empty(0)
        if of_sink and drow is not None:
            dsink = -(drow if row_dlse is None else drow - row_dlse).sum((0, 2))
        if of_gate and log_decay is not None and dkey is not None:
            dgate = _gate_gradient(dkey, drow, log_decay, cu_seqlens, q.shape[1])
    dq, dk, dv = (x if want else x.new_empty(0) for x, want in zip((dq, dk, dv), wanted[:3], strict=True))
    return dq, dk, dv, dgate, dsink


def _gate_gradient(dkey: Tensor, drow: Some, log_decay: Tensor, cu_seqlens: Some, T: int) -> Tensor:
    """Gradient of log_decay from the sums of dS over each key's column and, where they are not 0, each row.

    Of a constant gate these sums weigh dS by its lag. Weighed by their positions, as lags are differences, they would
    add up what the rounding of one sum has from another's, times the positions: 1.3% of a gradient after 2048 tokens.
    """
    if gate_kind(log_decay) == GATE_CONST:
        return dkey.double().sum((0, 2)).float().masked_fill(is_closed(log_decay), 0.0)
    doc = None if cu_seqlens is None else segment_starts(cu_seqlens, dkey.shape[2])
    return gate_gradient(dkey, drow, log_decay, doc, T)


@fox_backward_op.register_fake
def _backward_fake(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, log_decay: Tensor | None,
    sink: Tensor | None, cu_seqlens: Tensor | None, c: Tensor, base: Tensor, since: Tensor, start: Tensor,
    o_rest: Tensor, scale: float, deterministic: bool, unrounded: bool, wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    def dense(x: Some, like: Tensor, want: bool) -> Tensor:
        return like.new_empty(x.shape if want and x is not None else 0)

    of_q, of_k, of_v, of_gate, of_sink = wanted
    return (
        dense(q, lse if unrounded else q, of_q),
        dense(k, lse if unrounded else k, of_k),
        dense(v, v, of_v),
        dense(log_decay, lse, of_gate),
        dense(sink, lse, of_sink),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, log_decay, sink, cu_seqlens, _, scale, _, _, _, _, deterministic, return_lse, *_ = inputs
    o, _, *kept = output
    ctx.save_for_backward(q, k, v, log_decay, sink, cu_seqlens, o, *kept)
    ctx.scale, ctx.deterministic, ctx.return_lse = scale, deterministic, return_lse
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: Some, dlse: Some, *_: Some) -> tuple[Some, ...]:
    q, k, v, log_decay, sink, cu_seqlens, o, lse, c, base, since, start, o_rest = ctx.saved_tensors
    none = (None,) * 16
    dlse = dlse if ctx.return_lse else None
    if do is None and dlse is None:
        return none
    do = torch.zeros_like(o) if do is None else do
    wanted, received = [bool(x) for x in ctx.needs_input_grad[:5]], list(ctx.needs_input_grad[14:])
    unrounded = any(received)
    if unrounded:
        wanted[:2] = received
    # asked for before the forward or before the backward
    deterministic = ctx.deterministic or torch.are_deterministic_algorithms_enabled()
    grads = fox_backward_op(
        do, dlse, q, k, v, o, lse, log_decay, sink, cu_seqlens, c, base, since, start, o_rest, ctx.scale,
        deterministic, unrounded, wanted,
    )  # fmt: skip
    dq, dk, dv, dgate, dsink = (g if want else None for g, want in zip(grads, wanted, strict=True))
    rest = (dv, dgate, None if dsink is None else dsink.to(sink.dtype), *none[5:14])
    return (None, None, *rest, dq, dk) if unrounded else (dq, dk, *rest, None, None)


fox_forward_op.register_autograd(_backward, setup_context=_setup)
refuse_second_derivatives(fox_backward_op)

__all__ = ["bounds", "fox_backward_op", "fox_forward_op", "fox_infer", "fox_infer_op"]
