"""PaTH's steps over pages: queries walk back to the pages, and the keys of the last group of pages are carried.

So many pages are a group. The keys of a whole group stand as its last token left them, and beside the group stands the
transposed product of its factors; they are never written again. The keys of the group that is not whole stand as the
last token left them, in float32, and so does its product.

A row goes back over the new tokens one by one, which gives its scores with their keys, and meets the keys of the group
that is not whole. Times the product of that group it meets those of the group before, and so on. ``attention.py`` then
reads each page against its group's rows. One launch does this, and carries the last group over the new tokens in
place, with one program for each of its pages and one for its product and the walk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import cdiv, head_block
from attnzoo.kernels.common.tile_loads import load_tile
from attnzoo.kernels.decode.path_state import PathGroups, PathTokens
from attnzoo.kernels.decode.portable.rows import page_scores, row_queries
from attnzoo.kernels.decode.state import PagedState

NOT_WALKED = {"GROUP": 0, "HAS_COUNT": False}  # rows that meet keys as they are


@dataclass(frozen=True, eq=False)
class CarriedPages:
    """The new tokens of a step, the pages, and the pages' products; see ``decode/path_pages.py``."""

    tokens: PathTokens
    state: PagedState
    groups: PathGroups

    @property
    def group(self) -> int:
        """Pages of a group."""
        return self.groups.open.keys.shape[2] // self.state.pages.keys.shape[1]

    def arguments(self) -> dict[str, Any]:
        """Arguments of the kernel that reads the new tokens."""
        (k, w, beta, _, count), (factors, opened), keys = self.tokens, self.groups, self.state.pages.keys
        named = {"kb": k, "kt": k, "kh": k, "wb": w, "wt": w, "wh": w, "wf": w, "eb": beta, "et": beta, "eh": beta}
        strides = {f"stride_{name}": x.stride("bthf".index(name[1])) for name, x in (named | {"ef": beta}).items()}
        return {
            "p_k": k, "p_w": w, "p_beta": beta, "p_count": beta if count is None else count, "p_keys": keys,
            "p_factor": factors, "p_tail": opened.keys, "p_product": opened.factor, "p_base": opened.base,
            "HAS_COUNT": count is not None, "FACTORS": w.shape[3], "GROUP": self.group, **strides,
        }  # fmt: skip


@triton.jit
def new_tokens(p_count, i_b, T, HAS_COUNT: tl.constexpr):
    """The number of new tokens of sequence i_b, the last ones of the T."""
    n = T
    if HAS_COUNT:
        n = tl.minimum(tl.load(p_count + i_b).to(tl.int32), T)
    return n


@triton.jit
def open_start(L, PAGE: tl.constexpr, GROUP: tl.constexpr):
    """The first token of the group that L tokens leave open."""
    return L // (PAGE * GROUP) * (PAGE * GROUP)


@triton.jit
def _vector(p, o_k, K: tl.constexpr):
    return tl.load(p + o_k, mask=o_k < K, other=0.0).to(tl.float32)


@triton.jit
def _factor(p_w, p_beta, o_k, i_b, i_g, t, f, stride_wb, stride_wt, stride_wh, stride_wf, stride_eb, stride_et,
            stride_eh, stride_ef, K: tl.constexpr):  # fmt: skip
    """w and beta of factor f of one new token."""
    b_w = _vector(p_w + i_b * stride_wb + t * stride_wt + i_g * stride_wh + f * stride_wf, o_k, K)
    return b_w, tl.load(p_beta + i_b * stride_eb + t * stride_et + i_g * stride_eh + f * stride_ef).to(tl.float32)


@triton.jit
def _times(b_q, b_m, BT: tl.constexpr):
    """Rows [BT, K] times a matrix [K, N]; one row takes no tensor core. # [BT, N] float32"""
    return tl.sum(tl.trans(b_q) * b_m, 0)[None, :] if BT == 1 else tl.dot(b_q, b_m, input_precision="tf32x3")


@triton.jit
def walked_queries(p_walk, i_bg, n, o_r, o_k, m_r, T, M, R: tl.constexpr, K: tl.constexpr):
    """Rows as the keys of group n of one key head meet them. # [BT, BK]"""
    p_rows = p_walk + ((i_bg * M + n) * (R * T) + o_r)[:, None] * K + o_k[None, :]
    return tl.load(p_rows, mask=m_r[:, None] & (o_k[None, :] < K), other=0.0)


