"""Pruning of steps over pages: the first page that the rows of a key head must read.

The certificate is that of ``common/pruning.py`` with the bound "tail" and what a pool keeps: ``n_log`` of a page is
the logarithm of the sum of ``exp(-c_l)`` up to its end, and ``U_i`` needs the longest key of the pages that are
dropped alone; PaTH's queries and keys only become shorter on their way. ``l_i`` is the log-sum-exp of row i over the
page of the first row, those after it and the one before.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from attnzoo.kernels.common.constants import LOG2E, SLACK
from attnzoo.kernels.common.jit_constants import TL_LOG2E
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.online_softmax import weights_of
from attnzoo.kernels.common.pruning import tail_at
from attnzoo.kernels.common.scores import scores
from attnzoo.kernels.decode.operands import PagedInference
from attnzoo.kernels.decode.portable.page_shares import Shares, deal_pages
from attnzoo.kernels.decode.portable.path_pages import carried_scores, new_tokens, open_start
from attnzoo.kernels.decode.portable.rows import page_logits, page_scores, row_queries, row_since, row_sums


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b)


@launched
@triton.jit(do_not_specialize=["T", "N", "M", "window"])
def paged_prune_kernel(
    p_q, p_k, p_exponents, p_table, p_first, p_length, p_decay, p_sum, p_g, p_since, p_norm, p_tails, p_bound, p_begin,
    p_ends, p_turn, p_walk, p_own, p_base, p_count, T, N, M, window, scale2, log2_eps, stride_qb, stride_qt, stride_qh,
    G: tl.constexpr, R: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr,
    PAGE: tl.constexpr, BN: tl.constexpr, GATE: tl.constexpr, HAS_SINCE: tl.constexpr, HAS_BOUND: tl.constexpr,
    EIGHT: tl.constexpr, PREC: tl.constexpr, GROUP: tl.constexpr, HAS_COUNT: tl.constexpr,
    EXTRA: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """The first page [B * G] int32 of which some row of a key head may not go without; the last program deals anew."""
    i_bg = tl.program_id(0).to(tl.int64)
    i_b, i_g = i_bg // G, i_bg % G
    o_k, o_n = tl.arange(0, BK), tl.arange(0, BN)
    b_len, begin = tl.load(p_length + i_b), tl.load(p_first + i_bg)
    n_own = tl.maximum(b_len - T, 0) // PAGE  # the page of the first row: it and those after it stay
    p_t, p_sums = p_table + i_bg * N, p_sum + i_bg * R * N
    n_drop = tl.maximum(n_own - begin, 0)
    near = tl.maximum(n_own - 1, begin)
    if GROUP > 0:
        n_new = new_tokens(p_count, i_b, T, HAS_COUNT)
        b_open = open_start(b_len - n_new, PAGE, GROUP)
    for i_r in range(0, R * T, BT):
        o_r = i_r + tl.arange(0, BT)
        m_r = o_r < T * R
        o_t, o_rep = o_r % T, tl.minimum(o_r // T, R - 1)
        o_h, b_pos = i_g * R + o_rep, b_len - T + o_t
        b_q = row_queries(p_q, i_b, o_t, o_h, o_k, m_r, stride_qb, stride_qt, stride_qh, K)  # [BT, BK]
        b_ref, b_slope = row_sums(p_t, p_decay, p_sums, p_g, b_pos, o_h, o_rep, m_r, N, R, PAGE, GATE)
        b_since = row_since(p_since, i_bg * R, b_pos, o_rep, o_t, m_r, T, window, HAS_SINCE)
        b_m = tl.full([BT], float("-inf"), tl.float32)
        b_l = tl.zeros([BT], tl.float32)
        for i in range(near * (PAGE // BS), tl.cdiv(b_len, BS)):
            s = i * BS
            i_page = tl.load(p_t + s // PAGE)
            rest, at = tl.where(i_page >= 0, b_len - s, 0), tl.maximum(i_page, 0).to(tl.int64) * PAGE + s % PAGE
            if GROUP > 0:
                b_s = carried_scores(p_walk, p_own, p_base, p_k, i_b, i_bg, b_open, at, s, rest, o_r, m_r, T, M, R, K,
                                     BK, BS, PAGE, GROUP, PREC)  # fmt: skip
            else:
                b_s = page_scores(b_q, p_k, p_exponents, at, rest, K, BK, BS, EIGHT, PREC)
            b_y = page_logits(b_s, p_decay, p_sums, b_ref, b_slope, b_pos, b_since, o_rep, at, s, rest, N, scale2, R,
                              BS, PAGE, GATE)  # fmt: skip
            b_m, b_w, b_a = weights_of(b_y, b_m)
            b_l = b_l * b_a + tl.sum(b_w, 1)
        m_row = m_r & (b_pos >= 0)
        if GROUP > 0:
            m_row = m_row & (o_t >= T - n_new)  # the others have no scores
        b_lse = b_m + tl.log2(b_l)  # -inf where a row sees no key: it drops none
        b_c = b_ref * TL_LOG2E + b_pos * b_slope.to(tl.float64)  # [BT], one of the two is 0
        b_q = b_q.to(tl.float32)
        b_long = tl.sqrt(tl.sum(b_q * b_q, 1)) * 1.0001
        b_most = b_long * 0.0 + float("inf")
        if HAS_BOUND:
            b_most = tl.load(p_bound + o_h).to(tl.float32) * TL_LOG2E
        c_norm = tl.zeros([], tl.float32)
        count = n_drop * 0
        for n in range(begin, begin + n_drop, BN):
            m_n = n + o_n < begin + n_drop
            b_norm = tl.load(p_norm + i_bg * N + n + o_n, mask=m_n, other=0.0)
            b_norm = tl.maximum(tl.associative_scan(b_norm, 0, _maximum), c_norm)  # [BN]
            if GATE == 2:
                p_tail = p_tails + (i_bg * R + o_rep)[:, None] * N + (n + o_n)[None, :]
                b_tail = tl.load(p_tail, mask=m_n[None, :], other=0.0) * TL_LOG2E  # [BT, BN]
            else:
                b_tail = tail_at(p_tails, p_tails, b_slope[:, None], (n + o_n)[None, :], m_n, GATE, True, PAGE)
            b_u = scores(b_long[:, None] * b_norm[None, :], scale2)
            b_need = tl.minimum(b_u, b_most[:, None]) - b_lse[:, None]
            m_drop = b_need.to(tl.float64) + (b_c[:, None] + b_tail) <= log2_eps
            m_drop = tl.min((m_drop | ~m_row[:, None]).to(tl.int32), 0)  # [BN]
            count += tl.sum(tl.where(m_n, m_drop, 0), 0)
            c_norm = tl.max(b_norm, 0)
        n_drop = tl.minimum(n_drop, count)
    tl.store(p_begin + i_bg, begin + n_drop)
    tl.debug_barrier()  # before this program says that it is done
    if tl.atomic_add(p_turn, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        deal_pages(p_begin, p_length, p_length, p_begin, p_ends, p_turn, T, tl.num_programs(0), G, window, EXTRA, PAGE,
                   HEADS, False)  # fmt: skip


def drop_pages(pages: dict[str, Any], walked: dict[str, Any], shares: Shares, x: PagedInference) -> None:
    """``shares`` without the first pages that go; the arguments of kernels over pages go before."""
    k_norm, gates, bound = x.state.pages.k_norm, x.state.gates, x.options.logit_bound
    paged_prune_kernel[(shares.first.numel(),)](
        p_first=shares.first, p_norm=k_norm, p_tails=k_norm if gates is None else gates.n_log,
        p_bound=k_norm if bound is None else bound, p_begin=shares.begin, p_ends=shares.ends, p_turn=shares.turn,
        log2_eps=x.options.log_eps * LOG2E - SLACK, BN=128, HAS_BOUND=bound is not None, EXTRA=shares.extra,
        HEADS=shares.heads, num_warps=4, num_stages=1, **pages, **walked,
    )  # fmt: skip
