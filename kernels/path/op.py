"""PaTH as two custom ops (forward, backward), with what compilers and autograd must know of them.

Each op adds up the gates (``common/gate_sums.py``) and launches the kernels that ``plan.py`` has chosen:
``portable/forward.py`` and ``portable/backward.py`` say in which order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnzoo.kernels.common.autograd import refuse_second_derivatives
from attnzoo.kernels.common.dense import segment_starts
from attnzoo.kernels.common.device import machine, on_device_of
from attnzoo.kernels.common.gate_sums import gate_gradient, gate_sums
from attnzoo.kernels.common.launching import can_describe
from attnzoo.kernels.common.plans import Plan, announce
from attnzoo.kernels.common.rows import fake_of_forward, kept_of_forward, row_lse, since_without_gate
from attnzoo.kernels.levels.layout import Wanted
from attnzoo.kernels.levels.plan import Call, plan
from attnzoo.kernels.path.kept_transitions import kept_bytes
from attnzoo.kernels.path.portable.backward import path_backward
from attnzoo.kernels.path.portable.forward import path_forward
from attnzoo.kernels.path.portable.prune import path_starts


def gates(
    q: Tensor, log_decay: Tensor | None, cu_seqlens: Tensor | None, window: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """c, base, first visible keys and tails, as ``gate_sums`` has them; without gates, the first visible keys alone."""
    T = q.shape[1]
    doc = None if cu_seqlens is None else segment_starts(cu_seqlens, T)
    if log_decay is not None:
        return gate_sums(log_decay, doc, window or T)
    return None, None, since_without_gate(doc, window, T, q.device), None


def starts(
    q: Tensor, k: Tensor, w: Tensor, beta: Tensor, log_decay: Tensor, cu_seqlens: Tensor | None,
    logit_bound: Tensor | None, scale: float, window: int, bound: str, log_eps: float,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """First visible keys [B, H, T], and the first key of each row unit where ``bound`` names one."""
    c, base, since, tails = gates(q, log_decay, cu_seqlens, window)
    if not bound:
        return since, None
    assert c is not None
    assert base is not None
    assert tails is not None
    assert since is not None
    return since, path_starts(
        q, k, w, beta, c, base, tails, since, scale, bound=bound, log_eps=log_eps, logit_bound=logit_bound
    )


def _plan(q: Tensor, v: Tensor, decay_gradient: bool, deterministic: bool, shortened: bool) -> Plan:
    """The plan of a call on real tensors, announced."""
    (T, _, K), V, where = q.shape[1:], v.shape[3], machine(q.device)
    chosen = plan(Call(T, K, V, q.dtype, decay_gradient, deterministic, shortened, can_describe(v)), where)
    announce("path", chosen, where)
    return chosen


@torch.library.custom_op("attnzoo::path_forward", mutates_args=())
def path_forward_op(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, log_decay: Tensor | None, sink: Tensor | None,
    log_diag: Tensor | None, cu_seqlens: Tensor | None, logit_bound: Tensor | None, scale: float, window: int,
    bound: str, log_eps: float, learns_decay: bool, deterministic: bool, return_lse: bool, keep: bool,
    to_q: Tensor | None = None, to_k: Tensor | None = None, to_w: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns o, row_lse, and for the backward lse, c, base, since, start, o_rest, made (empty if not needed).

    Args:
        window: visible keys per row, 0 for no window.
        return_lse: whether row_lse holds the log-sum-exp of each row [B, T, H].
        learns_decay: whether a gradient of log_decay will be asked for; only then may o_rest [B, T, H, V], what the
            rounding of o drops, be there.
        keep: whether made holds the carried operands (``keeping.py``).
        to_q, to_k, to_w: if given, the gradients of q, k and w go there, unrounded.
    """
    chosen = _plan(q, v, learns_decay, deterministic, window > 0 or bool(bound))
    with on_device_of(q):
        c, base, since, tails = gates(q, log_decay, cu_seqlens, window)
        o_rest = q.new_empty((*q.shape[:3], v.shape[3])) if chosen.keeps_rest else None
        made = q.new_empty(kept_bytes(q, k, w), dtype=torch.uint8) if keep else None
        o, lse, start = path_forward(
            q, k, v, w, beta, c, base, tails, since, scale, chosen, window=window, bound=bound, log_eps=log_eps,
            logit_bound=logit_bound, sink=sink, o_rest=o_rest, log_diag=log_diag, made=made,
        )  # fmt: skip
        rows = row_lse(lse, log_decay, c, base, q.shape[1]) if return_lse else lse.new_empty(0)
    rest, made = (q.new_empty(0) if x is None else x for x in (o_rest, made))
    return o, rows, lse, *kept_of_forward(lse, c, base, since, start), rest, made


@path_forward_op.register_fake
def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, log_decay: Tensor | None, sink: Tensor | None,
    log_diag: Tensor | None, cu_seqlens: Tensor | None, logit_bound: Tensor | None, scale: float, window: int,
    bound: str, log_eps: float, learns_decay: bool, deterministic: bool, return_lse: bool, keep: bool,
    to_q: Tensor | None = None, to_k: Tensor | None = None, to_w: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    # what the rounding drops is kept or not whatever the length is: it may be a symbol here
    call = Call(1, int(q.shape[3]), int(v.shape[3]), q.dtype, learns_decay, deterministic)
    given = fake_of_forward(
        q, v, q.shape[1], return_lse, log_decay=log_decay, bands=window > 0 or cu_seqlens is not None,
        starts=window > 0 or bool(bound), rest=plan(call, machine(q.device)).keeps_rest,
    )  # fmt: skip
    made = q.new_empty(kept_bytes(q, k, w), dtype=torch.uint8) if keep else q.new_empty(0)
    return *given, made


