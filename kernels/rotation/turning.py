"""The kernels: phases as float64 sums in blocks of tokens, the vectors that turn by them, and the angles' gradient.

A block is BT tokens. Sums over blocks, ``[rows, blocks + 1, P]`` float64, are exclusive once scanned: entry n is what
stands before block n, and the last is the sum of all. A row is a sequence and head that has angles of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import cdiv, head_block, side_by_side

TL_HALF_PI = tl.constexpr(math.pi / 2)
TL_TURNS = tl.constexpr(2 / math.pi)


@launched
@triton.jit(do_not_specialize=["T", "NB"])
def angle_sums_kernel(
    p_angle, p_sums, T, NB, HA: tl.constexpr, P: tl.constexpr, BT: tl.constexpr, BP: tl.constexpr
):  # fmt: skip
    """The sum of the angles of one block."""
    i_row, i_n = tl.program_id(0) // NB, tl.program_id(0) % NB
    i_b, i_h = (i_row // HA).to(tl.int64), i_row % HA
    o_t, o_p = i_n * BT + tl.arange(0, BT), tl.arange(0, BP)
    m_tp = (o_t < T)[:, None] & (o_p < P)[None, :]
    o_angle = ((i_b * T + o_t) * HA + i_h)[:, None] * P + o_p[None, :]
    b_angle = tl.load(p_angle + o_angle, mask=m_tp, other=0.0).to(tl.float64)  # [BT, BP]
    p_sums += (i_row.to(tl.int64) * (NB + 1) + i_n + 1) * P
    tl.store(p_sums + o_p, tl.sum(b_angle, 0), mask=o_p < P)


@launched
@triton.jit(do_not_specialize=["NB"])
def block_scan_kernel(p_sums, NB, P: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr):
    """The sums of the blocks of one row, added up in place."""
    o_n, o_p = tl.arange(0, BN), tl.arange(0, BP)
    p_sums += tl.program_id(0).to(tl.int64) * (NB + 1) * P
    b_sum = tl.zeros([BP], tl.float64)
    tl.store(p_sums + o_p, b_sum, mask=o_p < P)
    for i in range(1, NB + 1, BN):
        o = (i + o_n)[:, None] * P + o_p[None, :]
        m = (i + o_n <= NB)[:, None] & (o_p < P)[None, :]
        b_block = tl.load(p_sums + o, mask=m, other=0.0)  # [BN, BP]
        tl.store(p_sums + o, b_sum[None, :] + tl.cumsum(b_block, 0), mask=m)
        b_sum += tl.sum(b_block, 0)


@triton.jit
def _cos_sin(b_phase):
    """Cosine and sine in float32 of a float64 phase: what is left of it beside quarters of a turn has 24 digits."""
    b_quarter = tl.floor(b_phase * TL_TURNS + 0.5)
    b_x = (b_phase - b_quarter * TL_HALF_PI).to(tl.float32)  # within pi / 4; fitted there to less than its rounding
    b_u = b_x * b_x
    b_s = b_x + b_x * b_u * (-0.16666664667 + b_u * (0.00833274888 + b_u * -0.000195879837))
    b_c = 1.0 - (0.5 * b_u - b_u * b_u * (0.04166666466 + b_u * (-0.00138883035 + b_u * 2.45480153e-05)))
    b_i = (b_quarter.to(tl.int64) & 3).to(tl.int32)
    m_odd = (b_i & 1) != 0
    b_cos, b_sin = tl.where(m_odd, b_s, b_c), tl.where(m_odd, b_c, b_s)
    return tl.where((b_i == 1) | (b_i == 2), -b_cos, b_cos), tl.where(b_i > 1, -b_sin, b_sin)


@triton.jit
def _pairs(p_x, o_x, m_x, BT: tl.constexpr, BP: tl.constexpr):
    """The two channels of each pair. # [BT, BP] float32 each"""
    b_x = tl.load(p_x + o_x, mask=m_x, other=0.0).to(tl.float32)
    return tl.split(tl.reshape(b_x, [BT, BP, 2]))


