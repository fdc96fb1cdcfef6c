"""Wall as two custom ops (forward, backward), with what compilers and autograd must know of them.

Each op carries queries and keys (``portable/carry.py``) and launches PaTH's kernels on them, some heads at a time. A
scalar decay beside the channels' is those kernels' own gate, and pruning theirs: every transition has norm at most 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnzoo.kernels.common.autograd import refuse_second_derivatives
from attnzoo.kernels.common.constants import ROW_UNIT
from attnzoo.kernels.common.dense import segment_starts
from attnzoo.kernels.common.device import machine, on_device_of
from attnzoo.kernels.common.gate_sums import gate_gradient
from attnzoo.kernels.common.launching import can_describe
from attnzoo.kernels.common.plans import Plan, announce
from attnzoo.kernels.common.rows import fake_of_forward, kept_of_forward, row_lse
from attnzoo.kernels.levels.head_groups import HeadGroup, head_groups
from attnzoo.kernels.levels.layout import Wanted, clear_tails
from attnzoo.kernels.path.op import gates
from attnzoo.kernels.path.portable.backward import levels_backward
from attnzoo.kernels.path.portable.forward import attend_levels
from attnzoo.kernels.path.portable.prune import block_starts

from .plan import plan
from .portable.carry import carry
from .portable.carry_backward import carry_backward

Some = Tensor | None


def _plan(q: Tensor, v: Tensor, learns: bool, deterministic: bool, shortened: bool) -> Plan:
    """The plan of a call on real tensors, announced."""
    where = machine(q.device)
    described = v.shape[2] != q.shape[2] or can_describe(v)  # repeated heads are a new tensor
    chosen = plan(q.shape[1], q.shape[3], v.shape[3], q.dtype, deterministic, described, where, learns, shortened)
    announce("wall", chosen, where)
    return chosen


def _each(x: Tensor, H: int) -> Tensor:
    """Keys or values with a head per query head, as the carried keys have them."""
    return x if x.shape[2] == H else x.repeat_interleave(H // x.shape[2], 2)


@torch.library.custom_op("attnzoo::wall_forward", mutates_args=())
def wall_forward_op(
    q: Tensor, k: Tensor, v: Tensor, log_diag: Tensor, log_decay: Tensor | None, sink: Tensor | None,
    cu_seqlens: Tensor | None, logit_bound: Tensor | None, scale: float, window: int, bound: str, log_eps: float,
    learns: bool, deterministic: bool, return_lse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns o, row_lse, and lse, c, base, since, start, o_rest for the backward pass (empty where they do not apply).

    Args:
        learns: whether gradients will be asked for that depend on what the rounding of o drops: all but v's.
        window, bound, log_eps, return_lse: as in ``path_forward_op``.
    """
    (B, T, H, _), V = q.shape, v.shape[3]
    chosen = _plan(q, v, learns, deterministic, bool(bound))
    o, lse = q.new_empty((B, T, H, V)), q.new_empty((B, H, T), dtype=torch.float32)
    start = q.new_zeros((B, H, -(-T // ROW_UNIT)), dtype=torch.int32) if bound else None
    with on_device_of(q):
        c, base, since, tails = gates(q, log_decay, cu_seqlens, window)
        o_rest = torch.empty_like(o) if chosen.keeps_rest else None

        def carry_and_attend(group: HeadGroup) -> None:
            p_q, p_k = group.queries(q), group.keys(k)
            p_c, p_base, p_since, p_start = group.rows(c), group.rows(base), group.rows(since), group.rows(start)
            block, levels = carry(p_q, p_k, group.queries(log_diag))
            if p_start is not None and p_c is not None and p_base is not None and p_since is not None:
                assert tails is not None
                p_start.copy_(block_starts(
                    p_q, _each(p_k, p_q.shape[2]), block, p_c, p_base, group.rows(tails), p_since, scale, bound,
                    log_eps, group.heads(logit_bound),
                ))  # fmt: skip
            attend_levels(
                block, levels, _each(group.keys(v), p_q.shape[2]), group.queries(o), lse[group.b, group.h], p_c, p_base,
                p_since, p_start, scale, chosen, group.heads(sink),
                None if o_rest is None else group.queries(o_rest),
            )  # fmt: skip

        for group in head_groups(q, k, backward=False):
            carry_and_attend(group)
        rows = row_lse(lse, log_decay, c, base, T) if return_lse else lse.new_empty(0)
    return o, rows, lse, *kept_of_forward(lse, c, base, since, start), q.new_empty(0) if o_rest is None else o_rest


@wall_forward_op.register_fake
def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, log_diag: Tensor, log_decay: Tensor | None, sink: Tensor | None,
    cu_seqlens: Tensor | None, logit_bound: Tensor | None, scale: float, window: int, bound: str, log_eps: float,
    learns: bool, deterministic: bool, return_lse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    # what the rounding drops is kept or not whatever the length is: it may be a symbol here
    K, V, where = int(q.shape[3]), int(v.shape[3]), machine(q.device)
    return fake_of_forward(
        q, v, q.shape[1], return_lse, log_decay=log_decay, bands=window > 0 or cu_seqlens is not None,
        starts=bool(bound), rest=plan(1, K, V, q.dtype, deterministic, True, where, learns).keeps_rest,
    )  # fmt: skip


@torch.library.custom_op("attnzoo::wall_backward", mutates_args=())
def wall_backward_op(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_diag: Tensor, o: Tensor, lse: Tensor,
    log_decay: Tensor | None, sink: Tensor | None, cu_seqlens: Tensor | None, c: Tensor, base: Tensor, since: Tensor,
    start: Tensor, o_rest: Tensor, scale: float, deterministic: bool, wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, log_diag, log_decay and sink, contiguous; empty where not ``wanted`` (in this order).

    Args:
        dlse: [B, T, H] gradient of row_lse, or None.
    """
    of_q, of_k, of_v, of_gates, of_decay, of_sink = wanted
    deterministic = deterministic or (of_decay and not o_rest.numel())  # as in path_backward_op
    H, chosen = q.shape[2], _plan(q, v, of_decay, deterministic, start.numel() > 0)
    parts = Wanted(of_q, of_k, of_v, of_gates, False, of_decay, of_sink)
    carried = of_q or of_k or of_gates
    dq, dk, dv = (x.new_empty(x.shape if asked else (0,)) for x, asked in ((q, carried), (k, carried), (v, of_v)))
    dgates = lse.new_empty(log_diag.shape if of_gates else (0,))
    row_dlse = None if dlse is None else dlse.float().transpose(1, 2).contiguous()
    drow = torch.empty_like(lse) if sink is not None or (log_decay is not None and dlse is not None) else None
    dkey = torch.empty_like(lse) if of_decay else None
    saved = [x if x.numel() else None for x in (c, base, since, start)]
    rest = o_rest if o_rest.numel() else None
    with on_device_of(q):

        def differentiate(group: HeadGroup) -> None:  # what it makes is gone before the next begins
            x = group.queries(q), group.keys(k), group.queries(log_diag)
            p_v = _each(group.keys(v), x[0].shape[2])
            p_dv = p_v.new_empty(p_v.shape)
            block, levels = carry(*x)
            if chosen.backward == "hopper":
                clear_tails(levels, q.shape[1])
            p_c, p_base, p_since, p_start = (group.rows(y) for y in saved)
            d_block, d_levels, _ = levels_backward(
                block, levels, group.queries(do), p_v, group.queries(o), lse[group.b, group.h], p_c, p_base, p_since,
                p_start, scale, chosen, parts, group.heads(sink), group.rows(row_dlse), group.rows(drow),
                group.rows(dkey), p_dv, None if rest is None else group.queries(rest), unrounded=True,
            )  # fmt: skip
            if of_v:
                group.keys(dv).copy_(p_dv.unflatten(2, (-1, H // v.shape[2])).sum(3))
            if carried:
                p_da = group.queries(dgates) if of_gates else None
                carry_backward(*x, block.m, d_block, d_levels, group.queries(dq), group.keys(dk), p_da, p_start)

        for group in head_groups(q, k, backward=True, one_pass=chosen.backward == "hopper"):
            differentiate(group)
        ddecay, dsink = lse.new_empty(0), lse.new_empty(0)
        if log_decay is not None and dkey is not None:
            doc = None if cu_seqlens is None else segment_starts(cu_seqlens, q.shape[1])
            ddecay = gate_gradient(dkey, drow, log_decay, doc, q.shape[1])
    if sink is not None and drow is not None and of_sink:  # the sink's part of dS, with which a row adds up to dlse
        dsink = (-drow if row_dlse is None else row_dlse - drow).sum((0, 2)).to(sink.dtype)
    empty = q.new_empty(0)
    return dq if of_q else empty, dk if of_k else empty.clone(), dv, dgates, ddecay, dsink


@wall_backward_op.register_fake
def _backward_fake(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_diag: Tensor, o: Tensor, lse: Tensor,
    log_decay: Tensor | None, sink: Tensor | None, cu_seqlens: Tensor | None, c: Tensor, base: Tensor, since: Tensor,
    start: Tensor, o_rest: Tensor, scale: float, deterministic: bool, wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    like = (q, k, v, log_diag, lse if log_decay is None else log_decay, lse if sink is None else sink)
    dq, dk, dv, dgates, ddecay, dsink = (
        x.new_empty(x.shape if asked else (0,)) for x, asked in zip(like, wanted, strict=True)
    )
    return dq, dk, dv, dgates, ddecay, dsink


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, log_diag, log_decay, sink, cu_seqlens, _, scale, *_, deterministic, return_lse = inputs
    o, _, *kept = output
    ctx.save_for_backward(q, k, v, log_diag, log_decay, sink, cu_seqlens, o, *kept)
    ctx.scale, ctx.deterministic, ctx.return_lse = scale, deterministic, return_lse
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: Some, dlse: Some, *_: Some) -> tuple[Some, ...]:
    q, k, v, log_diag, log_decay, sink, cu_seqlens, o, lse, c, base, since, start, o_rest = ctx.saved_tensors
    wanted, none = list(ctx.needs_input_grad[:6]), (None,) * 15
    dlse = dlse if ctx.return_lse else None
    if (do is None and dlse is None) or not any(wanted):
        return none
    # asked for before the forward or before the backward
    deterministic = ctx.deterministic or torch.are_deterministic_algorithms_enabled()
    grads = wall_backward_op(
        torch.zeros_like(o) if do is None else do, dlse, q, k, v, log_diag, o, lse, log_decay, sink, cu_seqlens, c,
        base, since, start, o_rest, ctx.scale, deterministic, wanted,
    )  # fmt: skip
    return (*(g if asked else None for g, asked in zip(grads, wanted, strict=True)), *none[6:])


wall_forward_op.register_autograd(_backward, setup_context=_setup)
refuse_second_derivatives(wall_backward_op)
