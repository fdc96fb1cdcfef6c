"""PaTH's steps over pages: queries walk from the newest page to the oldest, and the page that is not whole is carried.

A page holds its keys as its last token left them, and the transposed product of its factors. A row goes back over the
new tokens one by one, which gives its scores with their keys, and meets the keys of the newest page. Times the product
of that page it meets those of the page before, and so on; or, where pages have products to the end of their group, it
goes on from group to group, and all pages of a group have their rows at once. ``attention.py`` then reads each page
against its own rows. In the end the keys of the page that is not whole, and its product, are carried over the new
tokens in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.launching import cdiv, head_block
from attnzoo.kernels.common.tile_loads import load_tile
from attnzoo.kernels.decode.portable.rows import row_queries


@dataclass(frozen=True, eq=False)
class Carried:
    """The new tokens of a step and the pages' products; see ``decode/carried.py``.

    Args:
        k: [B, T, G, K].
        w: [B, T, G, n, K], of n factors per token.
        beta: [B, T, G, n].
        factor: [P, K, K].
        count: [B] or None.
        group: pages whose products go to the end of their group, where that is whole; 0: each page's own.
    """

    k: Tensor
    w: Tensor
    beta: Tensor
    factor: Tensor
    count: Tensor | None
    group: int

    def tokens(self) -> dict[str, Any]:
        """Arguments of the kernels that read the new tokens."""
        k, w, beta, count = self.k, self.w, self.beta, self.count
        named = {"kb": k, "kt": k, "kh": k, "wb": w, "wt": w, "wh": w, "wf": w, "eb": beta, "et": beta, "eh": beta}
        strides = {f"stride_{name}": x.stride("bthf".index(name[1])) for name, x in (named | {"ef": beta}).items()}
        return {
            "p_k": k, "p_w": w, "p_beta": beta, "p_count": beta if count is None else count,
            "HAS_COUNT": count is not None, "FACTORS": w.shape[3], **strides,
        }  # fmt: skip


@triton.jit
def new_tokens(p_count, i_b, T, HAS_COUNT: tl.constexpr):
    """How many of the T new tokens sequence i_b gets: its last ones."""
    n = T
    if HAS_COUNT:
        n = tl.minimum(tl.load(p_count + i_b).to(tl.int32), T)
    return n


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
def _product(p_factor, i_page, o_k, K: tl.constexpr, BK: tl.constexpr):
    """The product that stands beside a page. # [BK, BK]"""
    p_f = p_factor + tl.maximum(i_page, 0).to(tl.int64) * (K * K)
    return load_tile(p_f, tl.arange(0, BK), o_k, K, K, K, BK, K < BK)


@triton.jit
def whole_groups(L, PAGE: tl.constexpr, GROUP: tl.constexpr):
    """Pages of all groups that L tokens fill."""
    return L // (PAGE * GROUP) * GROUP


@triton.jit
def walked_queries(p_walk, i_bg, n, o_r, o_k, m_r, T, N, R: tl.constexpr, K: tl.constexpr):
    """Rows as the keys of page n of one key head meet them. # [BT, BK]"""
    p_rows = p_walk + ((i_bg * N + n) * (R * T) + o_r)[:, None] * K + o_k[None, :]
    return tl.load(p_rows, mask=m_r[:, None] & (o_k[None, :] < K), other=0.0)


@triton.jit
def with_own_scores(b_s, p_own, i_bg, o_r, m_r, o_behind, m_new, T, R: tl.constexpr):
    """The scores b_s, those of new keys (m_new, ``o_behind`` before the end) as the walk has found them. # [BT, BS]"""
    p_scores = p_own + (i_bg * (R * T) + o_r)[:, None] * T + (T + o_behind)[None, :]
    m_own = m_new & (o_behind < 0)
    return tl.where(m_new[None, :], tl.load(p_scores, mask=m_r[:, None] & m_own[None, :], other=0.0), b_s)


