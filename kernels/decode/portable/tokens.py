"""The tokens of a step, from the products with weights to queries and pages, in one launch.

One program per sequence and key head shifts its key and value, norms the key and its R queries, makes their gates and
writes what ``append.py`` writes. Beyond them one program deals out the pages that the step will read, in their place.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.activations import log_sigmoid
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import power_of_2
from attnzoo.kernels.decode.parts import Forget, TokenParts
from attnzoo.kernels.decode.portable.append import add_token_gates, kept_sums, write_key
from attnzoo.kernels.decode.portable.eight_bits import kind_of_bits
from attnzoo.kernels.decode.portable.page_shares import Shares, deal_pages
from attnzoo.kernels.decode.state import PagedState


@triton.jit
def _normed(b_x, p_weight, o_rows, o_x, m_x, eps, X: tl.constexpr, SHARED: tl.constexpr):
    """Rows over the roots of their mean squares, times the scales of heads o_rows. # [rows, X] float32"""
    p_scale = p_weight + (o_rows[:, None] * 0 if SHARED else o_rows[:, None] * X) + o_x[None, :]
    b_scale = tl.load(p_scale, mask=m_x, other=0.0).to(tl.float32)
    return b_x * tl.rsqrt(tl.sum(b_x * b_x, 1) / X + eps)[:, None] * b_scale


@triton.jit
def _mixed(b_x, p_xt, stride_t, p_before, p_logit, t, m_x, MOVES: tl.constexpr):
    """b_x [1, X] float32 of token t at p_xt, mixed with that of the token before. # [1, X] float32"""
    b_first = tl.load(p_before, mask=m_x & (t == 0), other=0.0).to(tl.float32)
    b_other = tl.load(p_xt - stride_t, mask=m_x & (t > 0), other=0.0).to(tl.float32)
    if MOVES:
        tl.debug_barrier()  # what was there has been read
        tl.store(p_before, b_x, mask=m_x)
    a = tl.sigmoid(tl.load(p_logit).to(tl.float32))
    return b_x + a * (tl.where(t == 0, b_first, b_other) - b_x)


