"""The kernel of the gradients of a scalar decay over chunks of tokens (``chunks``)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import cdiv
from attnzoo.kernels.linear.chunks import CHUNK, TILES, Chunked, entering, leaving, within


@launched
@triton.jit(do_not_specialize=["T", "NC"])
def chunk_backward_kernel(
    p_q, p_k, p_v, p_do, p_h, p_dh, p_c, p_since, p_dq, p_dk, p_dv, p_dg, T, NC, scale,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_db, stride_dt, stride_dh,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, GATED: tl.constexpr, DGATE: tl.constexpr, PRECISION: tl.constexpr, STATE_PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a chunk's q, k, v and gates for one head; those of k and v for each query head.

    The gradient of gate t is the sum over all pairs that it lies between: of pairs within the chunk, of rows from t on
    with the state before, of keys before t with the state's gradient after, and of that state with that gradient. No
    sum leaves the chunk, so rounding does not grow with the text.
    """
    i_bh, i_n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_b, i_h, i_bh = (i_bh // H).to(tl.int64), (i_bh % H).to(tl.int64), i_bh.to(tl.int64)
    i_g = i_h // (H // G)
    o_t = tl.arange(0, C)
    m_t = i_n * C + o_t < T
    p_q += i_b * stride_qb + i_n * C * stride_qt + i_h * stride_qh
    p_k += i_b * stride_kb + i_n * C * stride_kt + i_g * stride_kh
    p_v += i_b * stride_vb + i_n * C * stride_vt + i_g * stride_vh
    p_do += i_b * stride_db + i_n * C * stride_dt + i_h * stride_dh
    p_h += (i_bh * NC + i_n) * K * V
    p_dh += (i_bh * NC + i_n) * K * V
    p_c += (i_bh * NC + i_n) * C
    p_since += (i_bh * NC + i_n) * C
    o_row = (i_b * T + i_n * C + o_t) * H + i_h  # [C]

    b_a = tl.zeros([C, C], tl.float32)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        m_k = o_k < K
        b_q = tl.load(p_q + o_t[:, None] * stride_qt + o_k[None, :], mask=m_t[:, None] & m_k[None, :], other=0.0)
        b_k = tl.load(p_k + o_t[None, :] * stride_kt + o_k[:, None], mask=m_t[None, :] & m_k[:, None], other=0.0)
        b_a += tl.dot(b_q, b_k, input_precision=PRECISION)
    b_da = tl.zeros([C, C], tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        m_v = o_v < V
        b_do = tl.load(p_do + o_t[:, None] * stride_dt + o_v[None, :], mask=m_t[:, None] & m_v[None, :], other=0.0)
        b_v = tl.load(p_v + o_t[None, :] * stride_vt + o_v[:, None], mask=m_t[None, :] & m_v[:, None], other=0.0)
        b_da += tl.dot(b_do, b_v, input_precision=PRECISION)
    b_w = within(p_c, p_since, o_t, GATED) * scale
    b_at = tl.trans((b_a * b_w).to(p_do.dtype.element_ty))
    b_da = (b_da * b_w).to(p_q.dtype.element_ty)
    b_in, b_out = tl.full([C], scale, tl.float32), tl.full([C], 1.0, tl.float32)
    b_total = tl.full([], 1.0, tl.float32)
    if GATED:
        b_in = entering(p_c, p_since, o_t) * scale
        b_out, b_total = leaving(p_c, p_since, o_t, C)

    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        m_v = o_v < V
        b_dv = tl.zeros([C, BV], tl.float32)
        for i_k in range(0, K, BK):
            o_k = i_k + tl.arange(0, BK)
            m_k = o_k < K
            b_k = tl.load(p_k + o_t[:, None] * stride_kt + o_k[None, :], mask=m_t[:, None] & m_k[None, :], other=0.0)
            b_dh = tl.load(p_dh + o_k[:, None] * V + o_v[None, :], mask=m_k[:, None] & m_v[None, :], other=0.0)
            b_dv += tl.dot(b_k.to(b_dh.dtype), b_dh, input_precision=STATE_PRECISION)
        b_do = tl.load(p_do + o_t[:, None] * stride_dt + o_v[None, :], mask=m_t[:, None] & m_v[None, :], other=0.0)
        b_dv = b_dv * b_out[:, None] + tl.dot(b_at, b_do, input_precision=PRECISION)
        p_tile = p_dv + o_row[:, None] * V + o_v[None, :]
        tl.store(p_tile, b_dv.to(p_dv.dtype.element_ty), mask=m_t[:, None] & m_v[None, :])

    b_rows, b_keys = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    b_past = tl.zeros([], tl.float32)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        m_k = o_k < K
        b_dq = tl.zeros([C, BK], tl.float32)
        b_dk = tl.zeros([C, BK], tl.float32)
        for i_v in range(0, V, BV):
            o_v = i_v + tl.arange(0, BV)
            m_v = o_v < V
            m_tv, m_s = m_t[:, None] & m_v[None, :], m_v[:, None] & m_k[None, :]
            b_do = tl.load(p_do + o_t[:, None] * stride_dt + o_v[None, :], mask=m_tv, other=0.0)
            b_v = tl.load(p_v + o_t[:, None] * stride_vt + o_v[None, :], mask=m_tv, other=0.0)
            b_h = tl.load(p_h + o_k[None, :] * V + o_v[:, None], mask=m_s, other=0.0)  # [BV, BK]
            b_dh = tl.load(p_dh + o_k[None, :] * V + o_v[:, None], mask=m_s, other=0.0)
            b_dq += tl.dot(b_do.to(b_h.dtype), b_h, input_precision=STATE_PRECISION)
            b_dk += tl.dot(b_v.to(b_dh.dtype), b_dh, input_precision=STATE_PRECISION)
            if DGATE:
                b_past += tl.sum(tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32), 0), 0)
        m_tk = m_t[:, None] & m_k[None, :]
        b_q = tl.load(p_q + o_t[:, None] * stride_qt + o_k[None, :], mask=m_tk, other=0.0)
        b_k = tl.load(p_k + o_t[:, None] * stride_kt + o_k[None, :], mask=m_tk, other=0.0)
        b_dq = b_dq * b_in[:, None] + tl.dot(b_da, b_k, input_precision=PRECISION)
        b_dk *= b_out[:, None]
        b_near = tl.dot(tl.trans(b_da), b_q, input_precision=PRECISION)
        if DGATE:
            b_rows += tl.sum(b_q.to(tl.float32) * b_dq - b_k.to(tl.float32) * b_near, 1)
            b_keys += tl.sum(b_k.to(tl.float32) * b_dk, 1)
        tl.store(p_dq + o_row[:, None] * K + o_k[None, :], b_dq.to(p_dq.dtype.element_ty), mask=m_tk)
        tl.store(p_dk + o_row[:, None] * K + o_k[None, :], (b_dk + b_near).to(p_dk.dtype.element_ty), mask=m_tk)
    if DGATE:
        b_dg = tl.cumsum(b_rows, 0, reverse=True) + (tl.cumsum(b_keys, 0) - b_keys) + b_past * b_total
        b_dg = tl.where(tl.load(p_since + o_t) == o_t, 0.0, b_dg)  # nothing passes a closed gate
        tl.store(p_dg + o_row, b_dg, mask=m_t)


def chunk_gradients(
    x: Chunked, do: Tensor, h: Tensor, dh: Tensor, of_gate: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q [B, T, H, K], k and v with a head per query head, and of the gates [B, T, H]."""
    (B, T, H, K), V = x.q.shape, x.v.shape[3]
    NC = cdiv(T, CHUNK)
    dq, dk, dv = x.q.new_empty((B, T, H, K)), x.q.new_empty((B, T, H, K)), x.q.new_empty((B, T, H, V))
    c, since = x.gates or (h, h)
    dg = c.new_empty((B, T, H)) if of_gate else h
    chunk_backward_kernel[(B * H, NC)](
        x.q, x.k, x.v, do, h, dh, c, since, dq, dk, dv, dg, T, NC, x.scale, *x.q.stride()[:3], *x.k.stride()[:3],
        *x.v.stride()[:3], *do.stride()[:3], **x.shape, **TILES["backward"].launch(x.q, x.v), DGATE=of_gate,
        STATE_PRECISION=x.state_precision,
    )  # fmt: skip
    return dq, dk, dv, dg
