"""Wall as two custom ops (forward, backward), with what compilers and autograd must know of them.

Each op carries queries and keys (``portable/carry.py``) and launches PaTH's kernels on them, some heads at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnzoo.kernels.common.dense import segment_starts
from attnzoo.kernels.common.device import machine, on_device_of
from attnzoo.kernels.common.launching import can_describe
from attnzoo.kernels.common.plans import Plan, announce
from attnzoo.kernels.common.rows import row_lse, since_without_gate
from attnzoo.kernels.path.head_groups import head_groups
from attnzoo.kernels.path.levels import Wanted
from attnzoo.kernels.path.portable.backward import levels_backward
from attnzoo.kernels.path.portable.forward import attend_levels

from .plan import plan
from .portable.carry import carry
from .portable.carry_backward import carry_backward

Some = Tensor | None


def _plan(q: Tensor, v: Tensor, deterministic: bool) -> Plan:
    """The plan of a call on real tensors, announced."""
    where = machine(q.device)
    described = v.shape[2] != q.shape[2] or can_describe(v)  # repeated heads are a new tensor
    chosen = plan(q.shape[1], q.shape[3], v.shape[3], q.dtype, deterministic, described, where)
    announce("wall", chosen, where)
    return chosen


def _since(q: Tensor, cu_seqlens: Some, window: int) -> Some:
    """First visible keys [1, 1, T] int32, or None where all rows see every key before them."""
    T = q.shape[1]
    return since_without_gate(None if cu_seqlens is None else segment_starts(cu_seqlens, T), window, T, q.device)


def _values(v: Tensor, H: int) -> Tensor:
    """v with a head per query head, as the carried keys have them."""
    return v if v.shape[2] == H else v.repeat_interleave(H // v.shape[2], 2)


@torch.library.custom_op("attnzoo::wall_forward", mutates_args=())
def wall_forward_op(
    q: Tensor, k: Tensor, v: Tensor, log_diag: Tensor, sink: Tensor | None, cu_seqlens: Tensor | None, scale: float,
    window: int, deterministic: bool, return_lse: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns o, row_lse, and lse for the backward pass.

    Args:
        window: visible keys per row, 0 for no window.
        return_lse: whether row_lse holds the log-sum-exp of each row [B, T, H]; else it is empty.
    """
    B, T, H, _ = q.shape
    chosen = _plan(q, v, deterministic)
    o, lse = q.new_empty((B, T, H, v.shape[3])), q.new_empty((B, H, T), dtype=torch.float32)
    with on_device_of(q):
        since = _since(q, cu_seqlens, window)
        for group in head_groups(q, k, backward=False):
            p_q = group.queries(q)
            block, levels = carry(p_q, group.keys(k), group.queries(log_diag))
            attend_levels(
                block, levels, _values(group.keys(v), p_q.shape[2]), group.queries(o), lse[group.b, group.h], None,
                None, since, None, scale, chosen, group.heads(sink), None,
            )  # fmt: skip
        rows = row_lse(lse, None, None, None, T) if return_lse else lse.new_empty(0)
    return o, rows, lse


@wall_forward_op.register_fake
def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, log_diag: Tensor, sink: Tensor | None, cu_seqlens: Tensor | None, scale: float,
    window: int, deterministic: bool, return_lse: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    B, T, H, _ = q.shape
    lse = q.new_empty((B, H, T), dtype=torch.float32)
    return q.new_empty((B, T, H, v.shape[3])), lse.new_empty((B, T, H) if return_lse else (0,)), lse


