"""Forward kernel: online softmax over keys, in base 2, with the gate as a per-key bias.

Softmax ignores a constant per row, so row block I uses bias_j = c_ref - c_j, where c_ref is the running gate
sum at the first row of its 128-row unit: one value per key, none per row. The log-sum-exp is
kept in that frame ("of its row unit") and the backward kernels use it as it is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.constants import KEY_UNIT, ROW_UNIT
from attnzoo.kernels.common.forgetful_bias import least_age, row_forgetful_bias
from attnzoo.kernels.common.forgotten import tiled_keys
from attnzoo.kernels.common.gate_bias import base_shift, const_gate, gate_at, gates_from
from attnzoo.kernels.common.jit_constants import TL_LOG2E
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import (
    can_describe,
    cdiv,
    dot_precision,
    gate_kind,
    retention_kind,
    row_strides,
    tile_descriptor,
    valid_strides,
)
from attnzoo.kernels.common.online_softmax import row_bounds, softmax_tile
from attnzoo.kernels.common.plans import Plan
from attnzoo.kernels.common.retention import numbers_of
from attnzoo.kernels.common.rows import RowGates
from attnzoo.kernels.common.tile_loads import keys_there, load_keys, load_tile, schedule
from attnzoo.kernels.fox.operands import FoxOperands


@launched
@triton.jit(do_not_specialize=["T", "S", "n_heads", "stride_lb", "stride_lh", "stride_mb"])
def fox_fwd_portable_kernel(
    p_q, p_k, p_v, p_o, p_rest, p_lse, p_c, p_base, p_g, p_since, p_start, p_sink, p_valid, p_keep, p_gone, T, S,
    n_heads, scale2, rule,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_lb, stride_lh, stride_mb, stride_ms,
    H: tl.constexpr, REP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, RU: tl.constexpr, KU: tl.constexpr, GATE: tl.constexpr,
    HAS_SINCE: tl.constexpr, HAS_START: tl.constexpr, HAS_SINK: tl.constexpr, HAS_REST: tl.constexpr,
    HAS_VALID: tl.constexpr, KIND: tl.constexpr, TMA: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Output [B, T, H, V] and log2-sum-exp [B, H, T]; one program per row block, the longest rows first."""
    i_t, i_bh = schedule(tl.cdiv(T, BT), n_heads)
    i_t = tl.cdiv(T, BT) - 1 - i_t
    i_b32, i_h = i_bh // H, i_bh % H
    i_b, i_g = i_b32.to(tl.int64), i_h // REP
    off = S - T
    p_first = i_t * BT + off  # position of the first row
    p_last = tl.minimum(i_t * BT + BT, T) - 1 + off

    o_t, o_s = tl.arange(0, BT), tl.arange(0, BS)
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    b_pos = p_first + o_t  # [BT]
    r = (i_t * BT).to(tl.int64)
    if not TMA:
        p_k += i_b * stride_kb + i_g.to(tl.int64) * stride_kh
        p_v += i_b * stride_vb + i_g.to(tl.int64) * stride_vh
    b_q = load_tile(p_q + i_b * stride_qb + i_h.to(tl.int64) * stride_qh + r * stride_qt, o_t, o_k, stride_qt,
                    T - i_t * BT, K, BK, True)  # fmt: skip
    n_s = tl.cdiv(S, KU)
    p_c += i_bh.to(tl.int64) * (n_s * KU)
    p_base += i_bh.to(tl.int64) * (n_s + 1)
    p_since += i_b * stride_lb + i_h.to(tl.int64) * stride_lh
    p_valid += i_b * stride_mb
    i_bg, n_tiles = i_b32 * (H // REP) + i_g, tl.cdiv(S, BS)
    p_keep += i_bg.to(tl.int64) * KIND * n_tiles * BS
    p_gone += i_bg * n_tiles
    b_slope = tl.zeros([], tl.float32)
    if GATE == 1:
        b_slope = const_gate(p_g, i_h)
    p_ref = i_t * BT // RU * RU + off
    b_ref = gate_at(p_c, p_base, b_slope, p_ref, GATE, KU)
    b_since = b_pos
    if HAS_SINCE:
        b_since = tl.load(p_since + b_pos, mask=b_pos < S, other=0)
    n_u = tl.cdiv(T, RU)
    near = least_age(rule, KIND)
    lo, full, mid, n_left, n_diag = row_bounds(
        p_since, p_start + i_bh.to(tl.int64) * n_u, i_t, p_first, p_last, BT, BS, RU, KU, HAS_SINCE, HAS_START, near
    )
    b_m = tl.full([BT], float("-inf"), tl.float32)
    b_l = tl.zeros([BT], tl.float32)
    if HAS_SINK:  # one more logit, without a value: moved to the frame of the row unit
        b_sink = tl.load(p_sink + i_h).to(tl.float32) * TL_LOG2E
        b_m = tl.zeros([BT], tl.float32) + b_sink
        if GATE != 0:
            b_m += gates_from(p_c, p_base, b_slope, b_pos, b_ref, b_pos < S, GATE, KU)
        b_l = tl.where(b_m == float("-inf"), 0.0, 1.0)
    b_o = tl.zeros([BT, BV], tl.float32)
    for i in range(n_left + n_diag):  # the diagonal first: later tiles start from a good maximum
        s = tl.where(i < n_diag, mid + i, lo + i - n_diag) * BS
        b_shift = base_shift(p_base, b_slope, b_ref, s, GATE, KU)
        b_k = load_keys(p_k, i_b32, s, i_g, o_s, o_k, stride_ks, S, K, BK, TMA, True)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PREC)
        b_v = load_keys(p_v, i_b32, s, i_g, o_s, o_v, stride_vs, S, V, BV, TMA, True)
        if HAS_VALID:  # what does not exist may hold anything
            m_there = keys_there(p_valid, s, o_s, S, stride_ms)
            b_s, b_v = tl.where(m_there[None, :], b_s, float("-inf")), tl.where(m_there[:, None], b_v, 0.0)
        b_more = None
        if KIND != 0:
            b_more = row_forgetful_bias(p_keep, p_gone, s, o_s, b_pos, p_first, S, rule, KIND, True)
        b_o, b_m, b_l = softmax_tile(b_o, b_m, b_l, b_s, b_v, p_c, b_slope, b_shift, s, o_s, b_pos, b_since, scale2,
                                     GATE, HAS_SINCE, PREC, True, b_more)  # fmt: skip
    b_shift = base_shift(p_base, b_slope, b_ref, full * BS, GATE, KU)
    for i_s in range(full, mid):
        s = i_s * BS
        b_next = base_shift(p_base, b_slope, b_ref, s + BS, GATE, KU)  # one tile ahead: hides the load
        b_k = load_keys(p_k, i_b32, s, i_g, o_s, o_k, stride_ks, S, K, BK, TMA, False)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PREC)
        b_v = load_keys(p_v, i_b32, s, i_g, o_s, o_v, stride_vs, S, V, BV, TMA, False)
        if HAS_VALID:
            m_there = keys_there(p_valid, s, o_s, S, stride_ms)
            b_s, b_v = tl.where(m_there[None, :], b_s, float("-inf")), tl.where(m_there[:, None], b_v, 0.0)
        b_more = None
        if KIND != 0:
            b_more = row_forgetful_bias(p_keep, p_gone, s, o_s, b_pos, p_first, S, rule, KIND, False)
        b_o, b_m, b_l = softmax_tile(b_o, b_m, b_l, b_s, b_v, p_c, b_slope, b_shift, s, o_s, b_pos, b_since, scale2,
                                     GATE, HAS_SINCE, PREC, HAS_VALID, b_more)  # fmt: skip
        b_shift = b_next
    m_t = i_t * BT + o_t < T
    if HAS_VALID:  # a row without any valid key: 0, and a log-sum-exp of -inf
        b_o = b_o / tl.where(b_l > 0.0, b_l, 1.0)[:, None]
        b_m = tl.where(b_l > 0.0, b_m, 0.0)
    else:
        b_o = b_o / b_l[:, None]
    p_ot = ((i_b * T + i_t * BT) * H + i_h) * V + o_t[:, None] * (H * V) + o_v[None, :]
    m_o = m_t[:, None] & (o_v[None, :] < V)
    b_oh = b_o.to(p_o.dtype.element_ty)
    tl.store(p_o + p_ot, b_oh, mask=m_o)
    if HAS_REST:  # what the rounding dropped
        tl.store(p_rest + p_ot, (b_o - b_oh.to(tl.float32)).to(p_rest.dtype.element_ty), mask=m_o)
    tl.store(p_lse + i_bh.to(tl.int64) * T + i_t * BT + o_t, b_m + tl.log2(b_l), mask=m_t)


