"""PaTH as two custom ops (forward, backward); ``operands.py`` declares what they take and return.

Each op adds up the gates (``common/gate_sums.py``) and launches the kernels that ``levels/plan.py`` has chosen:
``passes.py`` says in which order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.kernels.common.autograd import attention_gradients
from attnzoo.kernels.common.dense_reference import segment_starts
from attnzoo.kernels.common.device import machine, on_device_of
from attnzoo.kernels.common.gate_sums import gate_gradient
from attnzoo.kernels.common.launching import can_describe
from attnzoo.kernels.common.named_op import NamedOp
from attnzoo.kernels.common.plans import Plan, announce
from attnzoo.kernels.common.rows import RowGates, fake_attended, fake_gradients, row_lse, sink_gradient
from attnzoo.kernels.levels.gates import summed
from attnzoo.kernels.levels.layout import Wanted
from attnzoo.kernels.levels.plan import LevelsCall, plan
from attnzoo.kernels.path.kept_transitions import kept_bytes
from attnzoo.kernels.path.operands import PathAttended, PathBackward, PathForward, PathGradients, PathOperands
from attnzoo.kernels.path.passes import path_backward, path_forward, path_starts

Some = Tensor | None


def row_gates(given: PathOperands) -> RowGates:
    """Gate sums and first keys of a call, without attention."""
    rows, tails = summed(given.q, given.log_decay, given.options)
    if not given.options.bound or tails is None:
        return rows
    return rows._replace(first_computed=path_starts(given, rows, tails))


def _plan(given: PathOperands, needs_gate_grad: bool, deterministic: bool, shortened: bool) -> Plan:
    """The plan of a call on real tensors, announced."""
    q, v, where = given.q, given.v, machine(given.q.device)
    (T, _, K), V = q.shape[1:], v.shape[3]
    alone = given.options.portable_alone
    call = LevelsCall(T, K, V, q.dtype, needs_gate_grad, deterministic, shortened, can_describe(v), alone)
    chosen = plan(call, where)
    announce("path", chosen, where)
    return chosen


def _forward(x: PathForward) -> PathAttended:
    q, k, v, w, _, log_decay, _, _, options = given = x.given
    chosen = _plan(given, x.needs_gate_grad, x.deterministic, options.window > 0 or bool(options.bound))
    with on_device_of(q):
        rows, tails = summed(q, log_decay, options)
        o_rest = q.new_empty((*q.shape[:3], v.shape[3])) if chosen.keeps_rest else None
        kept = q.new_empty(kept_bytes(q, k, w), dtype=torch.uint8) if x.keep else None
        o, lse, start = path_forward(given, rows, tails, chosen, o_rest, kept)
        natural = row_lse(lse, log_decay, rows, q.shape[1]) if x.return_lse else None
    return PathAttended(o, natural, lse, rows._replace(first_computed=start), o_rest, kept)


def _forward_fake(x: PathForward) -> PathAttended:
    q, k, v, w, _, log_decay, _, _, options = x.given
    # what the rounding drops is kept or not whatever the length is: it may be a symbol here
    call = LevelsCall(
        1, int(q.shape[3]), int(v.shape[3]), q.dtype, x.needs_gate_grad, x.deterministic,
        portable_alone=options.portable_alone,
    )  # fmt: skip
    rest, bounded = plan(call, machine(q.device)).keeps_rest, options.window > 0 or bool(options.bound)
    made = fake_attended(q, v, log_decay, options, S=q.shape[1], return_lse=x.return_lse, bounded=bounded, rest=rest)
    return PathAttended(*made, q.new_empty(kept_bytes(q, k, w), dtype=torch.uint8) if x.keep else None)


def _backward(x: PathBackward) -> PathGradients:
    (q, _, _, _, _, log_decay, sink, _, options), made, wanted = x.given, x.made, x.wanted
    # without what rounding dropped, the gradient of log_decay takes the portable kernels
    deterministic = x.deterministic or (wanted.log_decay and made.o_rest is None)
    chosen = _plan(x.given, wanted.log_decay, deterministic, made.rows.first_computed is not None)
    dlse = None if x.dlse is None else x.dlse.float().transpose(1, 2).contiguous()
    with on_device_of(q):
        found = path_backward(x._replace(dlse=dlse), chosen)
        dgate = dsink = None
        if log_decay is not None and found.columns is not None:
            doc = segment_starts(options.cu_seqlens, q.shape[1])
            dgate = gate_gradient(found.columns, found.sums, log_decay, doc, q.shape[1])
    if sink is not None and found.sums is not None and wanted.sink:
        dsink = sink_gradient(found.sums, dlse, sink)
    grads = PathGradients(found.q, found.k, found.v, found.w, found.beta, dgate, dsink, found.log_diag)
    return PathGradients(*(grad if asked else None for grad, asked in zip(grads, wanted, strict=True)))


def _backward_fake(x: PathBackward) -> PathGradients:
    return PathGradients(*fake_gradients(x, PathGradients._fields, narrow=("q", "k", "w")))


path_forward_op = NamedOp("attnzoo::path_forward", PathForward, PathAttended, _forward, _forward_fake, replays=True)
path_backward_op = NamedOp(
    "attnzoo::path_backward", PathBackward, PathGradients, _backward, _backward_fake, replays=True
)
attention_gradients(path_forward_op, path_backward_op, PathBackward, Wanted)
