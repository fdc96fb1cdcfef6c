r"""The block level of transitions that decay channels, too: ``R_t = Diag(exp(a_t)) (I - beta_t w_t w_t^T)``.

The UT transform of blocks.py, with every product between a later vector x_i and an earlier one y_j taken through the
decays between their tokens,

.. math:: (X \circ Y)_{ij} = \sum_c x_{ic}\, y_{jc} \exp(a_{j+1,c} + \cdots + a_{ic}).

Of q, k and w these are four, QK, QW, WK and WW. With x̂ the decay of x_i from the start of the block, y̌ that of y_j to
its end, D the decay of all of it,

    X = (I + diag(beta) tril(WW, -1))^-1 diag(beta)        Z = X tril(WK, -1)
    diag = tril(QK - tril(QW) Z)     qb = Q̂ - tril(QW) X Ŵ     kb = Ǩ - Z^T W̌     M = D - Ŵ^T X^T W̌.

Each pair of tokens meets between two groups of 1, 2, ..., 32 tokens, as in ``wall/portable/carry.py``: no exponent is
positive, so that gates of any strength are exact. Where no channel decays by more than 2^CALM over the largest groups
that are calm, 16 or 64 tokens, all pairs inside of them meet at once, in the middle of their group's decay. Products in
TF32 cut off 13 bits of their factors, towards 0: that is fine enough for bfloat16 alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.channel_gates import gate_spans, load_channel_gates, meet, sum_channel_gates
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import cdiv
from attnzoo.kernels.common.tile_loads import head_and_tile, load_tile
from attnzoo.kernels.levels.layout import BLOCK, Leaves, tree_block

from .inverse import mm, two_pieces, unit_lower_inverse
from .tree import new_tree

CALM = tl.constexpr(-12.0)


class DecayedKept(NamedTuple):
    """Outputs of decayed_level for its backward pass, float32.

    Attributes:
        pairs: [4, B, nC, H, C, C], QK (overwritten by diag), QW, WK and WW.
        v: [B, nC, H, C, C], inverses of the blocks' I + diag(beta) tril(WW, -1).
        x: [B, nC, H, C, C], X = V diag(beta).
    """

    pairs: Tensor
    v: Tensor
    x: Tensor


@triton.jit
def block_of(T, H: tl.constexpr, C: tl.constexpr):
    """Batch, head, first token, tokens and place among [B, nC, H] of a program's block."""
    n_c = tl.cdiv(T, C)
    i_bh, i_c = head_and_tile(n_c)
    i_b, i_h = (i_bh // H).to(tl.int64), (i_bh % H).to(tl.int64)
    return i_b, i_h, (i_c * C).to(tl.int64), T - i_c * C, (i_b * n_c + i_c) * H + i_h


@triton.jit
def calm_groups(b_a, C: tl.constexpr, BC: tl.constexpr):
    """Groups of 2^i tokens that are calm: i of 6 or 4, or 0 for none."""
    b_s = tl.sum(tl.reshape(b_a, [C // 16, 16, BC]), 1)
    whole = tl.min(tl.sum(b_a, 0), 0) >= CALM
    return tl.where(whole, 6, tl.where(tl.min(tl.min(b_s, 1), 0) >= CALM, 4, 0))


@triton.jit
def pairs_of(o_c, n, calm):
    """The pairs of step n, which starts at max(calm - 1, 0), their groups of 2^i, and whether they meet inside."""
    inside = (calm > 0) & (n < calm)
    i = tl.where(inside, calm, n)
    b_g = o_c >> i
    m_in = (b_g[:, None] == b_g[None, :]) & (o_c[:, None] > o_c[None, :])
    return (inside & m_in) | ((not inside) & meet(o_c, n)), i, inside


@triton.jit
def decays(b_a, o_c, i, inside, NP: tl.constexpr):
    """Log2 decays from the start of t's group to t, and from t to its end; inside of it from its middle. # [C, BC]"""
    m_to, m_after = gate_spans(o_c, i)
    b_e, b_f = sum_channel_gates(m_to, b_a, NP), sum_channel_gates(m_after, b_a, NP)
    b_half = tl.where(inside, 0.5 * (b_e + b_f), 0.0)
    return b_e - b_half, b_f - b_half, m_to, m_after


@triton.jit
def decayed_rows(p, b_e, o_c, o_n, stride, R, K: tl.constexpr, BK: tl.constexpr):
    """Rows of a block times their decay exp2(b_e). # [C, BC] float32"""
    return load_tile(p, o_c, o_n, stride, R, K, BK, True).to(tl.float32) * tl.exp2(b_e)


@triton.jit
def apart(a, b, acc, PREC: tl.constexpr):
    """acc + a b in a region of its own, after which the factors leave shared memory."""
    if tl.program_id(0) >= 0:  # always
        acc = tl.dot(a + 0.0, b + 0.0, acc, input_precision=PREC)
    return acc


@launched
@triton.jit(do_not_specialize=["T"])
def path_decayed_pairs_kernel(
    p_x, p_k, p_w, p_a, p_xk, p_xw, T, stride_xb, stride_xt, stride_xh, stride_kb, stride_kt, stride_kh,
    stride_wb, stride_wt, stride_wh, stride_ab, stride_at, stride_ah,
    H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, C: tl.constexpr, NP: tl.constexpr,
    PREC: tl.constexpr, OWN: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """XK and XW of x, which is q or w, [B, nC, H, C, C] float32.

    With OWN also those of a token and itself; with FINE, for x of length 1 or less, XW to 22 bits.
    """
    i_b, i_h, r, R, i_n = block_of(T, H, C)
    o_c = tl.arange(0, C)
    p_x += i_b * stride_xb + i_h * stride_xh + r * stride_xt
    p_k += i_b * stride_kb + i_h * stride_kh + r * stride_kt
    p_w += i_b * stride_wb + i_h * stride_wh + r * stride_wt
    p_a += i_b * stride_ab + i_h * stride_ah + r * stride_at
    b_xk, b_xw = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for c in range(0, BK, BC):
        o_n = c + tl.arange(0, BC)
        b_a = load_channel_gates(p_a, o_c, o_n, stride_at, R, K)
        b_x = load_tile(p_x, o_c, o_n, stride_xt, R, K, BK, True).to(tl.float32)
        b_k = load_tile(p_k, o_c, o_n, stride_kt, R, K, BK, True)
        b_w = load_tile(p_w, o_c, o_n, stride_wt, R, K, BK, True)
        if OWN:
            m_own = o_c[:, None] == o_c[None, :]
            b_xk += tl.where(m_own, tl.sum(b_x * b_k, 1)[:, None], 0.0)
            b_xw += tl.where(m_own, tl.sum(b_x * b_w, 1)[:, None], 0.0)
        calm = calm_groups(b_a, C, BC)
        for n in tl.range(tl.maximum(calm - 1, 0), 6, num_stages=1):  # groups of 1, 2, ..., 32 tokens
            m_i, i, inside = pairs_of(o_c, n, calm)
            b_e, b_f, _, _ = decays(b_a, o_c, i, inside, NP)
            b_y, b_e = b_x * tl.exp2(b_e), tl.exp2(b_f)
            b_xk += tl.where(m_i, tl.dot(b_y, tl.trans(b_k * b_e), input_precision=PREC), 0.0)
            b_e = tl.trans(b_w * b_e)
            if FINE:
                b_e = mm(b_y, b_e, tl.zeros([C, C], tl.float32), 2, 2, tl.float16)
            else:
                b_e = tl.dot(b_y, b_e, input_precision=PREC)
            b_xw += tl.where(m_i, b_e, 0.0)
    o_cc = i_n * (C * C) + o_c[:, None] * C + o_c[None, :]
    tl.store(p_xk + o_cc, b_xk)
    tl.store(p_xw + o_cc, b_xw)


@launched
@triton.jit(do_not_specialize=["T"])
def path_decayed_inverse_kernel(
    p_ww, p_beta, p_v, p_x, T, stride_bb, stride_bt, stride_bh, H: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """V = (I + diag(beta) WW)^-1 and X = V diag(beta)."""
    i_b, i_h, r, R, i_n = block_of(T, H, C)
    o_c = tl.arange(0, C)
    o_cc = i_n * (C * C) + o_c[:, None] * C + o_c[None, :]
    p_beta += i_b * stride_bb + i_h * stride_bh + (r + o_c) * stride_bt
    b_beta = tl.load(p_beta, mask=o_c < R, other=0.0).to(tl.float32)
    b_l = tl.load(p_ww + o_cc) * b_beta[:, None]
    b_v = unit_lower_inverse(b_l, p_x + i_n * (C * C), C, tl.float16)
    tl.store(p_v + o_cc, b_v)
    tl.store(p_x + o_cc, b_v * b_beta[None, :])


@launched
@triton.jit(do_not_specialize=["T", "B"])
def path_decayed_block_kernel(
    p_q, p_k, p_w, p_a, p_pairs, p_x, p_qb, p_kb, T, B, stride_qb, stride_qt, stride_qh,
    stride_kb, stride_kt, stride_kh, stride_wb, stride_wt, stride_wh, stride_ab, stride_at, stride_ah,
    H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, C: tl.constexpr, NP: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """diag in the place of QK; qb and kb, [B, T, H, K]."""
    i_b, i_h, r, R, i_n = block_of(T, H, C)
    o_c = tl.arange(0, C)
    p_q += i_b * stride_qb + i_h * stride_qh + r * stride_qt
    p_k += i_b * stride_kb + i_h * stride_kh + r * stride_kt
    p_w += i_b * stride_wb + i_h * stride_wh + r * stride_wt
    p_a += i_b * stride_ab + i_h * stride_ah + r * stride_at
    plane = B * tl.cdiv(T, C).to(tl.int64) * (H * C * C)
    o_cc = i_n * (C * C) + o_c[:, None] * C + o_c[None, :]
    p_pairs += o_cc
    b_x = tl.load(p_x + o_cc)
    b_qw = tl.load(p_pairs + plane)
    b_z = tl.dot(b_x, tl.load(p_pairs + 2 * plane), input_precision=PREC)
    tl.store(p_pairs, tl.load(p_pairs) - tl.dot(b_qw, b_z, input_precision=PREC))
    b_p = tl.dot(b_qw, b_x, input_precision=PREC)
    b_z = tl.trans(b_z)
    m_to, m_after = gate_spans(o_c, 6)
    for c in range(0, BK, BC):
        o_n = c + tl.arange(0, BC)
        b_a = load_channel_gates(p_a, o_c, o_n, stride_at, R, K)
        o_x = ((i_b * T + r) * H + i_h) * K + o_c[:, None] * (H * K) + o_n[None, :]
        m_x = (o_c < R)[:, None] & (o_n < K)[None, :]
        b_e = sum_channel_gates(m_to, b_a, NP)
        b_w = decayed_rows(p_w, b_e, o_c, o_n, stride_wt, R, K, BK)
        b_y = decayed_rows(p_q, b_e, o_c, o_n, stride_qt, R, K, BK) - tl.dot(b_p, b_w, input_precision=PREC)
        tl.store(p_qb + o_x, b_y.to(p_qb.dtype.element_ty), mask=m_x)
        b_e = sum_channel_gates(m_after, b_a, NP)
        b_w = decayed_rows(p_w, b_e, o_c, o_n, stride_wt, R, K, BK)
        b_y = decayed_rows(p_k, b_e, o_c, o_n, stride_kt, R, K, BK) - tl.dot(b_z, b_w, input_precision=PREC)
        tl.store(p_kb + o_x, b_y.to(p_kb.dtype.element_ty), mask=m_x)


@launched
@triton.jit(do_not_specialize=["T", "B", "N"])
def path_decayed_product_kernel(
    p_w, p_a, p_x, p_m, T, B, N, stride_wb, stride_wt, stride_wh, stride_ab, stride_at, stride_ah,
    H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, C: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """M, the first nC of N nodes [2, B, N, H, K, K], in two pieces."""
    i_b, i_h, r, R, i_n = block_of(T, H, C)
    o_c = tl.arange(0, C)
    p_w += i_b * stride_wb + i_h * stride_wh + r * stride_wt
    p_a += i_b * stride_ab + i_h * stride_ah + r * stride_at
    p_m += ((i_b * N + r // C) * H + i_h) * (K * K)
    plane = B * N.to(tl.int64) * (H * K * K)
    m_to, m_after = gate_spans(o_c, 6)
    p_x += i_n * (C * C) + o_c[:, None] * C + o_c[None, :]
    for i in range(0, BK, BC):
        o_r = i + tl.arange(0, BC)
        b_a = load_channel_gates(p_a, o_c, o_r, stride_at, R, K)
        b_w = decayed_rows(p_w, sum_channel_gates(m_to, b_a, NP), o_c, o_r, stride_wt, R, K, BK)
        b_y = tl.trans(tl.dot(tl.load(p_x), b_w, input_precision="tf32x3"))  # [BC, C]
        b_d = tl.exp2(tl.sum(b_a, 0))
        for c in range(0, BK, BC):
            o_n = c + tl.arange(0, BC)
            b_e = sum_channel_gates(m_after, load_channel_gates(p_a, o_c, o_n, stride_at, R, K), NP)
            b_w = decayed_rows(p_w, b_e, o_c, o_n, stride_wt, R, K, BK)
            b_m = tl.where(o_r[:, None] == o_n[None, :], b_d[:, None], 0.0)
            m_hi, m_lo = two_pieces(b_m - tl.dot(b_y, b_w, input_precision="tf32x3"), p_m.dtype.element_ty)
            p_t, m_k = p_m + o_r[:, None] * K + o_n[None, :], (o_r < K)[:, None] & (o_n < K)[None, :]
            tl.store(p_t, m_hi, mask=m_k)
            tl.store(p_t + plane, m_lo, mask=m_k)


def decayed_options(q: Tensor) -> dict[str, Any]:
    """Compile-time options of all kernels of this level: heads, tiles, pieces of gates, precision of products."""
    (H, K), exact = q.shape[2:], q.dtype != torch.bfloat16
    return {
        "H": H, "K": K, "BK": tree_block(K), "BC": 64, "C": BLOCK, "NP": 3 if exact else 2,
        "PREC": "tf32x3" if exact else "tf32", "num_warps": 8, "num_stages": 1,
    }  # fmt: skip


def decayed_level(q: Tensor, k: Tensor, w: Tensor, beta: Tensor, log_diag: Tensor) -> tuple[Leaves, DecayedKept]:
    """The closed form of the blocks, with only the leaves of its tree m filled, as ``blocks.block_level``.

    Args:
        q, k, w, log_diag: [B, T, H, K], views with contiguous last dims; w in q's dtype or float32.
        beta: [B, T, H], any floating dtype.
    """
    B, T, H, K = q.shape
    n, given = cdiv(T, BLOCK), decayed_options(q)
    pairs = q.new_empty((4, B, n, H, BLOCK, BLOCK), dtype=torch.float32)
    kept = DecayedKept(pairs, torch.empty_like(pairs[0]), torch.empty_like(pairs[0]))
    block = Leaves(pairs[0], q.new_empty((B, T, H, K)), q.new_empty((B, T, H, K)), new_tree(q, n, H))
    grid, gates = (n * B * H,), (*w.stride()[:3], *log_diag.stride()[:3])
    strides = (*q.stride()[:3], *k.stride()[:3], *gates)
    plain = {name: x for name, x in given.items() if name != "PREC"}
    path_decayed_pairs_kernel[grid](q, k, w, log_diag, pairs[0], pairs[1], T, *strides, **given, OWN=True, FINE=False)
    fine = q.dtype == torch.bfloat16  # errors of X would add up along the sequence
    path_decayed_pairs_kernel[grid](
        w, k, w, log_diag, pairs[2], pairs[3], T, *w.stride()[:3], *strides[3:], **given, OWN=False, FINE=fine
    )
    path_decayed_inverse_kernel[grid](
        pairs[3], beta, kept.v, kept.x, T, *beta.stride(), H=H, C=BLOCK, num_warps=4, num_stages=1
    )
    path_decayed_product_kernel[grid](w, log_diag, kept.x, block.m, T, B, block.m.shape[2], *gates, **plain)
    path_decayed_block_kernel[grid](q, k, w, log_diag, pairs, kept.x, block.q, block.k, T, B, *strides, **given)
    return block, kept