@torch.library.custom_op("attnzoo::path_backward", mutates_args=())
def path_backward_op(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, o: Tensor, lse: Tensor,
    log_decay: Tensor | None, sink: Tensor | None, log_diag: Tensor | None, cu_seqlens: Tensor | None, c: Tensor,
    base: Tensor, since: Tensor, start: Tensor, o_rest: Tensor, made: Tensor, scale: float, deterministic: bool,
    unrounded: bool, wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, w, beta, log_decay, sink, log_diag, contiguous; empty where not ``wanted`` (in this order).

    Args:
        dlse: [B, T, H] gradient of row_lse, or None.
        unrounded: whether those of q, k and w are wanted in float32.
    """
    of_decay = wanted[5]  # without what rounding dropped, its gradient takes the portable kernels
    deterministic = deterministic or (of_decay and not o_rest.numel())
    chosen = _plan(q, v, of_decay, deterministic, start.numel() > 0)
    row_dlse = None if dlse is None else dlse.float().transpose(1, 2).contiguous()
    with on_device_of(q):
        *grads, dkey, drow, da = path_backward(
            do, q, k, v, w, beta, o, lse, c if c.numel() else None, base if base.numel() else None,
            since if since.numel() else None, start if start.numel() else None, scale, chosen, Wanted(*wanted),
            o_rest=o_rest if o_rest.numel() else None, sink=sink, dlse=row_dlse, log_diag=log_diag,
            made=made if made.numel() else None, unrounded=unrounded,
        )  # fmt: skip
    dq, dk, dv, dw, dbeta = (
        x.new_empty(0) if g is None or not asked else g
        for x, g, asked in zip((q, k, v, w, beta), grads, wanted, strict=False)
    )
    dgate, dsink = lse.new_empty(0), lse.new_empty(0)
    if log_decay is not None and dkey is not None:
        doc = None if cu_seqlens is None else segment_starts(cu_seqlens, q.shape[1])
        with on_device_of(q):
            dgate = gate_gradient(dkey, drow, log_decay, doc, q.shape[1])
    if sink is not None and drow is not None and wanted[6]:  # the sink's part of dS, with which a row adds up to dlse
        dsink = (-drow if row_dlse is None else row_dlse - drow).sum((0, 2)).to(sink.dtype)
    return dq, dk, dv, dw, dbeta, dgate, dsink, da if da is not None and wanted[7] else lse.new_empty(0)


@path_backward_op.register_fake
def _backward_fake(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, o: Tensor, lse: Tensor,
    log_decay: Tensor | None, sink: Tensor | None, log_diag: Tensor | None, cu_seqlens: Tensor | None, c: Tensor,
    base: Tensor, since: Tensor, start: Tensor, o_rest: Tensor, made: Tensor, scale: float, deterministic: bool,
    unrounded: bool, wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    like = (q, k, v, w, beta, *(lse if x is None else x for x in (log_decay, sink, log_diag)))
    dq, dk, dv, dw, dbeta, dgate, dsink, da = (
        (lse if unrounded and n in (0, 1, 3) else x).new_empty(x.shape if asked else (0,))
        for n, (x, asked) in enumerate(zip(like, wanted, strict=True))
    )
    return dq, dk, dv, dw, dbeta, dgate, dsink, da


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, w, beta, log_decay, sink, log_diag, cu_seqlens, _, scale, *_, deterministic, return_lse, _, _, _, _ = (
        inputs
    )
    o, _, *kept = output
    ctx.save_for_backward(q, k, v, w, beta, log_decay, sink, log_diag, cu_seqlens, o, *kept)
    ctx.scale, ctx.deterministic, ctx.return_lse = scale, deterministic, return_lse
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: Tensor | None, dlse: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, w, beta, log_decay, sink, log_diag, cu_seqlens, o, *kept = ctx.saved_tensors
    wanted, none = list(ctx.needs_input_grad[:8]), (None,) * 21
    received = list(ctx.needs_input_grad[18:])
    unrounded = any(received)
    if unrounded:
        wanted[0], wanted[1], wanted[3] = received
    dlse = dlse if ctx.return_lse else None
    if (do is None and dlse is None) or not any(wanted):
        return none
    # asked for before the forward or before the backward
    deterministic = ctx.deterministic or torch.are_deterministic_algorithms_enabled()
    grads = path_backward_op(
        torch.zeros_like(o) if do is None else do, dlse, q, k, v, w, beta, o, kept[0], log_decay, sink, log_diag,
        cu_seqlens, *kept[1:], ctx.scale, deterministic, unrounded, wanted,
    )  # fmt: skip
    grads = [g if asked else None for g, asked in zip(grads, wanted, strict=True)]
    if not unrounded:
        return (*grads, *none[8:])
    dq, dk, dv, dw, *others = grads
    return (None, None, dv, None, *others, *none[8:18], dq, dk, dw)


path_forward_op.register_autograd(_backward, setup_context=_setup)
refuse_second_derivatives(path_backward_op)
