"""New tokens into the pages of a pool, and what the pool keeps of their gates and keys: one launch, in place."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.jit_constants import TL_CLOSED
from attnzoo.kernels.common.launching import power_of_2


@triton.jit
def _logaddexp(a, b):
    """log(exp(a) + exp(b)), b finite. # float64"""
    m = tl.maximum(a, b)
    return m + tl.log(tl.exp(a - m) + tl.exp(b - m))


@triton.jit(do_not_specialize=["T", "N", "stride_gb"])
def paged_append_kernel(
    p_k, p_v, p_g, p_count, p_keys, p_values, p_table, p_length, p_norm, p_decay, p_sum, p_total, p_since, p_tails,
    p_closed, p_seen, T, N, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, stride_gb, stride_gt,
    stride_gh,
    G: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BG: tl.constexpr, BH: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PAGE: tl.constexpr, HAS_GATE: tl.constexpr, HAS_COUNT: tl.constexpr,
):  # fmt: skip
    """One program per sequence, all heads, one token after the other."""
    i_b = tl.program_id(0).to(tl.int64)
    o_g, o_h, o_k, o_v = tl.arange(0, BG), tl.arange(0, BH), tl.arange(0, BK), tl.arange(0, BV)
    m_g, m_h = o_g < G, o_h < G * R
    o_table, o_sums = (i_b * G + o_g) * N, (i_b * (G * R) + o_h) * N
    L = tl.load(p_length + i_b)
    n_new = T
    if HAS_COUNT:
        n_new = tl.minimum(tl.load(p_count + i_b).to(tl.int32), T)
    if HAS_GATE:
        b_total = tl.load(p_total + i_b * (G * R) + o_h, mask=m_h, other=0.0)  # [BH] float64
        b_start = tl.load(p_sum + o_sums + L // PAGE, mask=m_h & (L % PAGE > 0), other=0.0)
        b_tail = tl.load(p_tails + o_sums + (L - 1) // PAGE, mask=m_h & (L > 0), other=float("-inf"))
        b_since = tl.load(p_since + i_b * (G * R) + o_h, mask=m_h, other=0)
        one = tl.full([], 1, tl.int64)
        b_bits = tl.load(p_closed + o_sums + L // PAGE, mask=m_h & (L % PAGE > 0), other=0)  # [BH]
        b_bits &= (one << (L % PAGE)) - 1  # tokens that were taken back may have left theirs
    b_norm = tl.load(p_norm + o_table + L // PAGE, mask=m_g & (L % PAGE > 0), other=0.0)  # [BG]
    for t in range(T - n_new, T):
        pos = L + t - (T - n_new)
        n, i_in = pos // PAGE, pos % PAGE
        b_page = tl.load(p_table + o_table + n, mask=m_g, other=-1).to(tl.int64)  # [BG]
        m_page, o_to = b_page >= 0, b_page * PAGE + i_in  # a page that is not there is not written to
        p_kt = p_k + i_b * stride_kb + t * stride_kt + o_g[:, None].to(tl.int64) * stride_kh + o_k[None, :]
        p_vt = p_v + i_b * stride_vb + t * stride_vt + o_g[:, None].to(tl.int64) * stride_vh + o_v[None, :]
        m_k, m_v = m_page[:, None] & (o_k[None, :] < K), m_page[:, None] & (o_v[None, :] < V)
        b_k, b_v = tl.load(p_kt, mask=m_k, other=0.0), tl.load(p_vt, mask=m_v, other=0.0)
        tl.store(p_keys + o_to[:, None] * K + o_k[None, :], b_k, mask=m_k)
        tl.store(p_values + o_to[:, None] * V + o_v[None, :], b_v, mask=m_v)
        b_k = b_k.to(p_keys.dtype.element_ty).to(tl.float32)
        b_long = tl.sqrt(tl.sum(b_k * b_k, 1)) * 1.00001  # never less than the length
        b_norm = tl.maximum(tl.where(i_in > 0, b_norm, 0.0), b_long)
        tl.store(p_norm + o_table + n, b_norm, mask=m_g)
        if HAS_GATE:
            b_g = tl.load(p_g + i_b * stride_gb + t * stride_gt + o_h * stride_gh, mask=m_h, other=0.0).to(tl.float32)
            m_closed = b_g <= TL_CLOSED
            b_since = tl.where(m_closed, pos, b_since)
            b_bits = tl.where(i_in == 0, 0, b_bits) | tl.where(m_closed, one << i_in, 0)
            b_start = tl.where(i_in == 0, b_total, b_start)
            b_total += tl.where(m_closed, 0.0, b_g).to(tl.float64)
            b_tail = _logaddexp(b_tail, -b_total)
            b_page = tl.load(p_table + (i_b * G + o_h // R) * N + n, mask=m_h, other=-1).to(tl.int64)  # [BH]
            o_to = (b_page * PAGE + i_in) * R + o_h % R
            tl.store(p_decay + o_to, (b_total - b_start).to(tl.float32), mask=b_page >= 0)
            tl.store(p_sum + o_sums + n, b_start, mask=m_h)
            tl.store(p_tails + o_sums + n, b_tail, mask=m_h)
            tl.store(p_closed + o_sums + n, b_bits, mask=m_h)
            tl.store(p_seen + (i_b * (G * R) + o_h) * T + t, b_since, mask=m_h)
    tl.debug_barrier()  # every thread has read the old length and sums
    tl.store(p_length + i_b, L + n_new)
    if HAS_GATE:
        tl.store(p_total + i_b * (G * R) + o_h, b_total, mask=m_h)
        tl.store(p_since + i_b * (G * R) + o_h, b_since, mask=m_h)


def append(
    k: Tensor, v: Tensor, log_decay: Tensor | None, count: Tensor | None, keys: Tensor, values: Tensor, table: Tensor,
    length: Tensor, k_norm: Tensor, decay: Tensor | None, page_sum: Tensor | None, total: Tensor | None,
    since: Tensor | None, n_log: Tensor | None, closed: Tensor | None,
) -> Tensor:  # fmt: skip
    """Launch the kernel; what ``api.paged_append`` takes, checked. Returns seen [B, H, T], empty without gates."""
    (B, T, G, K), V, gates = k.shape, v.shape[3], log_decay is not None
    R = decay.shape[2] if decay is not None else 1
    seen = length.new_zeros((B, G * R, T) if gates else (0,))
    given = [k_norm if x is None else x for x in (decay, page_sum, total, since, n_log, closed)]
    paged_append_kernel[(B,)](
        k, v, k if log_decay is None else log_decay, length if count is None else count, keys, values, table, length,
        k_norm, *given, seen, T, table.shape[2], *k.stride()[:3], *v.stride()[:3],
        *((0, 0, 0) if log_decay is None else log_decay.stride()), G=G, R=R, K=K, V=V, BG=power_of_2(G),
        BH=power_of_2(G * R), BK=power_of_2(K), BV=power_of_2(V), PAGE=keys.shape[1], HAS_GATE=gates,
        HAS_COUNT=count is not None, num_warps=4,
    )  # fmt: skip
    return seen