@triton.jit
def _turn(
    p_x, p_y, i_b, o_t, o_hc, T, m_x, b_cos, b_sin, stride_b, stride_t, WIDTH: tl.constexpr, BT: tl.constexpr,
    BP: tl.constexpr,
):  # fmt: skip
    """Tokens of one head of x, whose WIDTH numbers of a token lie side by side."""
    b_a, b_b = _pairs(p_x, i_b * stride_b + o_t.to(tl.int64)[:, None] * stride_t + o_hc[None, :], m_x, BT, BP)
    b_y = tl.reshape(tl.join(b_a * b_cos - b_b * b_sin, b_a * b_sin + b_b * b_cos), [BT, 2 * BP])
    tl.store(p_y + (i_b * T + o_t)[:, None] * WIDTH + o_hc[None, :], b_y.to(p_y.dtype.element_ty), mask=m_x)


@launched
@triton.jit(do_not_specialize=["T", "NB"])
def turn_kernel(
    p_angle, p_sums, p_q, p_k, p_w, p_yq, p_yk, p_yw, T, NB, BA,
    stride_qb, stride_qt, stride_kb, stride_kt, stride_wb, stride_wt,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HW: tl.constexpr, HA: tl.constexpr, P: tl.constexpr,
    FIXED: tl.constexpr, BACK: tl.constexpr, BT: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """A block of tokens of one head of each vector turns by its phases, or BACK by them.

    The vectors have HQ, HK and HW heads, H at most. BA, HA: batch and heads of the angles; FIXED ones [P] are each
    token's alike.
    """
    i = tl.program_id(0)
    i_b, i_n, i_h = (i // (H * NB)).to(tl.int64), i // H % NB, i % H
    i_ab, i_ah = i_b % BA, i_h % HA
    o_t, o_p, o_c = i_n * BT + tl.arange(0, BT), tl.arange(0, BP), tl.arange(0, 2 * BP)
    if FIXED:
        b_angle = tl.load(p_angle + o_p, mask=o_p < P, other=0.0).to(tl.float64)
        b_phase = (o_t + 1).to(tl.float64)[:, None] * b_angle[None, :]  # [BT, BP]
    else:
        m_tp = (o_t < T)[:, None] & (o_p < P)[None, :]
        o_angle = ((i_ab * T + o_t) * HA + i_ah)[:, None] * P + o_p[None, :]
        b_angle = tl.load(p_angle + o_angle, mask=m_tp, other=0.0).to(tl.float64)
        p_sums += ((i_ab * HA + i_ah) * (NB + 1) + i_n) * P
        b_phase = tl.load(p_sums + o_p, mask=o_p < P, other=0.0)[None, :] + tl.cumsum(b_angle, 0)
    b_cos, b_sin = _cos_sin(b_phase)
    if BACK:
        b_sin = -b_sin
    m_x = (o_t < T)[:, None] & (o_c < 2 * P)[None, :]
    o_hc = i_h * 2 * P + o_c
    if i_h < HQ:
        _turn(p_q, p_yq, i_b, o_t, o_hc, T, m_x, b_cos, b_sin, stride_qb, stride_qt, HQ * 2 * P, BT, BP)
    if i_h < HK:
        _turn(p_k, p_yk, i_b, o_t, o_hc, T, m_x, b_cos, b_sin, stride_kb, stride_kt, HK * 2 * P, BT, BP)
    if i_h < HW:
        _turn(p_w, p_yw, i_b, o_t, o_hc, T, m_x, b_cos, b_sin, stride_wb, stride_wt, HW * 2 * P, BT, BP)


@triton.jit
def _turning(p_y, p_dy, o_x, m_x, b_turn, b_noise, BT: tl.constexpr, BP: tl.constexpr):
    """The gradient of a vector's own phase, and the variance of the rounding error in it."""
    b_a, b_b = _pairs(p_y, o_x, m_x, BT, BP)
    b_da, b_db = _pairs(p_dy, o_x, m_x, BT, BP)
    b_turn += (b_db * b_a - b_da * b_b).to(tl.float64)
    b_noise += ((b_da * b_da + b_db * b_db) * (b_a * b_a + b_b * b_b)).to(tl.float64)
    return b_turn, b_noise


@launched
@triton.jit(do_not_specialize=["T", "NB", "B", "ROWS"])
def turning_kernel(
    p_yq, p_yk, p_yw, p_dq, p_dk, p_dw, p_sums, p_dangle, T, NB, B, BA, ROWS,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HW: tl.constexpr, HA: tl.constexpr, P: tl.constexpr,
    BALANCED: tl.constexpr, SUMS: tl.constexpr, BT: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """The gradient of a block's phases: its sum (SUMS), or with the scanned sums the gradient of the angles.

    The latter is the sum over all later tokens. BALANCED: it is 0 for all tokens together; what it is instead goes by
    the shares of ``noise``, whose sums follow those of the gradient, ROWS later.
    """
    i = tl.program_id(0)
    i_n, i_ah, i_ab = i // HA % NB, i % HA, (i // (HA * NB)).to(tl.int64)
    o_t, o_p, o_c = i_n * BT + tl.arange(0, BT), tl.arange(0, BP), tl.arange(0, 2 * BP)
    m_x = (o_t < T)[:, None] & (o_c < 2 * P)[None, :]
    b_turn, b_noise = tl.zeros([BT, BP], tl.float64), tl.zeros([BT, BP], tl.float64)
    for j in range((B // BA) * (H // HA)):  # all that turn by these angles
        i_h = i_ah + HA * (j % (H // HA))
        o_bt = ((i_ab + BA * (j // (H // HA))) * T + o_t)[:, None]
        if i_h < HQ:
            o_q = (o_bt * HQ + i_h) * (2 * P) + o_c[None, :]
            b_turn, b_noise = _turning(p_yq, p_dq, o_q, m_x, b_turn, b_noise, BT, BP)
        if i_h < HK:
            o_k = (o_bt * HK + i_h) * (2 * P) + o_c[None, :]
            b_turn, b_noise = _turning(p_yk, p_dk, o_k, m_x, b_turn, b_noise, BT, BP)
        if i_h < HW:
            o_w = (o_bt * HW + i_h) * (2 * P) + o_c[None, :]
            b_turn, b_noise = _turning(p_yw, p_dw, o_w, m_x, b_turn, b_noise, BT, BP)
    m_p = o_p < P
    p_sums += (i_ab * HA + i_ah) * (NB + 1) * P + o_p
    if SUMS:
        tl.store(p_sums + (i_n + 1) * P, tl.sum(b_turn, 0), mask=m_p)
        if BALANCED:
            tl.store(p_sums + (ROWS.to(tl.int64) * (NB + 1) + i_n + 1) * P, tl.sum(b_noise, 0), mask=m_p)
    else:
        b_all = tl.load(p_sums + NB * P, mask=m_p, other=0.0)  # [BP]
        b_later = b_all - tl.load(p_sums + (i_n + 1) * P, mask=m_p, other=0.0)
        if BALANCED:
            p_sums += ROWS.to(tl.int64) * (NB + 1) * P
            b_noises = tl.load(p_sums + NB * P, mask=m_p, other=0.0)
            b_share = b_all / tl.maximum(b_noises, 1e-300)
            b_later -= (b_noises - tl.load(p_sums + (i_n + 1) * P, mask=m_p, other=0.0)) * b_share
            b_turn -= b_noise * b_share[None, :]
        b_dangle = b_later[None, :] + tl.cumsum(b_turn, 0, reverse=True)
        o_angle = ((i_ab * T + o_t) * HA + i_ah)[:, None] * P + o_p[None, :]
        tl.store(p_dangle + o_angle, b_dangle.to(p_dangle.dtype.element_ty), mask=(o_t < T)[:, None] & m_p[None, :])


def _tile(K: int) -> tuple[int, int, int]:
    """Pairs, tokens of a block, and pairs of a tile."""
    BK = head_block(K)
    return K // 2, max(16, 4096 // BK), BK // 2


def blocks(T: int, K: int) -> int:
    """The number of blocks of T tokens of K channels."""
    return cdiv(T, _tile(K)[1])


def phase_sums(angle: Tensor) -> Tensor:
    """The phases before each block of tokens, and the last token's, ``[BA HA, blocks + 1, P]`` float64."""
    BA, T, HA, P = angle.shape
    _, BT, BP = _tile(2 * P)
    NB, rows = cdiv(T, BT), BA * HA
    sums = angle.new_empty(rows, NB + 1, P, dtype=torch.float64)
    angle_sums_kernel[(rows * NB,)](angle, sums, T, NB, HA, P, BT, BP, num_warps=4)
    block_scan_kernel[(rows,)](sums, NB, P, BP, 2048 // BP, num_warps=4)
    return sums


def turn_all(
    angle: Tensor, sums: Tensor | None, xs: Sequence[Tensor], dtypes: Sequence[torch.dtype], back: bool
) -> list[Tensor]:
    """Each of two or three vectors ``[B, T, heads, K]`` turned, in ``dtypes``; fixed angles have no ``sums``."""
    B, T, _, K = xs[0].shape
    xs = [side_by_side(x) for x in xs]
    strides = [n for x in _three(xs) for n in x.stride()[:2]]
    P, BT, BP = _tile(K)
    ys = [torch.empty(x.shape, dtype=dtype, device=x.device) for x, dtype in zip(xs, dtypes, strict=True)]
    heads = [x.shape[2] for x in xs] + [0] * (3 - len(xs))
    NB, H = cdiv(T, BT), max(heads)
    BA, HA = (1, 1) if angle.ndim == 1 else (angle.shape[0], angle.shape[2])
    sums = angle.new_empty(0, dtype=torch.float64) if sums is None else sums
    turn_kernel[(B * NB * H,)](
        angle, sums, *_three(xs), *_three(ys), T, NB, BA, *strides, H, *heads, HA, P, angle.ndim == 1, back, BT, BP,
        num_warps=4,
    )  # fmt: skip
    return ys


def angle_gradient(angle: Tensor, ys: Sequence[Tensor], dys: Sequence[Tensor], balanced: bool) -> Tensor:
    """The gradient of the angles, in their shape and dtype, from vectors as they have turned and their gradients."""
    BA, T, HA, P = angle.shape
    _, BT, BP = _tile(2 * P)
    NB, rows, B = cdiv(T, BT), BA * HA, ys[0].shape[0]
    heads = [y.shape[2] for y in ys] + [0] * (3 - len(ys))
    sums = angle.new_empty((1 + balanced) * rows, NB + 1, P, dtype=torch.float64)
    dangle = torch.empty_like(angle, memory_format=torch.contiguous_format)
    given = (*_three(ys), *_three(dys), sums, dangle, T, NB, B, BA, rows, max(heads), *heads, HA, P, balanced)
    num_warps = 8 if ys[0].dtype == torch.float32 else 4  # so that the registers hold a tile
    turning_kernel[(rows * NB,)](*given, True, BT, BP, num_warps=num_warps)
    block_scan_kernel[(len(sums),)](sums, NB, P, BP, 2048 // BP, num_warps=4)
    turning_kernel[(rows * NB,)](*given, False, BT, BP, num_warps=num_warps)
    return dangle


def _three(xs: Sequence[Tensor]) -> list[Tensor]:
    return [*xs, xs[0]][:3]
