"""Wall as two custom ops (forward, backward); ``operands.py`` declares what they take and return.

Each op carries queries and keys (``portable/carry.py``) and launches the kernels of ``levels/`` on them, some heads at
a time. A scalar decay beside the channels' is those kernels' own gate, and pruning theirs: every transition has norm at
most 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.kernels.common.autograd import attention_gradients
from attnzoo.kernels.common.constants import ROW_UNIT
from attnzoo.kernels.common.dense_reference import segment_starts
from attnzoo.kernels.common.device import machine, on_device_of
from attnzoo.kernels.common.gate_sums import gate_gradient
from attnzoo.kernels.common.launching import can_describe
from attnzoo.kernels.common.named_op import NamedOp
from attnzoo.kernels.common.plans import Plan, announce, launcher
from attnzoo.kernels.common.rows import Attended, fake_attended, fake_gradients, row_lse, sink_gradient
from attnzoo.kernels.levels.gates import summed
from attnzoo.kernels.levels.head_groups import HeadGroup, head_groups
from attnzoo.kernels.levels.layout import Wanted, clear_tails
from attnzoo.kernels.levels.operands import LevelGradients, gates_of, rows_of
from attnzoo.kernels.levels.plan import BACKWARD, FORWARD, LevelsCall, plan
from attnzoo.kernels.levels.portable.prune import block_starts
from attnzoo.kernels.wall.operands import WallBackward, WallForward, WallGradients, WallOperands, WallWanted

from .portable.carry import carry
from .portable.carry_backward import carry_backward

Some = Tensor | None


def _plan(given: WallOperands, needs_grad: bool, deterministic: bool, shortened: bool) -> Plan:
    """The plan of a call on real tensors, announced."""
    q, v, where = given.q, given.v, machine(given.q.device)
    described = v.shape[2] != q.shape[2] or can_describe(v)  # repeated heads are a new tensor
    (T, _, K), V, alone = q.shape[1:], v.shape[3], given.options.portable_alone
    call = LevelsCall(T, K, V, q.dtype, needs_grad, deterministic, shortened, described, alone)
    chosen = plan(call, where)
    announce("wall", chosen, where)
    return chosen


def _each(x: Tensor, H: int) -> Tensor:
    """Keys or values with a head per query head, as the carried keys have them."""
    return x if x.shape[2] == H else x.repeat_interleave(H // x.shape[2], 2)


def _forward(x: WallForward) -> Attended:
    q, k, v, log_diag, log_decay, sink, options = given = x.given
    (B, T, H, _), V = q.shape, v.shape[3]
    chosen = _plan(given, x.needs_grad, x.deterministic, bool(options.bound))
    o, lse = q.new_empty((B, T, H, V)), q.new_empty((B, H, T), dtype=torch.float32)
    start = q.new_zeros((B, H, -(-T // ROW_UNIT)), dtype=torch.int32) if options.bound else None
    with on_device_of(q):
        rows, tails = summed(q, log_decay, options)
        rows = rows._replace(first_computed=start)
        o_rest = torch.empty_like(o) if chosen.keeps_rest else None

        def carry_and_attend(group: HeadGroup) -> None:
            p_q, p_k, p_start = group.queries(q), group.keys(k), group.rows(start)
            block, levels = carry(p_q, p_k, group.queries(log_diag))
            if p_start is not None:
                assert tails is not None
                p_options = options._replace(logit_bound=group.heads(options.logit_bound))
                keys, gates = _each(p_k, p_q.shape[2]), gates_of(group, rows)
                p_start.copy_(block_starts(p_q, keys, block, gates, group.rows(tails), p_options))
            p_v, made = _each(group.keys(v), p_q.shape[2]), (o, lse, rows, o_rest)
            launcher(FORWARD[chosen.forward])(rows_of(group, block, levels, p_v, made, sink, options), chosen)

        for group in head_groups(q, k, backward=False):
            carry_and_attend(group)
        natural = row_lse(lse, log_decay, rows, T) if x.return_lse else None
    return Attended(o, natural, lse, rows, o_rest)


def _forward_fake(x: WallForward) -> Attended:
    q, k, v, _, log_decay, _, options = x.given
    # what the rounding drops is kept or not whatever the length is: it may be a symbol here
    call = LevelsCall(
        1, int(q.shape[3]), int(v.shape[3]), q.dtype, x.needs_grad, x.deterministic,
        portable_alone=options.portable_alone,
    )  # fmt: skip
    return fake_attended(
        q, v, log_decay, options, S=q.shape[1], return_lse=x.return_lse, bounded=bool(options.bound),
        rest=plan(call, machine(q.device)).keeps_rest,
    )  # fmt: skip


def _backward(x: WallBackward) -> WallGradients:
    (q, k, v, log_diag, log_decay, sink, options), made, wanted = x.given, x.made, x.wanted
    lse, rows = made.lse, made.rows
    # without what rounding dropped, the gradient of log_decay takes the portable kernels
    deterministic = x.deterministic or (wanted.log_decay and made.o_rest is None)
    H, chosen = q.shape[2], _plan(x.given, wanted.log_decay, deterministic, rows.first_computed is not None)
    parts = Wanted(wanted.q, wanted.k, wanted.v, wanted.log_diag, False, wanted.log_decay, wanted.sink)
    carried = wanted.q or wanted.k or wanted.log_diag
    dq, dk = (y.new_empty(y.shape) if carried else None for y in (q, k))
    dv = v.new_empty(v.shape) if wanted.v else None
    dlog_diag = lse.new_empty(log_diag.shape) if wanted.log_diag else None
    dlse = None if x.dlse is None else x.dlse.float().transpose(1, 2).contiguous()
    sums = torch.empty_like(lse) if sink is not None or (log_decay is not None and dlse is not None) else None
    columns = torch.empty_like(lse) if wanted.log_decay else None
    with on_device_of(q):

        def differentiate(group: HeadGroup) -> None:  # what it makes is gone before the next begins
            p_x = group.queries(q), group.keys(k), group.queries(log_diag)
            p_v = _each(group.keys(v), p_x[0].shape[2])
            p_dv = p_v.new_empty(p_v.shape)
            block, levels = carry(*p_x)
            if chosen.one_pass:
                clear_tails(levels, q.shape[1])
            results = made.o, lse, rows, made.o_rest
            d_block, d_levels, _ = launcher(BACKWARD[chosen.backward])(
                rows_of(group, block, levels, p_v, results, sink, options),
                LevelGradients(
                    group.queries(x.do), group.rows(dlse), p_dv, group.rows(sums), group.rows(columns), parts,
                    unrounded=True,
                ),
                chosen,
            )  # fmt: skip
            if dv is not None:
                group.keys(dv).copy_(p_dv.unflatten(2, (-1, H // v.shape[2])).sum(3))
            if dq is not None and dk is not None:
                p_da = None if dlog_diag is None else group.queries(dlog_diag)
                p_start = group.rows(rows.first_computed)
                out = group.queries(dq), group.keys(dk), p_da
                carry_backward(*p_x, block.m, d_block, d_levels, out, p_start)

        for group in head_groups(q, k, backward=True, one_pass=chosen.one_pass):
            differentiate(group)
        dgate = None
        if log_decay is not None and columns is not None:
            doc = segment_starts(options.cu_seqlens, q.shape[1])
            dgate = gate_gradient(columns, sums, log_decay, doc, q.shape[1])
    dsink = sink_gradient(sums, dlse, sink) if sink is not None and sums is not None and wanted.sink else None
    return WallGradients(dq if wanted.q else None, dk if wanted.k else None, dv, dlog_diag, dgate, dsink)


def _backward_fake(x: WallBackward) -> WallGradients:
    return WallGradients(*fake_gradients(x, WallGradients._fields))


wall_forward_op = NamedOp("attnzoo::wall_forward", WallForward, Attended, _forward, _forward_fake, replays=True)
wall_backward_op = NamedOp(
    "attnzoo::wall_backward", WallBackward, WallGradients, _backward, _backward_fake, replays=True
)
attention_gradients(wall_forward_op, wall_backward_op, WallBackward, WallWanted)
