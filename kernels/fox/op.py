"""FoX as three custom ops (forward, inference, backward); ``operands.py`` declares what they take and return.

Each op adds up the gates (``common/gate_sums.py``), finds the first key of each block of rows where there is pruning
(``portable/prune.py``), and launches the kernels that ``plan.py`` has chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.algebra.gate import is_closed
from attnzoo.kernels.common.autograd import attention_gradients
from attnzoo.kernels.common.constants import GATE_CONST, GATE_FULL, KEY_UNIT, ROW_UNIT
from attnzoo.kernels.common.dense_reference import segment_starts, window_starts
from attnzoo.kernels.common.device import machine, on_device_of
from attnzoo.kernels.common.gate_sums import gate_gradient, gate_sums
from attnzoo.kernels.common.launching import can_describe, cdiv, gate_kind
from attnzoo.kernels.common.named_op import NamedOp
from attnzoo.kernels.common.plans import Plan, announce, launcher
from attnzoo.kernels.common.pruning import norm_max
from attnzoo.kernels.common.rows import (
    Attended,
    RowGates,
    fake_attended,
    fake_gradients,
    first_visible_of_closed,
    first_visible_without_gate,
    row_lse,
    sink_gradient,
)
from attnzoo.kernels.fox.operands import (
    FoxBackward,
    FoxForward,
    FoxGradients,
    FoxInference,
    FoxInferred,
    FoxOperands,
    FoxWanted,
    KeptSums,
)
from attnzoo.kernels.fox.plan import BACKWARD, FORWARD, FoxCall, few_rows, plan, searched
from attnzoo.kernels.fox.portable.prune import prune_starts

Some = Tensor | None


def _plan(given: FoxOperands, *, backward: bool = True, **asked: bool) -> Plan:
    """The plan of a call on real tensors, announced; without ``backward`` its own is not asked for."""
    q, k, v, log_decay, *_ = given
    (T, H, K), (S, G), V = q.shape[1:], k.shape[1:3], v.shape[3]
    where, alone = machine(q.device), given.portable_alone
    described = (not backward and few_rows(T, S, H // G)) or can_describe(q, k, v)
    lags = asked.get("needs_gate_grad", False) and gate_kind(log_decay) == GATE_CONST
    call = FoxCall(T, S, H // G, K, V, q.dtype, described=described, lags=lags, portable_alone=alone, **asked)
    chosen = plan(call, where)
    announce("fox", chosen, where)
    return chosen


def row_gates(given: FoxOperands, valid: Some = None, *, search: bool = True) -> RowGates:
    """Gate sums and first keys of a call whose gates are not summed yet; ``search`` for what pruning leaves out."""
    k, log_decay, options = given.k, given.log_decay, given.options
    S = k.shape[1]
    doc = segment_starts(options.cu_seqlens, S)
    c = base = tails = None
    first: Some
    counted = options.window if valid is None else 0  # a window over all keys; over those that exist it comes last
    if log_decay is not None and gate_kind(log_decay) == GATE_FULL:
        c, base, first, tails = gate_sums(log_decay, doc, counted if counted > 0 else S)
    else:
        first = first_visible_without_gate(doc, counted, S, k.device)
        if log_decay is not None:
            first = _later(first, first_visible_of_closed(log_decay, S))
    if valid is not None and options.window > 0:
        first = _later(first, window_starts(valid, options.window).int()[:, None])
    rows = RowGates(c, base, first)
    if not (search and options.bound):
        return rows
    near = rows
    if given.rule is not None:  # of the keys near a row, only those that are remembered in any case bound its sum
        own = first_visible_without_gate(None, given.rule.remembers, S, k.device)
        near = rows._replace(first_visible=_later(first, own))
    return rows._replace(first_computed=prune_starts(given, near, tails, valid))


def _searched(given: FoxOperands) -> bool:
    """Whether attention looks for what pruning leaves out."""
    return searched(given.q.shape, given.k.shape[1], given.options.bound, machine(given.q.device))


def _later(a: Some, b: Some) -> Some:
    """The later of two first visible keys, [B or 1, H or 1, S]."""
    if a is None or b is None:
        return b if a is None else a
    return torch.maximum(a, b)


def _forward(x: FoxForward) -> Attended:
    given = x.given
    chosen = _plan(given, needs_gate_grad=x.needs_gate_grad, deterministic=x.deterministic)
    q, v = given.q, given.v
    with on_device_of(q):
        rows = row_gates(given, search=_searched(given))
        o_rest = q.new_empty((*q.shape[:3], v.shape[3])) if chosen.keeps_rest else None
        o, lse = launcher(FORWARD[chosen.forward])(given, rows, chosen, o_rest=o_rest)
        natural = row_lse(lse, given.log_decay, rows, given.k.shape[1]) if x.return_lse else None
    if given.options.bound and rows.first_computed is None:  # compilers know no lengths: it is there, and not read
        B, T, H, _ = q.shape
        rows = rows._replace(first_computed=lse.new_empty((B, H, cdiv(T, ROW_UNIT)), dtype=torch.int32))
    return Attended(o, natural, lse, rows, o_rest)


def _forward_fake(x: FoxForward) -> Attended:
    (q, k, v, log_decay, _, options, *_), needed = x.given, x.needs_gate_grad
    # what the rounding drops is kept or not whatever the lengths are: they may be symbols here
    lags = needed and gate_kind(log_decay) == GATE_CONST
    call = FoxCall(
        1, 1, 1, int(q.shape[3]), int(v.shape[3]), q.dtype, needed, x.deterministic, lags=lags,
        portable_alone=x.given.portable_alone,
    )  # fmt: skip
    rest = plan(call, machine(q.device)).keeps_rest
    return fake_attended(
        q, v, log_decay, options, S=k.shape[1], return_lse=x.return_lse, bounded=bool(options.bound), rest=rest
    )


def _infer(x: FoxInference) -> FoxInferred:
    given, valid = x.given, x.valid
    chosen = _plan(given, masked=valid is not None, backward=False)
    with on_device_of(given.q):
        if x.sums is None:
            rows = row_gates(given, valid, search=_searched(given))
        else:  # a gate per token, already summed
            given = given._replace(log_decay=x.sums.c.new_empty(1, 1, 1))
            rows = _kept_gates(given, x.sums, valid, chosen.splits_keys)
        o, lse = launcher(FORWARD[chosen.forward])(given, rows, chosen, valid=valid)
        return FoxInferred(o, row_lse(lse, given.log_decay, rows, given.k.shape[1]) if x.return_lse else None)


def _kept_gates(given: FoxOperands, sums: KeptSums, valid: Some, splits_keys: bool) -> RowGates:
    """Gate sums and first keys of a call whose gates are summed; as they are where the keys are split."""
    T, S, window = given.q.shape[1], given.k.shape[1], given.options.window
    first = S - T if splits_keys else 0  # of the rows whose first keys the kernel reads
    first_visible = sums.first_visible[..., first:S]
    if window > 0:
        if valid is None:
            begins = torch.arange(first, S, device=given.q.device, dtype=torch.int32) - (window - 1)
        else:
            begins = window_starts(valid, window)[:, None, first:].int()
        first_visible = torch.maximum(first_visible, begins)
    c, base, start = sums.c, sums.base, None
    if _searched(given):
        longest = norm_max(given.k) if sums.longest is None else sums.longest
        start = prune_starts(given, RowGates(c, base, first_visible), sums.tails, valid, longest)
    if not splits_keys:
        units = (S + KEY_UNIT - 1) // KEY_UNIT
        c, base = c[..., : units * KEY_UNIT].contiguous(), base[..., : units + 1].contiguous()
    return RowGates(c, base, first_visible, start)


def _infer_fake(x: FoxInference) -> FoxInferred:
    q, v = x.given.q, x.given.v
    o = q.new_empty((*q.shape[:3], v.shape[3]))
    return FoxInferred(o, q.new_empty(q.shape[:3], dtype=torch.float32) if x.return_lse else None)


def _backward(x: FoxBackward) -> FoxGradients:
    given, made, wanted = x.given, x.made, x.wanted
    log_decay, sink = given.log_decay, given.sink
    if not _searched(given):
        x = x._replace(made=made._replace(rows=made.rows._replace(first_computed=None)))
    # without what rounding dropped, the gate's gradient takes the portable kernels
    deterministic = x.deterministic or (wanted.log_decay and made.o_rest is None)
    chosen = _plan(given, needs_gate_grad=wanted.log_decay, deterministic=deterministic, needs_key_grads=wanted.keys)
    dlse = None if x.dlse is None else x.dlse.float().transpose(1, 2).contiguous()
    with on_device_of(given.q):
        dq, dk, dv, columns, rows, dretention = launcher(BACKWARD[chosen.backward])(x._replace(dlse=dlse), chosen)
        dgate = dsink = None
        if sink is not None and rows is not None and wanted.sink:
            dsink = sink_gradient(rows, dlse, sink)
        if log_decay is not None and columns is not None and wanted.log_decay:
            dgate = _gate_gradient(columns, rows, log_decay, given.options.cu_seqlens, given.q.shape[1])
    found = (dq if wanted.q else None, dk if wanted.k else None, dv if wanted.v else None, dgate, dsink)
    return FoxGradients(*found, dretention if wanted.retention else None)


def _gate_gradient(columns: Tensor, rows: Some, log_decay: Tensor, cu_seqlens: Some, T: int) -> Tensor:
    """Gradient of log_decay from the sums of dS over each key's column and, where they are not 0, each row.

    Of a constant gate these sums weigh dS by its lag. Weighed by their positions, as lags are differences, they would
    add up what the rounding of one sum has from another's, times the positions: 1.3% of a gradient after 2048 tokens.
    """
    if gate_kind(log_decay) == GATE_CONST:
        return columns.double().sum((0, 2)).float().masked_fill(is_closed(log_decay), 0.0)
    return gate_gradient(columns, rows, log_decay, segment_starts(cu_seqlens, columns.shape[2]), T)


def _backward_fake(x: FoxBackward) -> FoxGradients:
    return FoxGradients(*fake_gradients(x, FoxGradients._fields, narrow=("q", "k")))


fox_infer_op = NamedOp("attnzoo::fox_infer", FoxInference, FoxInferred, _infer, _infer_fake)
fox_forward_op = NamedOp("attnzoo::fox_forward", FoxForward, Attended, _forward, _forward_fake, replays=True)
fox_backward_op = NamedOp("attnzoo::fox_backward", FoxBackward, FoxGradients, _backward, _backward_fake, replays=True)
attention_gradients(fox_forward_op, fox_backward_op, FoxBackward, FoxWanted)

__all__ = ["fox_backward_op", "fox_forward_op", "fox_infer_op", "row_gates"]
