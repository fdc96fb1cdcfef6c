"""PaTH as two custom ops (forward, backward); ``operands.py`` declares what they take and return.

Each op adds up the gates (``common/gate_sums.py``) and launches the kernels that ``levels/plan.py`` has chosen:
``portable/forward.py`` and ``portable/backward.py`` say in which order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.kernels.common.autograd import attention_gradients
from attnzoo.kernels.common.dense import segment_starts
from attnzoo.kernels.common.device import machine, on_device_of
from attnzoo.kernels.common.gate_sums import gate_gradient, gate_sums
from attnzoo.kernels.common.launching import can_describe
from attnzoo.kernels.common.named_op import NamedOp
from attnzoo.kernels.common.options import OpOptions
from attnzoo.kernels.common.plans import Plan, announce
from attnzoo.kernels.common.rows import (
    RowGates,
    fake_attended,
    fake_gradients,
    first_visible_without_gate,
    row_lse,
    sink_gradient,
)
from attnzoo.kernels.levels.layout import Wanted
from attnzoo.kernels.levels.plan import Call, plan
from attnzoo.kernels.path.kept_transitions import kept_bytes
from attnzoo.kernels.path.operands import PathAttended, PathBackward, PathForward, PathGradients, PathOperands
from attnzoo.kernels.path.portable.backward import path_backward
from attnzoo.kernels.path.portable.forward import path_forward
from attnzoo.kernels.path.portable.prune import path_starts

Some = Tensor | None


def summed(q: Tensor, log_decay: Some, options: OpOptions) -> tuple[RowGates, Some]:
    """Gate sums and first visible keys, and the tails that pruning reads; without gates first visible keys alone."""
    T = q.shape[1]
    doc = segment_starts(options.cu_seqlens, T)
    if log_decay is None:
        return RowGates(None, None, first_visible_without_gate(doc, options.window, T, q.device)), None
    c, base, first_visible, tails = gate_sums(log_decay, doc, options.window or T)
    return RowGates(c, base, first_visible), tails


def row_gates(given: PathOperands) -> RowGates:
    """Gate sums and first keys of a call, without attention."""
    options = given.options
    rows, tails = summed(given.q, given.log_decay, options)
    c, base, first_visible, _ = rows
    if not options.bound or c is None or base is None or first_visible is None or tails is None:
        return rows
    start = path_starts(
        given.q, given.k, given.w, given.beta, c, base, tails, first_visible, options.scale, bound=options.bound,
        log_eps=options.log_eps, logit_bound=options.logit_bound,
    )  # fmt: skip
    return rows._replace(first_computed=start)


def _plan(given: PathOperands, needs_gate_grad: bool, deterministic: bool, shortened: bool) -> Plan:
    """The plan of a call on real tensors, announced."""
    q, v, where = given.q, given.v, machine(given.q.device)
    (T, _, K), V = q.shape[1:], v.shape[3]
    chosen = plan(Call(T, K, V, q.dtype, needs_gate_grad, deterministic, shortened, can_describe(v)), where)
    announce("path", chosen, where)
    return chosen


def _forward(x: PathForward) -> PathAttended:
    q, k, v, w, beta, log_decay, sink, log_diag, options = given = x.given
    chosen = _plan(given, x.needs_gate_grad, x.deterministic, options.window > 0 or bool(options.bound))
    with on_device_of(q):
        rows, tails = summed(q, log_decay, options)
        o_rest = q.new_empty((*q.shape[:3], v.shape[3])) if chosen.keeps_rest else None
        kept = q.new_empty(kept_bytes(q, k, w), dtype=torch.uint8) if x.keep else None
        o, lse, start = path_forward(
            q, k, v, w, beta, rows.c, rows.base, tails, rows.first_visible, options.scale, chosen,
            window=options.window, bound=options.bound, log_eps=options.log_eps, logit_bound=options.logit_bound,
            sink=sink, o_rest=o_rest, log_diag=log_diag, made=kept,
        )  # fmt: skip
        natural = row_lse(lse, log_decay, rows, q.shape[1]) if x.return_lse else None
    return PathAttended(o, natural, lse, rows._replace(first_computed=start), o_rest, kept)


def _forward_fake(x: PathForward) -> PathAttended:
    q, k, v, w, _, log_decay, _, _, options = x.given
    # what the rounding drops is kept or not whatever the length is: it may be a symbol here
    call = Call(1, int(q.shape[3]), int(v.shape[3]), q.dtype, x.needs_gate_grad, x.deterministic)
    rest, bounded = plan(call, machine(q.device)).keeps_rest, options.window > 0 or bool(options.bound)
    made = fake_attended(q, v, log_decay, options, S=q.shape[1], return_lse=x.return_lse, bounded=bounded, rest=rest)
    return PathAttended(*made, q.new_empty(kept_bytes(q, k, w), dtype=torch.uint8) if x.keep else None)


def _backward(x: PathBackward) -> PathGradients:
    (q, k, v, w, beta, log_decay, sink, log_diag, options), made, wanted = x.given, x.made, x.wanted
    # without what rounding dropped, the gradient of log_decay takes the portable kernels
    deterministic = x.deterministic or (wanted.log_decay and made.o_rest is None)
    chosen = _plan(x.given, wanted.log_decay, deterministic, made.rows.first_computed is not None)
    dlse = None if x.dlse is None else x.dlse.float().transpose(1, 2).contiguous()
    with on_device_of(q):
        *grads, columns, sums, dlog_diag = path_backward(
            x.do, q, k, v, w, beta, made.o, made.lse, *made.rows, options.scale, chosen, wanted, o_rest=made.o_rest,
            sink=sink, dlse=dlse, log_diag=log_diag, made=made.kept, unrounded=x.unrounded,
        )  # fmt: skip
        dgate = None
        if log_decay is not None and columns is not None:
            doc = segment_starts(options.cu_seqlens, q.shape[1])
            dgate = gate_gradient(columns, sums, log_decay, doc, q.shape[1])
    dsink = sink_gradient(sums, dlse, sink) if sink is not None and sums is not None and wanted.sink else None
    found = (*grads, dgate, dsink, dlog_diag)
    return PathGradients(*(grad if asked else None for grad, asked in zip(found, wanted, strict=True)))


def _backward_fake(x: PathBackward) -> PathGradients:
    return PathGradients(*fake_gradients(x, PathGradients._fields, narrow=("q", "k", "w")))


path_forward_op = NamedOp("attnzoo::path_forward", PathForward, PathAttended, _forward, _forward_fake)
path_backward_op = NamedOp("attnzoo::path_backward", PathBackward, PathGradients, _backward, _backward_fake)
attention_gradients(path_forward_op, path_backward_op, PathBackward, Wanted)