@launched
@triton.jit(do_not_specialize=["T", "N", "BG", "window"])
def paged_tokens_kernel(
    p_q, p_k, p_v, p_g, p_count, p_past, p_keys, p_values, p_exponents, p_table, p_length, p_norm, p_decay, p_sum,
    p_total, p_since, p_tails, p_closed, p_seen, p_rows, p_q_scale, p_k_scale, p_k_mix, p_v_mix, p_k_before, p_v_before,
    p_bias, p_first, p_begin, p_ends, p_turn, T, N, BG, window, eps, factor, stride_qb, stride_qt, stride_qh,
    stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, stride_gb, stride_gt, stride_gh, stride_ab,
    stride_at, stride_ah, stride_cb, stride_ct, stride_ch,
    G: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PAGE: tl.constexpr, HAS_GATE: tl.constexpr, LOGITS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr, SHARED: tl.constexpr, HAS_SHIFT: tl.constexpr, MOVES: tl.constexpr, EXTRA: tl.constexpr,
    BN: tl.constexpr, EIGHT: tl.constexpr,
):  # fmt: skip
    """One program per sequence and key head, and one for the shares."""
    i_bg = tl.program_id(0)
    if i_bg == BG:
        deal_pages(p_first, p_past, p_count, p_begin, p_ends, p_turn, T, BG, G, window, EXTRA, PAGE, BN, True)
        return
    i_b, i_g = (i_bg // G).to(tl.int64), i_bg % G
    o_g, o_rep, o_k, o_v = i_g + tl.arange(0, 1), tl.arange(0, BH), tl.arange(0, BK), tl.arange(0, BV)
    m_g, m_h = o_g < G, o_rep < R
    o_h = i_g * R + o_rep
    o_bg, o_bh = i_b * G + o_g, i_b * (G * R) + o_h
    L = tl.load(p_past + i_b).to(tl.int32)
    n_new = tl.minimum(tl.load(p_count + i_b).to(tl.int32), T)
    if HAS_GATE:
        b_total, b_start, b_tail, b_since, b_bits = kept_sums(p_sum, p_total, p_since, p_tails, p_closed, o_bh, m_h, L,
                                                              N, PAGE)  # fmt: skip
        b_bias = tl.zeros([BH], tl.float32)
        if HAS_BIAS:
            b_bias = tl.load(p_bias + o_h, mask=m_h, other=0.0).to(tl.float32)
        for t in range(T - n_new):
            tl.store(p_seen + o_bh * T + t, 0, mask=m_h)
    b_norm = tl.load(p_norm + o_bg * N + L // PAGE, mask=m_g & (L % PAGE > 0), other=0.0)  # [1]
    tl.debug_barrier()  # every thread has read what will be written to
    m_k, m_v, m_q = o_k[None, :] < K, o_v[None, :] < V, m_h[:, None] & (o_k[None, :] < K)
    for t in range(T - n_new, T):
        pos = L + t - (T - n_new)
        b_page = tl.load(p_table + o_bg * N + pos // PAGE, mask=m_g, other=-1).to(tl.int64)  # [1]
        p_qt = p_q + i_b * stride_qb + t * stride_qt + o_h[:, None] * stride_qh + o_k[None, :]
        p_kt = p_k + i_b * stride_kb + t * stride_kt + o_g[:, None] * stride_kh + o_k[None, :]
        p_vt = p_v + i_b * stride_vb + t * stride_vt + o_g[:, None] * stride_vh + o_v[None, :]
        b_q = tl.load(p_qt, mask=m_q, other=0.0).to(tl.float32)  # [BH, BK]
        b_k = tl.load(p_kt, mask=m_k, other=0.0).to(tl.float32)  # [1, BK]
        b_v = tl.load(p_vt, mask=m_v, other=0.0).to(tl.float32)  # [1, BV]
        if HAS_SHIFT:
            p_a = p_k_mix + i_b * stride_ab + t * stride_at + i_g * stride_ah
            b_k = _mixed(b_k, p_kt, stride_kt, p_k_before + o_bg[:, None] * K + o_k[None, :], p_a, t, m_k, MOVES)
            p_a = p_v_mix + i_b * stride_cb + t * stride_ct + i_g * stride_ch
            b_v = _mixed(b_v, p_vt, stride_vt, p_v_before + o_bg[:, None] * V + o_v[None, :], p_a, t, m_v, MOVES)
        if HAS_NORM:
            b_q = _normed(b_q, p_q_scale, o_h, o_k, m_q, eps, K, SHARED)
            b_k = _normed(b_k, p_k_scale, o_g, o_k, m_k, eps, K, SHARED)
        p_row = p_rows + ((i_b * T + t) * (G * R) + o_h[:, None]) * K + o_k[None, :]
        tl.store(p_row, b_q.to(p_rows.dtype.element_ty), mask=m_q)
        b_norm = write_key(b_k, b_v, b_norm, b_page, p_keys, p_values, p_exponents, p_norm, o_k, o_v, o_bg * N, m_g,
                           pos, K, V, PAGE, EIGHT)  # fmt: skip
        if HAS_GATE:
            b_g = tl.load(p_g + i_b * stride_gb + t * stride_gt + o_h * stride_gh, mask=m_h, other=0.0).to(tl.float32)
            if LOGITS:
                b_g = log_sigmoid(b_g + b_bias) * factor
            b_page = tl.load(p_table + o_bg * N + pos // PAGE + o_rep * 0, mask=m_h, other=-1).to(tl.int64)  # [BH]
            b_total, b_start, b_tail, b_since, b_bits = add_token_gates(
                b_g, b_total, b_start, b_tail, b_since, b_bits, b_page, p_decay, p_sum, p_tails, p_closed, o_bh,
                o_rep, m_h, pos, N, R, PAGE)  # fmt: skip
            tl.store(p_seen + o_bh * T + t, b_since, mask=m_h)
    if i_g == 0:
        tl.store(p_length + i_b, L + n_new)
    if HAS_GATE:
        tl.store(p_total + o_bh, b_total, mask=m_h)
        tl.store(p_since + o_bh, b_since, mask=m_h)


def write_tokens(
    tokens: tuple[Tensor, Tensor, Tensor], state: PagedState, past: Tensor, count: Tensor, parts: TokenParts,
    shares: Shares, window: int,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Launch the kernel on what ``step.paged_step`` takes, checked.

    Args:
        tokens: q, k and v.
        shares: to be filled for a step that reads all pages from the window on.

    Returns:
        Queries [B, T, H, K] in the dtype of the pool, of q where that has 8 bits, and the first key that each row may
        see, [B, H, T], or None without gates.
    """
    (q, k, v), (pages, (table, _, length), gates), gate = tokens, state, parts.gate
    keys, values, k_norm, exponents = pages
    (B, T, H, K), (G, V) = q.shape, v.shape[2:]
    made = gate if isinstance(gate, Forget) else Forget(k if gate is None else gate, None)
    rows, visible = (
        (keys if exponents is None else q).new_empty((B, T, H, K)),
        None if gates is None else length.new_empty((B, H, T)),
    )
    decay, page_sum, total, since, n_log, closed = gates or (k_norm,) * 6
    k_mix, v_mix, k_before, v_before = parts.shift or (k, v, k, v)
    q_scale, k_scale, eps = parts.norm or (k, k, 0.0)
    BH, BK = power_of_2(H // G), power_of_2(K)
    paged_tokens_kernel[(B * G + 1,)](
        p_q=q, p_k=k, p_v=v, p_g=made.logits, p_count=count, p_past=past, p_seen=length if visible is None else visible,
        p_rows=rows, p_q_scale=q_scale, p_k_scale=k_scale, p_k_mix=k_mix, p_v_mix=v_mix, p_k_before=k_before,
        p_v_before=v_before, p_bias=k if made.bias is None else made.bias, p_first=shares.first, p_begin=shares.begin,
        p_ends=shares.ends, p_turn=shares.turn, p_keys=keys, p_values=values,
        p_exponents=k_norm if exponents is None else exponents, EIGHT=kind_of_bits(exponents), p_table=table,
        p_length=length, p_norm=k_norm, p_decay=decay, p_sum=page_sum, p_total=total, p_since=since, p_tails=n_log,
        p_closed=closed, T=T, N=table.shape[2], BG=B * G, window=window, eps=eps, factor=made.factor,
        **_strides("q", q), **_strides("k", k), **_strides("v", v), **_strides("g", made.logits),
        **_strides("a", k_mix), **_strides("c", v_mix), G=G, R=H // G, K=K, V=V, BH=BH, BK=BK,
        BV=power_of_2(V), PAGE=keys.shape[1], HAS_GATE=gate is not None,
        LOGITS=isinstance(gate, Forget), HAS_BIAS=made.bias is not None, HAS_NORM=parts.norm is not None,
        SHARED=q_scale.ndim == 1, HAS_SHIFT=parts.shift is not None, MOVES=T == 1, EXTRA=shares.extra, BN=shares.heads,
        num_warps=1 if BH * BK <= 512 else 4,
    )  # fmt: skip
    return rows, visible


def _strides(name: str, x: Tensor) -> dict[str, int]:
    """The strides of the first three axes of ``x [B, T, heads, ...]``, by the names of the kernel's arguments."""
    return {f"stride_{name}{axis}": n for axis, n in zip("bth", x.stride()[:3], strict=True)}
