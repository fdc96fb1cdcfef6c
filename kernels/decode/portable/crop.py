"""Tokens taken back: what a pool keeps of its keys and gates, as it was before them, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import power_of_2
from attnzoo.kernels.decode.portable.eight_bits import decoded, exponents_at, kind_of_bits
from attnzoo.kernels.decode.state import PagedState


@triton.jit
def _last_closed(p_closed, o_bh, m_h, L, n_pages, N, BN: tl.constexpr, PAGE: tl.constexpr):
    """The last of the first L tokens with a closed gate, 0 where there is none, of n_pages pages. # [BH] int32"""
    o_i, one = tl.arange(0, PAGE), tl.full([], 1, tl.int64)
    b_n = (o_bh * 0).to(tl.int32)
    for i in range(tl.cdiv(n_pages, BN)):
        o_n = i * BN + tl.arange(0, BN)
        b_words = tl.load(p_closed + o_bh[:, None] * N + o_n[None, :], mask=m_h[:, None] & (o_n < n_pages)[None, :],
                          other=0)  # fmt: skip
        b_words = tl.where((o_n == L // PAGE)[None, :], b_words & ((one << (L % PAGE)) - 1), b_words)
        b_n = tl.maximum(b_n, tl.max(tl.where(b_words != 0, o_n[None, :], 0), 1))
    b_word = tl.load(p_closed + o_bh * N + b_n, mask=m_h & (b_n < n_pages), other=0)
    b_word = tl.where(b_n == L // PAGE, b_word & ((one << (L % PAGE)) - 1), b_word)
    b_bits = (b_word[:, None] >> o_i[None, :].to(tl.int64)) & 1  # [BH, PAGE]
    return b_n * PAGE + tl.max(tl.where(b_bits != 0, o_i[None, :], 0), 1)


@launched
@triton.jit(do_not_specialize=["N"])
def paged_crop_kernel(
    p_after, p_keys, p_exponents, p_table, p_length, p_norm, p_decay, p_sum, p_total, p_since, p_tails, p_closed, N,
    G: tl.constexpr, R: tl.constexpr, K: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
    PAGE: tl.constexpr, HAS_GATE: tl.constexpr, EIGHT: tl.constexpr,
):  # fmt: skip
    """One program per sequence and key head; of the pages beyond, and of those before the last token's, nothing is
    read."""
    i_bg = tl.program_id(0).to(tl.int64)
    o_i, o_k, o_r = tl.arange(0, PAGE), tl.arange(0, BK), tl.arange(0, BH)
    L, before = tl.load(p_after + i_bg // G).to(tl.int32), tl.load(p_length + i_bg // G)
    n, s = L // PAGE, L % PAGE  # the page of the next token, and the tokens that are in it
    page = tl.load(p_table + i_bg * N + n, mask=s > 0, other=-1).to(tl.int64)
    m_i = (o_i < s) & (page >= 0)
    o_at = tl.maximum(page, 0) * PAGE + o_i
    b_k = tl.load(p_keys + o_at[:, None] * K + o_k[None, :], mask=m_i[:, None] & (o_k[None, :] < K), other=0)
    if EIGHT > 0:
        b_k = decoded(b_k, EIGHT).to(tl.float32) * exponents_at(p_exponents, o_at, m_i, 0)[:, None]
    b_k = b_k.to(tl.float32)
    b_norm = tl.max(tl.sqrt(tl.sum(b_k * b_k, 1)) * 1.00001, 0)  # never less than the length
    tl.store(p_norm + i_bg * N + n, b_norm, mask=s > 0)
    for m in range(tl.cdiv(L, PAGE), tl.cdiv(before, PAGE)):
        tl.store(p_norm + i_bg * N + m, 0.0)
    if HAS_GATE:
        o_bh, m_h = i_bg * R + o_r, o_r < R
        b_start = tl.load(p_sum + o_bh * N + n, mask=m_h & (n < N), other=0.0)  # float64
        m_in = m_h[:, None] & m_i[None, :]
        b_in = tl.load(p_decay + o_at[None, :] * R + o_r[:, None], mask=m_in, other=0.0).to(tl.float64)  # [BH, PAGE]
        b_tail = tl.load(p_tails + o_bh * N + n - 1, mask=m_h & (n > 0), other=float("-inf"))
        b_c = tl.where(m_in, -(b_start[:, None] + b_in), float("-inf"))
        b_top = tl.where(m_h & (s > 0), tl.maximum(tl.max(b_c, 1), b_tail), 0.0)
        b_tail = b_top + tl.log(tl.sum(tl.exp(b_c - b_top[:, None]), 1) + tl.exp(b_tail - b_top))
        tl.store(p_tails + o_bh * N + n, b_tail, mask=m_h & (s > 0))
        b_total = b_start + tl.sum(tl.where((o_i == s - 1)[None, :], b_in, 0.0), 1)
        tl.store(p_total + o_bh, b_total, mask=m_h & (before > L))
        b_since = tl.load(p_since + o_bh, mask=m_h, other=0)
        n_pages = tl.where(tl.max(b_since, 0) >= tl.maximum(L, 1), tl.cdiv(L, PAGE), 0)  # one was taken back
        b_last = _last_closed(p_closed, o_bh, m_h, L, n_pages, N, BN, PAGE)
        tl.store(p_since + o_bh, tl.where(b_since >= L, b_last, b_since), mask=m_h)


def crop_pages(state: PagedState, length: Tensor) -> None:
    """Launch the kernel on checked inputs."""
    (keys, _, k_norm, exponents), (table, _, before), gates = state
    assert k_norm is not None
    (B, G, N), R, K = table.shape, 1 if gates is None else gates.decay.shape[2], keys.shape[2]
    paged_crop_kernel[(B * G,)](
        length, keys, k_norm if exponents is None else exponents, table, before, k_norm, *(gates or (k_norm,) * 6), N,
        G=G, R=R, K=K, BH=power_of_2(R), BK=power_of_2(K), BN=64, PAGE=keys.shape[1], HAS_GATE=gates is not None,
        EIGHT=kind_of_bits(exponents), num_warps=4,
    )  # fmt: skip
    before.copy_(length)