@torch.library.custom_op("attnzoo::wall_backward", mutates_args=())
def wall_backward_op(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_diag: Tensor, o: Tensor, lse: Tensor,
    sink: Tensor | None, cu_seqlens: Tensor | None, scale: float, window: int, deterministic: bool, wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, log_diag and sink, contiguous; empty where not ``wanted`` (in this order).

    Args:
        dlse: [B, T, H] gradient of row_lse, or None.
    """
    H, chosen = q.shape[2], _plan(q, v, deterministic)
    of_q, of_k, of_v, of_gates, of_sink = wanted
    parts = Wanted(of_q, of_k, of_v, of_gates, False, False, of_sink)
    carried = of_q or of_k or of_gates
    dq, dk, dv = (x.new_empty(x.shape if asked else (0,)) for x, asked in ((q, carried), (k, carried), (v, of_v)))
    dgates, drow = lse.new_empty(log_diag.shape if of_gates else (0,)), None if sink is None else torch.empty_like(lse)
    row_dlse = None if dlse is None else dlse.float().transpose(1, 2).contiguous()
    with on_device_of(q):
        since = _since(q, cu_seqlens, window)
        for group in head_groups(q, k, backward=True, one_pass=chosen.backward == "hopper"):
            x = group.queries(q), group.keys(k), group.queries(log_diag)
            p_v = _values(group.keys(v), x[0].shape[2])
            p_dv = p_v.new_empty(p_v.shape)
            block, levels = carry(*x)
            d_block, d_levels, _ = levels_backward(
                block, levels, group.queries(do), p_v, group.queries(o), lse[group.b, group.h], None, None, since, None,
                scale, chosen, parts, group.heads(sink), group.rows(row_dlse), group.rows(drow), p_dv, None,
            )  # fmt: skip
            if of_v:
                group.keys(dv).copy_(p_dv.unflatten(2, (-1, H // v.shape[2])).sum(3))
            if carried:
                p_da = group.queries(dgates) if of_gates else None
                carry_backward(*x, block.m, d_block, d_levels, group.queries(dq), group.keys(dk), p_da)
    dsink = lse.new_empty(0)
    if sink is not None and drow is not None and of_sink:  # the sink's part of dS, with which a row adds up to dlse
        dsink = (-drow if row_dlse is None else row_dlse - drow).sum((0, 2)).to(sink.dtype)
    empty = q.new_empty(0)
    return dq if of_q else empty, dk if of_k else empty.clone(), dv, dgates, dsink


@wall_backward_op.register_fake
def _backward_fake(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_diag: Tensor, o: Tensor, lse: Tensor,
    sink: Tensor | None, cu_seqlens: Tensor | None, scale: float, window: int, deterministic: bool, wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    like = (q, k, v, log_diag, lse if sink is None else sink)
    dq, dk, dv, dgates, dsink = (x.new_empty(x.shape if asked else (0,)) for x, asked in zip(like, wanted, strict=True))
    return dq, dk, dv, dgates, dsink


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, log_diag, sink, cu_seqlens, scale, window, deterministic, return_lse = inputs
    o, _, lse = output
    ctx.save_for_backward(q, k, v, log_diag, o, lse, sink, cu_seqlens)
    ctx.scale, ctx.window, ctx.deterministic, ctx.return_lse = scale, window, deterministic, return_lse
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: Some, dlse: Some, *_: Some) -> tuple[Some, ...]:
    q, k, v, log_diag, o, lse, sink, cu_seqlens = ctx.saved_tensors
    wanted, none = list(ctx.needs_input_grad[:5]), (None,) * 10
    dlse = dlse if ctx.return_lse else None
    if (do is None and dlse is None) or not any(wanted):
        return none
    # asked for before the forward or before the backward
    deterministic = ctx.deterministic or torch.are_deterministic_algorithms_enabled()
    grads = wall_backward_op(
        torch.zeros_like(o) if do is None else do, dlse, q, k, v, log_diag, o, lse, sink, cu_seqlens, ctx.scale,
        ctx.window, deterministic, wanted,
    )  # fmt: skip
    return (*(g if asked else None for g, asked in zip(grads, wanted, strict=True)), *none[5:])


wall_forward_op.register_autograd(_backward, setup_context=_setup)