@triton.jit
def carried_scores(p_walk, p_own, p_base, p_k, i_b, i_bg, b_open, at, s, rest, o_r, m_r, T, M, R: tl.constexpr,
                   K: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr,
                   PREC: tl.constexpr):  # fmt: skip
    """Products of rows with the keys s .. s + BS, as ``page_scores``; from b_open on they are there. # [BT, BS]"""
    S: tl.constexpr = PAGE * GROUP
    o_key, m_q = s - b_open + tl.arange(0, BS), m_r & (s < b_open)
    n = tl.maximum(s // S, tl.load(p_base + i_b) - 1)
    b_q = walked_queries(p_walk, i_bg, n, o_r, tl.arange(0, BK), m_q, T, M, R, K)
    b_s = page_scores(b_q, p_k, p_k, at, tl.where(s < b_open, rest, 0), K, BK, BS, 0, PREC)
    p_scores = p_own + (i_bg * (R * T) + o_r)[:, None] * (S + T) + o_key[None, :]
    m_own = (o_key >= 0) & (o_key < S + T)
    return b_s + tl.load(p_scores, mask=m_r[:, None] & m_own[None, :], other=0.0)


@triton.jit
def _rows_before(
    p_q, p_k, p_w, p_beta, p_own, i_b, i_g, i_bg, o_r, o_k, first, T, n_new, o_new, stride_qb, stride_qt, stride_qh,
    stride_kb, stride_kt, stride_kh, stride_wb, stride_wt, stride_wh, stride_wf, stride_eb, stride_et, stride_eh,
    stride_ef, R: tl.constexpr, K: tl.constexpr, S: tl.constexpr, FACTORS: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Rows at the start of the new tokens, which STORE also scores; the first of them is key o_new. # [BT, BK]"""
    m_r = o_r < T * R
    o_t, o_rep = o_r % T, tl.minimum(o_r // T, R - 1)
    b_q = row_queries(p_q, i_b, o_t, i_g * R + o_rep, o_k, m_r, stride_qb, stride_qt, stride_qh, K)
    b_q = b_q.to(tl.float32)
    for i in range(n_new):
        t = T - 1 - i
        m_t = o_t >= t
        if STORE:
            b_k = _vector(p_k + i_b * stride_kb + t * stride_kt + i_g * stride_kh, o_k, K)
            p_score = p_own + (i_bg * (R * T) + o_r) * (S + T) + o_new + t - first
            tl.store(p_score, tl.sum(b_q * b_k[None, :], 1), mask=m_r & m_t)
        for f in range(FACTORS):
            b_w, b_beta = _factor(p_w, p_beta, o_k, i_b, i_g, t, FACTORS - 1 - f, stride_wb, stride_wt, stride_wh,
                                  stride_wf, stride_eb, stride_et, stride_eh, stride_ef, K)  # fmt: skip
            b_x = tl.where(m_t, b_beta * tl.sum(b_q * b_w[None, :], 1), 0.0)
            b_q -= b_x[:, None] * b_w[None, :]
    return b_q


@launched
@triton.jit(do_not_specialize=["T", "N", "M", "window"])
def paged_carry_kernel(
    p_q, p_k, p_w, p_beta, p_count, p_keys, p_factor, p_tail, p_product, p_base, p_table, p_first, p_length, p_norm,
    p_walk, p_own, T, N, M, window,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_wb, stride_wt, stride_wh, stride_wf,
    stride_eb, stride_et, stride_eh, stride_ef,
    G: tl.constexpr, R: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr, PAGE: tl.constexpr,
    GROUP: tl.constexpr, HAS_COUNT: tl.constexpr, FACTORS: tl.constexpr, SCORES: tl.constexpr, CARRY: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """SCORES: rows by group [B * G, M, R * T, K], and scores [B * G, R * T, S + T] with the keys of the last group.

    CARRY: the keys of that group become ``k <- R_t k`` and its product ``F <- R_t F``, one new token after the other.
    S is the number of keys of a group.
    """
    i_bg, i_part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_b, i_g = i_bg // G, i_bg % G
    S: tl.constexpr = PAGE * GROUP
    o_x, o_k = tl.arange(0, PAGE), tl.arange(0, BK)
    n_new = new_tokens(p_count, i_b, T, HAS_COUNT)
    L = tl.load(p_length + i_b) - n_new
    start, first = open_start(L, PAGE, GROUP), T - n_new
    p_t = p_table + i_bg * N
    n_begin = tl.maximum(tl.load(p_first + i_bg), tl.maximum(L + n_new - T - window + 1, 0) // PAGE)
    if (i_part < GROUP) & (i_part * PAGE >= L - start + n_new) & (i_part > 0):
        return  # a page of the group that has no key yet
    if i_part < GROUP:  # a page of the group
        n_page = start // PAGE + i_part
        i_page = tl.load(p_t + n_page, mask=n_page < N, other=-1).to(tl.int64)
        o_key = i_part * PAGE + o_x
        m_k, p_last = (o_k < K)[None, :], p_tail + i_bg * (S * K)
        o_in = o_key[:, None] * K + o_k[None, :]
        m_old = (o_key < L - start) & (i_page >= 0)
        b_x = tl.load(p_last + o_in, mask=m_old[:, None] & m_k, other=0.0)  # [PAGE, BK]
        if SCORES:
            for i_r in range(0, R * T, BT):
                o_r = i_r + tl.arange(0, BT)
                b_q = _rows_before(
                    p_q, p_k, p_w, p_beta, p_own, i_b, i_g, i_bg, o_r, o_k, first, T, n_new, L - start, stride_qb,
                    stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_wb, stride_wt, stride_wh, stride_wf,
                    stride_eb, stride_et, stride_eh, stride_ef, R, K, S, FACTORS, False,
                )  # fmt: skip
                p_scores = p_own + (i_bg * (R * T) + o_r)[:, None] * (S + T) + o_key[None, :]
                tl.store(p_scores, _times(b_q, tl.trans(b_x), BT), mask=(o_r < T * R)[:, None] & m_old[None, :])
        if CARRY:
            for t in range(first, T):
                pos = L + t - first
                n, i_in = open_start(pos, PAGE, GROUP) // PAGE + i_part, pos % S
                b_k = _vector(p_k + i_b * stride_kb + t * stride_kt + i_g * stride_kh, o_k, K)
                for f in range(FACTORS):
                    b_w, b_beta = _factor(p_w, p_beta, o_k, i_b, i_g, t, f, stride_wb, stride_wt, stride_wh,
                                          stride_wf, stride_eb, stride_et, stride_eh, stride_ef, K)  # fmt: skip
                    b_x -= (b_beta * tl.sum(b_x * b_w[None, :], 1))[:, None] * b_w[None, :]
                b_x = tl.where((o_key == i_in)[:, None], b_k[None, :], tl.where((o_key < i_in)[:, None], b_x, 0.0))
                m_now = (o_key <= i_in)[:, None] & m_k
                whole = i_in == S - 1
                if whole | (t == T - 1):
                    i_page = tl.load(p_t + n, mask=n < N, other=-1).to(tl.int64)
                    m_now = m_now & (i_page >= 0)
                    p_page = p_keys + i_page * (PAGE * K) + o_x[:, None] * K + o_k[None, :]
                    b_page = b_x.to(p_keys.dtype.element_ty)
                    tl.store(p_page, b_page, mask=m_now & whole)
                    tl.store(p_last + o_in, b_x, mask=m_now & (t == T - 1))
                    b_page = b_page.to(tl.float32)
                    b_long = tl.sqrt(tl.max(tl.sum(b_page * b_page, 1), 0)) * 1.00001  # never less than the longest key
                    tl.store(p_norm + i_bg * N + n, b_long, mask=whole & (i_page >= 0))
    else:  # its product, and the walk from there
        o_f = o_k[:, None] * K + o_k[None, :]
        m_f, b_one = (o_k < K)[:, None] & (o_k < K)[None, :], (o_k[:, None] == o_k[None, :]).to(tl.float32)
        n_groups, p_f = L // S, p_product + i_bg * (K * K)
        if SCORES:
            n_stop = tl.maximum(tl.load(p_base + i_b), n_begin // GROUP + 1)  # the last one multiplied
            skipped = tl.where(L % S > 0, 0, 1)  # the last group has just begun
            for i_r in range(0, R * T, BT):
                o_r = i_r + tl.arange(0, BT)
                b_q = _rows_before(
                    p_q, p_k, p_w, p_beta, p_own, i_b, i_g, i_bg, o_r, o_k, first, T, n_new, L - start, stride_qb,
                    stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_wb, stride_wt, stride_wh, stride_wf,
                    stride_eb, stride_et, stride_eh, stride_ef, R, K, S, FACTORS, True,
                )  # fmt: skip
                m_q = (o_r < T * R)[:, None] & (o_k[None, :] < K)
                p_to = p_walk + (i_bg * M * (R * T) + o_r)[:, None] * K + o_k[None, :]
                p_last = p_to + tl.cast(n_groups - 1, tl.int64) * (R * T * K)  # rows as the last whole group meets them
                tl.store(p_last, b_q, mask=m_q & (skipped > 0) & (n_groups >= n_stop))
                for i in tl.range(skipped, n_groups - n_stop + 1, num_stages=STAGES):
                    p_m = tl.where(i == 0, p_f, p_factor + (i_bg * M + n_groups - i) * (K * K))
                    b_q = _times(b_q, load_tile(p_m, o_k, o_k, K, K, K, BK, K < BK), BT)
                    tl.store(p_last - tl.cast(i, tl.int64) * (R * T * K), b_q, mask=m_q)
        if CARRY:
            b_f = tl.load(p_f + o_f, mask=m_f & (L % S > 0), other=0.0)  # [BK, BK]
            tl.debug_barrier()  # every thread has read it, and so it may change
            for t in range(first, T):
                i_in = (L + t - first) % S
                b_f = tl.where(i_in == 0, b_one, b_f)
                for f in range(FACTORS):
                    b_w, b_beta = _factor(p_w, p_beta, o_k, i_b, i_g, t, f, stride_wb, stride_wt, stride_wh,
                                          stride_wf, stride_eb, stride_et, stride_eh, stride_ef, K)  # fmt: skip
                    b_f -= (b_beta * b_w)[:, None] * tl.sum(b_f * b_w[:, None], 0)[None, :]
                if i_in == S - 1:
                    tl.store(p_factor + (i_bg * M + (L + t - first) // S) * (K * K) + o_f, b_f, mask=m_f)
            tl.store(p_f + o_f, b_f, mask=m_f & (n_new > 0))


def walk_and_carry(carried: CarriedPages, q: Tensor | None, window: int, BT: int, carry: bool = True) -> dict[str, Any]:
    """Launch the kernel, after the new tokens have been added to all else that the pool keeps.

    Args:
        carried: the new tokens, and what is carried.
        q: [B, T, H, K]; None: nothing is walked.
        window: that of the rows.
        BT: rows at a time, where there is more than one.
        carry: whether keys are carried.

    Returns:
        Queries by group and scores of the last group's keys, as arguments of kernels over pages.
    """
    (keys, _, k_norm, _), (table, first, length), _ = carried.state
    k, group = carried.tokens.k, carried.group
    (B, G, N), T, (PAGE, K) = table.shape, k.shape[1], keys.shape[1:]
    M, rows = cdiv(N, group), 0 if q is None else q.shape[2] // G * T
    walked = torch.empty((B * G, M, rows, K), dtype=torch.float32, device=table.device)
    own, given, BK = walked.new_empty((B * G, rows, group * PAGE + T)), k if q is None else q, head_block(K)
    arguments = carried.arguments()
    paged_carry_kernel[(B * G, group + 1)](
        p_q=given, p_table=table, p_first=first, p_length=length, p_norm=k_norm, p_walk=walked, p_own=own, T=T, N=N,
        M=M, window=window, stride_qb=given.stride(0), stride_qt=given.stride(1), stride_qh=given.stride(2), G=G,
        R=given.shape[2] // G, K=K, BK=BK, BT=1 if rows == 1 else BT, PAGE=PAGE, SCORES=q is not None, CARRY=carry,
        STAGES=3 if BK <= 64 else 1, num_warps=4 if BK <= 64 else 8, num_stages=1, **arguments,
    )  # fmt: skip
    kept = {name: arguments[name] for name in ("p_base", "p_count", *NOT_WALKED)}
    return {"p_walk": walked, "p_own": own, "M": M, **kept}