def fox_forward(
    given: FoxOperands, rows: RowGates, plan: Plan, *, o_rest: Tensor | None = None, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Launch the forward kernel. Shapes as in ``fox_attention``; last dims contiguous.

    Args:
        o_rest: [B, T, H, V] in q's dtype, contiguous, filled with what the rounding of o dropped.
        valid: [B, S] bool, the keys that exist.

    Returns:
        o [B, T, H, V] in q's dtype; lse [B, H, T] float32, log2-sum-exp in the frame of the row unit.
    """
    q, k, v, log_decay, sink, options, retention, rule = given
    (B, T, H, _), S, t = q.shape, k.shape[1], plan.of("fwd")
    o, lse = q.new_empty((B, T, H, v.shape[3])), q.new_empty((B, H, T), dtype=torch.float32)
    c, base, since, start = rows.pointers(lse)
    there = lse if valid is None else valid
    tma, kind = t.tma and can_describe(k, v), retention_kind(retention)
    tiled = (lse, lse) if retention is None or rule is None else tiled_keys(retention, rule, t.BS)
    p_k, p_v = (tile_descriptor(k, t.BS), tile_descriptor(v, t.BS)) if tma else (k, v)
    fox_fwd_portable_kernel[(cdiv(T, t.BT) * B * H,)](
        q, p_k, p_v, o, o if o_rest is None else o_rest, lse, c, base, lse if log_decay is None else log_decay, since,
        start, lse if sink is None else sink, there, *tiled, T, S,
        min(t.heads, B * H), options.scale2, numbers_of(rule, kind), *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        *row_strides(rows.first_visible), *valid_strides(valid), **given.dims,
        **rows.flags, BT=t.BT, BS=t.BS, RU=ROW_UNIT, KU=KEY_UNIT, GATE=gate_kind(log_decay), HAS_SINK=sink is not None,
        HAS_REST=o_rest is not None, HAS_VALID=valid is not None, KIND=kind, TMA=tma,
        PREC=dot_precision(q.dtype), num_warps=t.num_warps, num_stages=t.num_stages, maxnreg=t.maxnreg,
    )  # fmt: skip
    return o, lse
