"""Few query rows over keys in pages: every program reads an equal share of all pages that are alive.

The heads' live pages are one long list (``page_shares.py``). Program p of n takes the entries p L / n up to
(p + 1) L / n, which may be the end of one head, some whole ones and the start of another, and writes a partial result
for each; program p's part of head h has the slot p + h, so that slots are never shared and those of a head are in
order. A last kernel combines them, in that order, and norms and gates the output where that is asked for.

What there is to read is known to the device alone (lengths, first pages): a launch that was recorded once stays right.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.activations import finished
from attnzoo.kernels.common.constants import GATE_FULL
from attnzoo.kernels.common.jit_constants import TL_LOG2E
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import cdiv, dot_precision, gate_kind, head_block
from attnzoo.kernels.common.online_softmax import put_together, weights_of
from attnzoo.kernels.common.parts import Finish
from attnzoo.kernels.decode.operands import PagedInference
from attnzoo.kernels.decode.plan import DecodePlan
from attnzoo.kernels.decode.portable.eight_bits import kind_of_bits
from attnzoo.kernels.decode.portable.page_shares import FAR, Shares
from attnzoo.kernels.decode.portable.path_pages import NOT_WALKED, carried_scores, new_tokens, open_start
from attnzoo.kernels.decode.portable.prune import drop_pages
from attnzoo.kernels.decode.portable.rows import page_logits, page_scores, page_values, row_queries, row_since, row_sums


@triton.jit
def _heads_before(p_ends, BG, bound, BN: tl.constexpr):
    """The number of heads that end at or before an entry of the list."""
    n = tl.zeros([], tl.int32)
    for i in range(0, BG, BN):
        o_n = i + tl.arange(0, BN)
        b_end = tl.load(p_ends + o_n, mask=o_n < BG, other=2147483647)
        n += tl.sum((b_end <= bound).to(tl.int32), 0)
    return n


@triton.jit
def _start_of(p_ends, i_bg):
    """The first entry of a head in the list."""
    return tl.load(p_ends + i_bg - 1, mask=i_bg > 0, other=0)


@launched
@triton.jit(do_not_specialize=["T", "N", "BG", "M", "window"])
def paged_split_kernel(
    p_q, p_k, p_v, p_exponents, p_table, p_begin, p_ends, p_length, p_decay, p_sum, p_g, p_since, p_walk, p_own, p_base,
    p_count, p_part, p_lse, T, N, BG, M, window, scale2, stride_qb, stride_qt, stride_qh,
    G: tl.constexpr, R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, PAGE: tl.constexpr, EXTRA: tl.constexpr, BN: tl.constexpr, GATE: tl.constexpr,
    HAS_SINCE: tl.constexpr, EIGHT: tl.constexpr, PREC: tl.constexpr, GROUP: tl.constexpr,
    HAS_COUNT: tl.constexpr,
):  # fmt: skip
    """Normalised outputs [slots, R * T, V] float32 and their log2-sum-exp [slots, R * T] over one program's pages.

    Rows are the T tokens of each of the R query heads of a key head, BT of them a program. GROUP: the queries are those
    that ``path_pages.py`` has walked to each group of so many pages, and so are the scores of the last group; 0: as
    given.
    """
    i_p, i_r = tl.program_id(0), tl.program_id(1)
    total = tl.load(p_ends + BG - 1).to(tl.int64)
    n_p = tl.minimum(tl.num_programs(0), total)  # every share has an entry, and those of a head follow each other
    lo = (tl.minimum(i_p, n_p) * total // n_p).to(tl.int32)
    hi = (tl.minimum(i_p + 1, n_p) * total // n_p).to(tl.int32)
    o_r, o_k, o_v = i_r * BT + tl.arange(0, BT), tl.arange(0, BK), tl.arange(0, BV)
    m_r = o_r < T * R
    o_t, o_rep = o_r % T, tl.minimum(o_r // T, R - 1)
    i_first = _heads_before(p_ends, BG, lo, BN)
    i_stop = tl.where(lo < hi, _heads_before(p_ends, BG, hi - 1, BN) + 1, i_first)
    for i_bg in range(i_first, i_stop):
        start, end = _start_of(p_ends, i_bg), tl.load(p_ends + i_bg)
        begin = tl.load(p_begin + i_bg) - start - EXTRA  # page of an entry: entry + begin
        n_lo = tl.maximum(tl.maximum(lo, start), start + EXTRA) + begin
        n_hi = tl.maximum(tl.minimum(hi, end), start + EXTRA) + begin
        i_b, i_g = tl.zeros([], tl.int64) + i_bg // G, i_bg % G
        b_len = tl.load(p_length + i_b)
        b_pos = b_len - T + o_t  # [BT]
        if GROUP > 0:  # scores from here on are there
            b_open = open_start(b_len - new_tokens(p_count, i_b, T, HAS_COUNT), PAGE, GROUP)
        i_bg64 = i_b * G + i_g
        p_t, p_sums = p_table + i_bg64 * N, p_sum + i_bg64 * R * N
        o_h = i_g * R + o_rep
        if GROUP == 0:
            b_q = row_queries(p_q, i_b, o_t, o_h, o_k, m_r, stride_qb, stride_qt, stride_qh, K)  # [BT, BK]
        b_ref, b_slope = row_sums(p_t, p_decay, p_sums, p_g, b_pos, o_h, o_rep, m_r, N, R, PAGE, GATE)
        b_since = row_since(p_since, i_bg64 * R, b_pos, o_rep, o_t, m_r, T, window, HAS_SINCE)
        b_m = tl.full([BT], float("-inf"), tl.float32)
        b_l = tl.zeros([BT], tl.float32)
        b_o = tl.zeros([BT, BV], tl.float32)
        i_page = tl.load(p_t + n_lo, mask=n_lo < n_hi, other=0)
        for i in range(n_lo * (PAGE // BS), n_hi * (PAGE // BS)):
            s = i * BS
            n_next = (i + 1) // (PAGE // BS)
            i_next = tl.load(p_t + n_next, mask=n_next < n_hi, other=0)  # so that loads of keys need not wait for it
            rest = tl.where(i_page >= 0, b_len - s, 0)  # keys from here on
            at = tl.maximum(i_page, 0).to(tl.int64) * PAGE + s % PAGE
            if GROUP > 0:
                b_s = carried_scores(p_walk, p_own, p_base, p_k, i_b, i_bg64, b_open, at, s, rest, o_r, m_r, T, M, R,
                                     K, BK, BS, PAGE, GROUP, PREC)  # fmt: skip
            else:
                b_s = page_scores(b_q, p_k, p_exponents, at, rest, K, BK, BS, EIGHT, PREC)
            b_y = page_logits(b_s, p_decay, p_sums, b_ref, b_slope, b_pos, b_since, o_rep, at, s, rest, N, scale2, R,
                              BS, PAGE, GATE)  # fmt: skip
            b_m, b_w, b_a = weights_of(b_y, b_m)
            b_l = b_l * b_a + tl.sum(b_w, 1)
            b_w, b_v = page_values(b_w, p_v, p_exponents, at, rest, V, BV, BS, EIGHT, p_q.dtype.element_ty)
            b_o = tl.dot(b_w, b_v, b_o * b_a[:, None], input_precision=PREC)  # [BT, BV]
            i_page = i_next
        o_part = (i_bg64 + i_p) * (R * T) + o_r
        tl.store(p_lse + o_part, tl.where(b_l > 0.0, b_m + tl.log2(b_l), float("-inf")), mask=m_r)
        b_o = b_o / tl.where(b_l > 0.0, b_l, 1.0)[:, None]
        tl.store(p_part + o_part[:, None] * V + o_v[None, :], b_o, mask=m_r[:, None] & (o_v[None, :] < V))


@launched
@triton.jit(do_not_specialize=["T", "BG", "n_p", "stride_gb"])
def paged_combine_kernel(
    p_part, p_lse, p_ends, p_o, p_sink, p_scale, p_gate, T, BG, n_p, eps, stride_gb, stride_gt, stride_gh,
    G: tl.constexpr, R: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr, HAS_SINK: tl.constexpr,
    HAS_NORM: tl.constexpr, SHARED: tl.constexpr, CENTRED: tl.constexpr, HAS_GATE: tl.constexpr, SWISH: tl.constexpr,
):  # fmt: skip
    """Output [B, T, H, V] of one row from the parts of its head, and its sink; normed and gated."""
    i_bh, i_t = tl.program_id(0), tl.program_id(1)
    i_bg, i_h = i_bh // R, i_bh % (G * R)
    o_n, o_v = tl.arange(0, BN), tl.arange(0, BV)
    total = tl.load(p_ends + BG - 1).to(tl.int64)
    n_p = tl.minimum(n_p, total)
    start, end = _start_of(p_ends, i_bg).to(tl.int64), tl.load(p_ends + i_bg).to(tl.int64)
    lo = (((start + 1) * n_p - 1) // total).to(tl.int32)  # the programs of the first and of the last entry
    hi = ((end * n_p - 1) // total).to(tl.int32)
    b_m = tl.full([], float("-inf"), tl.float32)
    b_l = tl.zeros([], tl.float32)
    b_o = tl.zeros([BV], tl.float32)
    if HAS_SINK:
        b_m = tl.load(p_sink + i_h).to(tl.float32) * TL_LOG2E
        b_l = tl.where(b_m == float("-inf"), 0.0, 1.0)
    for p in range(lo, hi + 1, BN):
        m_n = p + o_n <= hi
        o_part = (i_bg + p + o_n).to(tl.int64) * (R * T) + i_bh % R * T + i_t
        b_o, b_m, b_l = put_together(b_o, b_m, b_l, p_part, p_lse, o_part, m_n, o_v, V)
    i_b, m_v = (i_bh // (G * R)).to(tl.int64), o_v < V
    b_o = b_o / tl.where(b_l > 0.0, b_l, 1.0)
    p_weight = p_scale + (0 if SHARED else i_h * V) + o_v
    p_x = p_gate + i_b * stride_gb + i_t * stride_gt + i_h * stride_gh + o_v
    b_o = finished(b_o, m_v, p_weight, p_x, V, eps, HAS_NORM, CENTRED, HAS_GATE, SWISH, False)
    p_out = p_o + ((i_b * T + i_t) * (G * R) + i_h) * V + o_v
    tl.store(p_out, b_o.to(p_o.dtype.element_ty), mask=m_v)


def paged_forward(
    x: PagedInference, plan: DecodePlan, walked: dict[str, Any] | None = None, shares: Shares | None = None,
    finish: Finish | None = None,
) -> Tensor:  # fmt: skip
    """Launch the kernels on checked inputs.

    Args:
        walked: of PaTH, what ``path_pages.walk_and_carry`` gives.
        shares: of the pages that are alive, where they have been dealt out.
        finish: what the output goes through.
    """
    q, ((k, v, _, exponents), (table, first, length), gates), first_visible, log_decay, sink, options = x
    B, T, H, K = q.shape
    G, N, V = table.shape[1], table.shape[2], v.shape[2]
    BG, R, n, BV = B * G, H // G, plan.programs, head_block(V)
    window = min(options.window, FAR) if options.window else FAR
    if shares is None:
        shares = Shares.empty(first, plan.extra)
        shares.deal(length, T, window, k.shape[1])
    begin, ends = shares.begin, shares.ends
    lses = first.new_empty((n + BG, R * T), dtype=torch.float32)
    part, o = lses.new_empty((n + BG, R * T, V)), (q if exponents is not None else v).new_empty((B, T, H, V))
    pages: dict[str, Any] = {
        "p_q": q, "p_k": k, "p_exponents": k if exponents is None else exponents, "EIGHT": kind_of_bits(exponents),
        "p_table": table, "p_length": length, "p_decay": lses if gates is None else gates.decay,
        "p_sum": lses if gates is None else gates.page_sum, "p_g": lses if log_decay is None else log_decay,
        "p_since": begin if first_visible is None else first_visible, "T": T, "N": N, "window": window,
        "scale2": options.scale2, "stride_qb": q.stride(0), "stride_qt": q.stride(1), "stride_qh": q.stride(2),
        "G": G, "R": R, "K": K, "BK": head_block(K), "BT": plan.BT, "BS": plan.BS, "PAGE": k.shape[1],
        "GATE": gate_kind(log_decay) if gates is None else GATE_FULL, "HAS_SINCE": first_visible is not None,
        "PREC": dot_precision(q.dtype) if walked is None else "tf32x3",
    }  # fmt: skip
    walked = walked or {"p_walk": begin, "p_own": begin, "p_base": begin, "p_count": begin, "M": 0, **NOT_WALKED}
    if options.bound:
        drop_pages(pages, walked, shares, x)
    paged_split_kernel[(n, cdiv(R * T, plan.BT))](
        p_v=v, p_begin=begin, p_ends=ends, p_part=part, p_lse=lses, BG=BG, V=V, BV=BV, num_warps=plan.num_warps,
        num_stages=plan.num_stages, EXTRA=plan.extra, BN=shares.heads, **pages, **walked,
    )  # fmt: skip
    scale_o, eps, centred, gate, swish = finish or Finish()
    paged_combine_kernel[(B * H, T)](
        part, lses, ends, o, lses if sink is None else sink, lses if scale_o is None else scale_o,
        lses if gate is None else gate, T, BG, n, eps, *((0, 0, 0) if gate is None else gate.stride()[:3]), G=G, R=R,
        V=V, BV=BV, BN=16, HAS_SINK=sink is not None, HAS_NORM=scale_o is not None,
        SHARED=scale_o is not None and scale_o.ndim == 1, CENTRED=centred, HAS_GATE=gate is not None, SWISH=swish,
        num_warps=4,
    )  # fmt: skip
    return o