@triton.jit(do_not_specialize=["T", "N"])
def paged_walk_kernel(
    p_q, p_k, p_w, p_beta, p_count, p_factor, p_table, p_begin, p_length, p_walk, p_own, T, N,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_wb, stride_wt, stride_wh, stride_wf,
    stride_eb, stride_et, stride_eh, stride_ef,
    G: tl.constexpr, R: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr, PAGE: tl.constexpr,
    HAS_COUNT: tl.constexpr, FACTORS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Rows as each page's keys meet them [B * G, N, R * T, K], and their scores with the new keys [B * G, R * T, T].

    With groups of pages, of those that are whole only as the last page's keys meet them.
    """
    i_bg = tl.program_id(0).to(tl.int64)
    i_b, i_g = i_bg // G, i_bg % G
    o_r, o_k = tl.program_id(1) * BT + tl.arange(0, BT), tl.arange(0, BK)
    m_r = o_r < T * R
    o_t, o_rep = o_r % T, tl.minimum(o_r // T, R - 1)
    n_new = new_tokens(p_count, i_b, T, HAS_COUNT)
    b_q = row_queries(p_q, i_b, o_t, i_g * R + o_rep, o_k, m_r, stride_qb, stride_qt, stride_qh, K)
    b_q = b_q.to(tl.float32)  # [BT, BK]
    p_rows = p_own + (i_bg * (R * T) + o_r) * T
    for i in range(n_new):
        t = T - 1 - i
        b_k = _vector(p_k + i_b * stride_kb + t * stride_kt + i_g * stride_kh, o_k, K)
        m_t = o_t >= t
        tl.store(p_rows + t, tl.sum(b_q * b_k[None, :], 1), mask=m_r & m_t)
        for f in range(FACTORS):
            b_w, b_beta = _factor(p_w, p_beta, o_k, i_b, i_g, t, FACTORS - 1 - f, stride_wb, stride_wt, stride_wh,
                                  stride_wf, stride_eb, stride_et, stride_eh, stride_ef, K)  # fmt: skip
            b_x = tl.where(m_t, b_beta * tl.sum(b_q * b_w[None, :], 1), 0.0)
            b_q -= b_x[:, None] * b_w[None, :]
    begin, L = tl.load(p_begin + i_bg), tl.load(p_length + i_b) - n_new
    n = tl.cdiv(L, PAGE) - 1  # the last page that holds keys of earlier tokens
    p_t, p_to = p_table + i_bg * N, p_walk + (i_bg * N * (R * T) + o_r)[:, None] * K + o_k[None, :]
    m_q = m_r[:, None] & (o_k[None, :] < K)
    tl.store(p_to + n.to(tl.int64) * (R * T * K), b_q, mask=m_q & (n >= begin))
    n_stop, n_groups = begin, 0  # the page that is reached page by page, and the groups from there on
    if GROUP > 0:
        n_stop = tl.maximum(whole_groups(L, PAGE, GROUP) - 1, begin)
        n_groups = tl.where(whole_groups(L, PAGE, GROUP) > 0, tl.maximum(n_stop - begin, 0) // GROUP, 0)
    i_page = tl.load(p_t + n, mask=n > n_stop, other=0)
    for i in range(1, n - n_stop + 1):
        i_next = tl.load(p_t + n - i, mask=n - i > n_stop, other=0)  # so that loads of products need not wait for it
        b_q = tl.dot(b_q, _product(p_factor, i_page, o_k, K, BK), input_precision="tf32x3")
        tl.store(p_to + (n - i).to(tl.int64) * (R * T * K), b_q, mask=m_q)
        i_page = i_next
    if GROUP > 0:
        for i in range(1, n_groups + 1):
            i_page = tl.load(p_t + n_stop - i * GROUP + 1)
            b_q = tl.dot(b_q, _product(p_factor, i_page, o_k, K, BK), input_precision="tf32x3")
            tl.store(p_to + (n_stop - i * GROUP).to(tl.int64) * (R * T * K), b_q, mask=m_q)


@triton.jit(do_not_specialize=["T", "N"])
def paged_spread_kernel(
    p_factor, p_table, p_begin, p_length, p_count, p_walk, T, N,
    G: tl.constexpr, R: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr, PAGE: tl.constexpr,
    HAS_COUNT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Rows as the keys of all pages of a whole group meet them, from those of its last page."""
    i_bg, last = tl.program_id(0).to(tl.int64), (tl.program_id(1) + 1) * GROUP - 1
    o_r, o_k = tl.program_id(2) * BT + tl.arange(0, BT), tl.arange(0, BK)
    L = tl.load(p_length + i_bg // G) - new_tokens(p_count, i_bg // G, T, HAS_COUNT)
    first = tl.maximum(tl.load(p_begin + i_bg), last - GROUP + 1)
    first = tl.where(last < whole_groups(L, PAGE, GROUP), first, last)
    p_to = p_walk + (i_bg * N * (R * T) + o_r)[:, None] * K + o_k[None, :]
    m_q = (o_r < R * T)[:, None] & (o_k[None, :] < K)
    b_q = tl.load(p_to + last.to(tl.int64) * (R * T * K), mask=m_q & (first < last), other=0.0)  # [BT, BK]
    i_page = tl.load(p_table + i_bg * N + first + 1, mask=first < last, other=0)
    for n in range(first, last):
        i_next = tl.load(p_table + i_bg * N + n + 2, mask=n + 2 <= last, other=0)
        b_n = tl.dot(b_q, _product(p_factor, i_page, o_k, K, BK), input_precision="tf32x3")
        tl.store(p_to + tl.cast(n, tl.int64) * (R * T * K), b_n, mask=m_q)
        i_page = i_next


@triton.jit(do_not_specialize=["T", "N"])
def paged_carry_kernel(
    p_k, p_w, p_beta, p_count, p_keys, p_factor, p_table, p_length, p_norm, p_near_k, p_near_w, p_near_beta, T, N,
    stride_kb, stride_kt, stride_kh, stride_wb, stride_wt, stride_wh, stride_wf, stride_eb, stride_et, stride_eh,
    stride_ef,
    G: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, PAGE: tl.constexpr, HAS_COUNT: tl.constexpr,
    FACTORS: tl.constexpr,
):  # fmt: skip
    """The page that is not whole over the new tokens, one after the other.

    Two programs of each key head: one carries the keys ``k <- R_t k``, the other the product ``F <- R_t F``.
    """
    i_bg = tl.program_id(0).to(tl.int64)
    i_b, i_g = i_bg // G, i_bg % G
    o_x, o_k = tl.arange(0, PAGE), tl.arange(0, BK)
    n_new = new_tokens(p_count, i_b, T, HAS_COUNT)
    L = tl.load(p_length + i_b) - n_new
    p_t = p_table + i_bg * N
    i_page = tl.load(p_t + L // PAGE, mask=(n_new > 0) & (L % PAGE > 0), other=-1).to(tl.int64)
    if tl.program_id(1) == 0:
        o_in, m_in = o_x[:, None] * K + o_k[None, :], (o_k < K)[None, :]
        m_old = m_in & (o_x < L % PAGE)[:, None] & (i_page >= 0)
        b_x = tl.load(p_keys + i_page * (PAGE * K) + o_in, mask=m_old, other=0.0)  # [PAGE, BK]
        for t in range(T - n_new, T):
            pos = L + t - (T - n_new)
            n, i_in = pos // PAGE, pos % PAGE
            b_k = _vector(p_k + i_b * stride_kb + t * stride_kt + i_g * stride_kh, o_k, K)
            o_near = i_bg * (2 * PAGE) + pos % (2 * PAGE)
            for f in range(FACTORS):
                b_w, b_beta = _factor(p_w, p_beta, o_k, i_b, i_g, t, f, stride_wb, stride_wt, stride_wh, stride_wf,
                                      stride_eb, stride_et, stride_eh, stride_ef, K)  # fmt: skip
                b_x -= (b_beta * tl.sum(b_x * b_w[None, :], 1))[:, None] * b_w[None, :]
                tl.store(p_near_w + (o_near * FACTORS + f) * K + o_k, b_w, mask=o_k < K)
                tl.store(p_near_beta + o_near * FACTORS + f, b_beta)
            b_x = tl.where((o_x == i_in)[:, None], b_k[None, :], tl.where((o_x < i_in)[:, None], b_x, 0.0))
            tl.store(p_near_k + o_near * K + o_k, b_k, mask=o_k < K)
            if (i_in == PAGE - 1) | (t == T - 1):
                i_page = tl.load(p_t + n).to(tl.int64)
                m_now = m_in & (o_x <= i_in)[:, None] & (i_page >= 0)
                tl.store(p_keys + i_page * (PAGE * K) + o_in, b_x, mask=m_now)
                b_long = tl.sqrt(tl.max(tl.sum(b_x * b_x, 1), 0)) * 1.00001  # never less than the longest key
                tl.store(p_norm + i_bg * N + n, b_long, mask=i_in == PAGE - 1)
    else:
        o_f = o_k[:, None] * K + o_k[None, :]
        m_f, b_one = (o_k < K)[:, None] & (o_k < K)[None, :], (o_k[:, None] == o_k[None, :]).to(tl.float32)
        b_f = tl.load(p_factor + i_page * (K * K) + o_f, mask=m_f & (i_page >= 0), other=0.0)  # [BK, BK]
        for t in range(T - n_new, T):
            pos = L + t - (T - n_new)
            n, i_in = pos // PAGE, pos % PAGE
            b_f = tl.where(i_in == 0, b_one, b_f)
            for f in range(FACTORS):
                b_w, b_beta = _factor(p_w, p_beta, o_k, i_b, i_g, t, f, stride_wb, stride_wt, stride_wh, stride_wf,
                                      stride_eb, stride_et, stride_eh, stride_ef, K)  # fmt: skip
                b_f -= (b_beta * b_w)[:, None] * tl.sum(b_f * b_w[:, None], 0)[None, :]
            if (i_in == PAGE - 1) | (t == T - 1):
                i_page = tl.load(p_t + n).to(tl.int64)
                tl.store(p_factor + i_page * (K * K) + o_f, b_f, mask=m_f & (i_page >= 0))


def walk(pages: dict[str, Any], begin: Tensor, carried: Carried) -> tuple[Tensor, Tensor, Tensor | None]:
    """Queries by page, scores of the new keys, and the count, for ``paged_split_kernel``; ``pages``: its arguments."""
    BG, (N, T, R, K) = begin.numel(), (pages[name] for name in ("N", "T", "R", "K"))
    walked = torch.empty((BG, N, R * T, K), dtype=torch.float32, device=begin.device)
    own = walked.new_empty((BG, R * T, T))
    both = {name: pages[name] for name in ("p_table", "p_length", "T", "N", "G", "R", "K", "BK", "BT", "PAGE")}
    both |= {"p_factor": carried.factor, "p_begin": begin, "p_walk": walked, "GROUP": carried.group}
    both |= {"num_warps": 4, "num_stages": 3} if pages["BK"] <= 64 else {"num_warps": 8, "num_stages": 1}
    new, tiles = carried.tokens(), cdiv(R * T, pages["BT"])
    queries = {name: pages[name] for name in ("p_q", "stride_qb", "stride_qt", "stride_qh")}
    paged_walk_kernel[(BG, tiles)](p_own=own, **queries, **new, **both)
    if carried.group:
        count = {name: new[name] for name in ("p_count", "HAS_COUNT")}
        paged_spread_kernel[(BG, N // carried.group, tiles)](**count, **both)
    return walked, own, carried.count


def carry(
    carried: Carried, keys: Tensor, table: Tensor, length: Tensor, k_norm: Tensor, near: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Launch ``paged_carry_kernel``; the last keys as they came, their w and beta are noted in ``near`` too."""
    (B, G, N), (_, PAGE, K), BK = table.shape, keys.shape, head_block(keys.shape[2])
    paged_carry_kernel[(B * G, 2)](
        p_keys=keys, p_factor=carried.factor, p_table=table, p_length=length, p_norm=k_norm, p_near_k=near[0],
        p_near_w=near[1], p_near_beta=near[2], T=carried.k.shape[1], N=N, G=G, K=K, BK=BK, PAGE=PAGE,
        num_warps=4 if BK <= 64 else 8, **carried.tokens(),
    )  # fmt: skip
