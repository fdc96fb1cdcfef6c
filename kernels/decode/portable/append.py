"""New tokens into the pages of a pool, and what the pool keeps of their gates and keys: one launch, in place."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.jit_constants import TL_CLOSED
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import power_of_2
from attnzoo.kernels.decode.operands import PageWrite
from attnzoo.kernels.decode.portable.eight_bits import decoded, encoded, kind_of_bits
from attnzoo.kernels.decode.portable.eight_bits import power_of_2 as two_to


@triton.jit
def _logaddexp(a, b):
    """log(exp(a) + exp(b)), b finite. # float64"""
    return tl.maximum(a, b) + tl.log(1.0 + tl.exp(-tl.abs(a - b)))


@triton.jit
def kept_sums(p_sum, p_total, p_since, p_tails, p_closed, o_bh, m_h, L, N, PAGE: tl.constexpr):
    """What is kept of the gates of heads o_bh (b H + h) after L tokens; see ``api.paged_append``. # [BH]"""
    m_page = m_h & (L % PAGE > 0)
    b_total = tl.load(p_total + o_bh, mask=m_h, other=0.0)  # float64
    b_start = tl.load(p_sum + o_bh * N + L // PAGE, mask=m_page, other=0.0)
    b_tail = tl.load(p_tails + o_bh * N + (L - 1) // PAGE, mask=m_h & (L > 0), other=float("-inf"))
    b_since = tl.load(p_since + o_bh, mask=m_h, other=0)
    b_bits = tl.load(p_closed + o_bh * N + L // PAGE, mask=m_page, other=0)
    b_bits &= (tl.full([], 1, tl.int64) << (L % PAGE)) - 1  # tokens that were taken back may have left theirs
    return b_total, b_start, b_tail, b_since, b_bits


@triton.jit
def add_token_gates(
    b_g, b_total, b_start, b_tail, b_since, b_bits, b_page, p_decay, p_sum, p_tails, p_closed, o_bh, o_rep, m_h, pos, N,
    R: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """The sums with the gates of token pos, written to its page; b_page: that of each head, -1 for none. # [BH]"""
    n, i_in, one = pos // PAGE, pos % PAGE, tl.full([], 1, tl.int64)
    m_closed = b_g <= TL_CLOSED
    b_since = tl.where(m_closed, pos, b_since)
    b_bits = tl.where(i_in == 0, 0, b_bits) | tl.where(m_closed, one << i_in, 0)
    b_start = tl.where(i_in == 0, b_total, b_start)
    b_total += tl.where(m_closed, 0.0, b_g).to(tl.float64)
    b_tail = _logaddexp(b_tail, -b_total)
    tl.store(p_decay + (b_page * PAGE + i_in) * R + o_rep, (b_total - b_start).to(tl.float32), mask=b_page >= 0)
    tl.store(p_sum + o_bh * N + n, b_start, mask=m_h)
    tl.store(p_tails + o_bh * N + n, b_tail, mask=m_h)
    tl.store(p_closed + o_bh * N + n, b_bits, mask=m_h)
    return b_total, b_start, b_tail, b_since, b_bits


@triton.jit
def write_key(b_k, b_v, b_norm, b_page, p_keys, p_values, p_exponents, p_norm, o_k, o_v, o_table, m_g, pos,
              K: tl.constexpr, V: tl.constexpr, PAGE: tl.constexpr, EIGHT: tl.constexpr):  # fmt: skip
    """Keys [BG, BK] and values [BG, BV] of token pos into their pages, and the lengths of the longest keys. # [BG]"""
    n, i_in, m_page = pos // PAGE, pos % PAGE, b_page >= 0  # a page that is not there is not written to
    o_to = b_page * PAGE + i_in
    if EIGHT > 0:
        b_k, b_ek = encoded(b_k.to(tl.float32))
        b_v, b_ev = encoded(b_v.to(tl.float32))
        tl.store(p_exponents + o_to * 2, b_ek.to(tl.int8), mask=m_page)
        tl.store(p_exponents + o_to * 2 + 1, b_ev.to(tl.int8), mask=m_page)
    else:
        b_k, b_v = b_k.to(p_keys.dtype.element_ty), b_v.to(p_values.dtype.element_ty)
    tl.store(p_keys + o_to[:, None] * K + o_k[None, :], b_k, mask=m_page[:, None] & (o_k[None, :] < K))
    tl.store(p_values + o_to[:, None] * V + o_v[None, :], b_v, mask=m_page[:, None] & (o_v[None, :] < V))
    if EIGHT > 0:
        b_k = decoded(b_k, EIGHT).to(tl.float32) * two_to(b_ek)[:, None]
    b_k = b_k.to(tl.float32)
    b_long = tl.where(m_page, tl.sqrt(tl.sum(b_k * b_k, 1)) * 1.00001, 0.0)  # never less than the length
    b_norm = tl.maximum(tl.where(i_in > 0, b_norm, 0.0), b_long)
    tl.store(p_norm + o_table + n, b_norm, mask=m_g)
    return b_norm


@launched
@triton.jit(do_not_specialize=["T", "N", "stride_gb"])
def paged_append_kernel(
    p_k, p_v, p_g, p_count, p_keys, p_values, p_exponents, p_table, p_length, p_norm, p_decay, p_sum, p_total, p_since,
    p_tails, p_closed, p_seen, T, N, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, stride_gb,
    stride_gt, stride_gh,
    G: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BG: tl.constexpr, BH: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PAGE: tl.constexpr, HAS_GATE: tl.constexpr, HAS_COUNT: tl.constexpr,
    EIGHT: tl.constexpr,
):  # fmt: skip
    """One program per sequence, all heads, one token after the other."""
    i_b = tl.program_id(0).to(tl.int64)
    o_g, o_h, o_k, o_v = tl.arange(0, BG), tl.arange(0, BH), tl.arange(0, BK), tl.arange(0, BV)
    m_g, m_h = o_g < G, o_h < G * R
    o_table, o_bh = (i_b * G + o_g) * N, i_b * (G * R) + o_h
    L = tl.load(p_length + i_b)
    n_new = T
    if HAS_COUNT:
        n_new = tl.minimum(tl.load(p_count + i_b).to(tl.int32), T)
    if HAS_GATE:
        b_total, b_start, b_tail, b_since, b_bits = kept_sums(p_sum, p_total, p_since, p_tails, p_closed, o_bh, m_h, L,
                                                              N, PAGE)  # fmt: skip
        for t in range(T - n_new):
            tl.store(p_seen + o_bh * T + t, 0, mask=m_h)
    b_norm = tl.load(p_norm + o_table + L // PAGE, mask=m_g & (L % PAGE > 0), other=0.0)  # [BG]
    tl.debug_barrier()  # every thread has read what will be written to
    for t in range(T - n_new, T):
        pos = L + t - (T - n_new)
        b_page = tl.load(p_table + o_table + pos // PAGE, mask=m_g, other=-1).to(tl.int64)  # [BG]
        p_kt = p_k + i_b * stride_kb + t * stride_kt + o_g[:, None].to(tl.int64) * stride_kh + o_k[None, :]
        p_vt = p_v + i_b * stride_vb + t * stride_vt + o_g[:, None].to(tl.int64) * stride_vh + o_v[None, :]
        b_k = tl.load(p_kt, mask=(b_page >= 0)[:, None] & (o_k[None, :] < K), other=0.0)
        b_v = tl.load(p_vt, mask=(b_page >= 0)[:, None] & (o_v[None, :] < V), other=0.0)
        b_norm = write_key(b_k, b_v, b_norm, b_page, p_keys, p_values, p_exponents, p_norm, o_k, o_v, o_table, m_g, pos,
                           K, V, PAGE, EIGHT)  # fmt: skip
        if HAS_GATE:
            b_g = tl.load(p_g + i_b * stride_gb + t * stride_gt + o_h * stride_gh, mask=m_h, other=0.0).to(tl.float32)
            b_page = tl.load(p_table + (i_b * G + o_h // R) * N + pos // PAGE, mask=m_h, other=-1).to(tl.int64)  # [BH]
            b_total, b_start, b_tail, b_since, b_bits = add_token_gates(
                b_g, b_total, b_start, b_tail, b_since, b_bits, b_page, p_decay, p_sum, p_tails, p_closed, o_bh,
                o_h % R, m_h, pos, N, R, PAGE)  # fmt: skip
            tl.store(p_seen + o_bh * T + t, b_since, mask=m_h)
    tl.store(p_length + i_b, L + n_new)
    if HAS_GATE:
        tl.store(p_total + o_bh, b_total, mask=m_h)
        tl.store(p_since + o_bh, b_since, mask=m_h)


def append_tokens(x: PageWrite) -> Tensor | None:
    """Launch the kernel on checked inputs; the first key that each new row may see, None without gates."""
    (keys, values, k_norm, exponents), (table, _, length), gates = x.state
    k, v, log_decay, count = x.k, x.v, x.log_decay, x.counts
    (B, T, G, K), V, R = k.shape, v.shape[3], 1 if gates is None else gates.decay.shape[2]
    visible = None if gates is None else length.new_empty((B, G * R, T))
    paged_append_kernel[(B,)](
        k, v, k if log_decay is None else log_decay, length if count is None else count, keys, values,
        k_norm if exponents is None else exponents, table, length, k_norm, *(gates or (k_norm,) * 6),
        length if visible is None else visible, T, table.shape[2], *k.stride()[:3], *v.stride()[:3],
        *((0, 0, 0) if log_decay is None else log_decay.stride()), G=G, R=R, K=K, V=V, BG=power_of_2(G),
        BH=power_of_2(G * R), BK=power_of_2(K), BV=power_of_2(V), PAGE=keys.shape[1], HAS_GATE=gates is not None,
        HAS_COUNT=count is not None, EIGHT=kind_of_bits(exponents), num_warps=4,
    )  # fmt: skip
    return visible
