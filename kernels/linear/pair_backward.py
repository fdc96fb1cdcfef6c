"""The kernel of the gradients that a delta rule with a decay per channel has from the pairs of tokens of a chunk, for
what flash-linear-attention has of them: gradients of the weights of pairs, of q and k and of k and k.

Weights are products that are decayed, per channel, by exp2 of a difference of running sums. A difference is split at a
token between the two, so that both factors are at most 1 where gates close; tokens of different blocks of ``R`` at the
border of a block, those of one block at its midst if no gate there closes as far as ``WIDEST`` bits, which takes one
product. Else positions i and j whose highest different bit is h stand in two halves of 2 h tokens, and are split in
their midst; those of one h are one product, of a symmetric matrix: rows of the second half receive from keys of the
first one, rows of the first half from queries and keys of the second one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.device import interpreted, triton_version
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import cdiv, power_of_2

WIDEST = tl.constexpr(60.0)  # 2**60 and 2**-60 times sums of products are far from the ends of float32


@launched
@triton.jit(do_not_specialize=["T"])
def pair_backward_kernel(
    p_q, p_k, p_c, p_beta, p_aq, p_ak, p_dq, p_dk, p_dc, p_db, p_cu, p_chunks, p_dq_out, p_dk_out, p_dc_out, p_db_out,
    T, G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BK: tl.constexpr,
    LEVELS: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Gradients of R tokens of a chunk for one head, added to those that p_dq, p_dk, p_dc and p_db have.

    aq and ak are gradients of weights of pairs, without the strength beta of row i in ak; dc is that of running sums.
    """
    i_p, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i_h, i_r, i_n = i_p % H, i_p // H % (C // R), i_p // (H * (C // R))
    i_0, n_t = i_b * T + i_n * C, T - i_n * C
    if PACKED:
        i_doc, i_c = tl.load(p_chunks + i_n * 2).to(tl.int64), tl.load(p_chunks + i_n * 2 + 1).to(tl.int64)
        i_first = tl.load(p_cu + i_doc).to(tl.int64)
        i_0 = i_first + i_c * C
        n_t = (tl.load(p_cu + i_doc + 1).to(tl.int64) - i_0).to(tl.int32)
    n_t = tl.minimum(n_t, C)
    i_s = i_r * R
    if i_s >= n_t:
        return
    p_q += (i_0 * G + i_h // (H // G)) * K
    p_k += (i_0 * G + i_h // (H // G)) * K
    p_c += (i_0 * H + i_h) * K
    p_beta += i_0 * H + i_h
    p_aq += (i_0 * H + i_h) * C
    p_ak += (i_0 * H + i_h) * C

    o_r = tl.arange(0, R)
    m_t = i_s + o_r < n_t
    o_t = tl.minimum(i_s + o_r, n_t - 1)  # tokens that exist
    o_a = o_t[:, None] * (H * C) + i_s + o_r[None, :]
    m_low = o_r[:, None] > o_r[None, :]
    b_beta = tl.load(p_beta + o_t * H).to(tl.float32)[:, None]
    o_differ = o_r[:, None] ^ o_r[None, :]

    b_db = tl.zeros([R], tl.float32)
    for i_k in range(0, K, BK):
        o_k = (i_k + tl.arange(0, BK))[None, :]
        m_k = o_k < K
        b_c = tl.load(p_c + o_t[:, None] * (H * K) + o_k, mask=m_k, other=0.0)
        b_dq = tl.zeros([R, BK], tl.float32)
        b_row = tl.zeros([R, BK], tl.float32)  # of k in rows of ak, without beta
        b_col = tl.zeros([R, BK], tl.float32)  # of k in columns of aq and ak
        if R < C:
            b_m = tl.load(p_c + i_s * (H * K) + o_k, mask=m_k, other=0.0)
            for i_o in range(0, i_s, R):  # tokens before
                o_o = i_o + o_r
                b_e = tl.exp2(b_m - tl.load(p_c + o_o[:, None] * (H * K) + o_k, mask=m_k, other=0.0))
                b_e *= tl.load(p_k + o_o[:, None] * (G * K) + o_k, mask=m_k, other=0.0).to(tl.float32)
                o_b = o_t[:, None] * (H * C) + o_o[None, :]
                b_dq = tl.dot(tl.load(p_aq + o_b), b_e, b_dq, input_precision=FAR)
                b_row = tl.dot(tl.load(p_ak + o_b), b_e, b_row, input_precision=FAR)
            b_e = tl.exp2(b_c - b_m)
            b_dq *= b_e
            b_row *= b_e
            b_m = tl.load(p_c + (tl.minimum(i_s + R, n_t) - 1) * (H * K) + o_k, mask=m_k, other=0.0)
            for i_o in range(i_s + R, n_t, R):  # tokens behind
                m_o = i_o + o_r < n_t
                o_o = tl.minimum(i_o + o_r, n_t - 1)
                b_e = tl.exp2(tl.load(p_c + o_o[:, None] * (H * K) + o_k, mask=m_k, other=0.0) - b_m)
                b_qe = b_e * tl.load(p_q + o_o[:, None] * (G * K) + o_k, mask=m_k, other=0.0).to(tl.float32)
                b_e *= tl.load(p_k + o_o[:, None] * (G * K) + o_k, mask=m_k, other=0.0).to(tl.float32)
                b_e *= tl.load(p_beta + o_o * H).to(tl.float32)[:, None]
                o_b = o_o[None, :] * (H * C) + i_s + o_r[:, None]
                b_a = tl.load(p_aq + o_b, mask=m_o[None, :], other=0.0)
                b_col = tl.dot(b_a, b_qe, b_col, input_precision=FAR)
                b_a = tl.load(p_ak + o_b, mask=m_o[None, :], other=0.0)
                b_col = tl.dot(b_a, b_e, b_col, input_precision=FAR)
            b_col *= tl.exp2(b_m - b_c)

        b_q = tl.load(p_q + o_t[:, None] * (G * K) + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_k = tl.load(p_k + o_t[:, None] * (G * K) + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_self = tl.load(p_aq + o_t * (H * C) + i_s + o_r, mask=m_t, other=0.0)[:, None]
        b_dq += b_self * b_k
        b_col += b_self * b_q
        b_aq = tl.load(p_aq + o_a, mask=m_low & m_t[:, None], other=0.0)
        b_ak = tl.load(p_ak + o_a, mask=m_low & m_t[:, None], other=0.0)
        b_aq += tl.trans(b_aq)
        b_ak += tl.trans(b_ak)
        b_kb = b_k * b_beta
        b_m = tl.load(p_c + tl.minimum(i_s + R // 2, n_t - 1) * (H * K) + o_k, mask=m_k, other=0.0)
        if tl.max(tl.abs(b_c - b_m)) <= WIDEST:
            b_e, b_i = tl.exp2(b_c - b_m), tl.exp2(b_m - b_c)
            b_x = b_k * b_i
            b_dq += tl.dot(tl.where(m_low, b_aq, 0.0), b_x, input_precision=NEAR) * b_e
            b_row += tl.dot(tl.where(m_low, b_ak, 0.0), b_x, input_precision=NEAR) * b_e
            b_y = tl.dot(tl.where(m_low, 0.0, b_aq), b_q * b_e, input_precision=NEAR)
            b_col += tl.dot(tl.where(m_low, 0.0, b_ak), b_kb * b_e, b_y, input_precision=NEAR) * b_i
        else:
            for n in range(LEVELS):
                i_half = R // 2 >> n
                m_later = ((o_r & i_half) != 0)[:, None]
                o_m = tl.minimum(i_s + (o_r & -2 * i_half) + i_half, n_t - 1)  # the first one of the second half
                b_e = b_c - tl.load(p_c + o_m[:, None] * (H * K) + o_k, mask=m_k, other=0.0)
                b_e = tl.exp2(tl.where(m_later, b_e, -b_e))
                b_later, b_sooner = tl.where(m_later, b_e, 0.0), tl.where(m_later, 0.0, b_e)
                m_a = (o_differ >= i_half) & (o_differ < 2 * i_half)
                b_x = b_k * b_sooner
                b_y = tl.dot(tl.where(m_a, b_aq, 0.0), b_x + b_q * b_later, input_precision=NEAR)
                b_z = tl.dot(tl.where(m_a, b_ak, 0.0), b_x + b_kb * b_later, input_precision=NEAR)
                b_dq += b_y * b_later
                b_row += b_z * b_later
                b_col += (b_y + b_z) * b_sooner

        b_db += tl.sum(b_row * b_k, 1)
        b_row *= b_beta
        o_tk = ((i_0 + o_t) * H + i_h)[:, None] * K + o_k
        m_tk = m_t[:, None] & m_k
        tl.store(p_dq_out + o_tk, tl.load(p_dq + o_tk, mask=m_tk, other=0.0) + b_dq, mask=m_tk)
        tl.store(p_dk_out + o_tk, tl.load(p_dk + o_tk, mask=m_tk, other=0.0) + b_row + b_col, mask=m_tk)
        b_dc = b_q * b_dq + (b_row - b_col) * b_k
        tl.store(p_dc_out + o_tk, tl.load(p_dc + o_tk, mask=m_tk, other=0.0) + b_dc, mask=m_tk)
    o_th = (i_0 + o_t) * H + i_h
    tl.store(p_db_out + o_th, tl.load(p_db + o_th) + b_db, mask=m_t)


class PairTiles(NamedTuple):
    """Tokens (a block) and most channels that a program takes at a time, warps, precision of products of tokens of a
    block and of different ones, stages of loops, and most registers of a thread."""

    R: int
    BK: int
    warps: int
    near: str
    far: str = "tf32"
    stages: int = 1
    registers: int | None = None

    def precision(self) -> tuple[str, str]:
        """Of near and far products, as the installed Triton has it."""
        if interpreted():
            return "ieee", "ieee"
        near, far = ("tf32x3" if x == "bf16x3" and triton_version() < (3, 6) else x for x in (self.near, self.far))
        return near, far


TILES = PairTiles(16, 64, 4, "bf16x3", stages=2, registers=128)  # 620 us on an H200, where the library takes 1411


class Pairs(NamedTuple):
    """What the gradients of a chunk's pairs need, contiguous, as flash-linear-attention has it.

    Args:
        q, k: ``[B, T, G, K]``.
        g: sums of log2 gates from the begin of the chunk on, ``[B, T, H, K]`` float32.
        beta: ``[B, T, H]``.
        daqk, dakk: gradients of the weights of a token and each of its chunk, ``[B, T, H, chunk]`` float32.
        dq, dk, db, dg: gradients that the others are added to, of shapes of g, g, beta and g, float32.
    """

    q: Tensor
    k: Tensor
    g: Tensor
    beta: Tensor
    daqk: Tensor
    dakk: Tensor
    dq: Tensor
    dk: Tensor
    db: Tensor
    dg: Tensor


def pair_gradients(
    x: Pairs, cu_seqlens: Tensor | None, chunks: Tensor | None, tiles: PairTiles = TILES
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, beta and the sums of gates, as x.dq, x.dk, x.db and x.dg.

    Args:
        cu_seqlens: borders ``[N + 1]`` int64 of packed sequences.
        chunks: the sequence of each chunk and its number there, ``[n, 2]`` int64.
    """
    (B, T, G, K), (H, C) = x.k.shape, x.daqk.shape[2:]
    NC = cdiv(T, C) if chunks is None else len(chunks)
    dq, dk, db, dg = (torch.empty_like(y) for y in (x.dq, x.dk, x.db, x.dg))
    BK = min(tiles.BK, max(16, power_of_2(K)))
    near, far = tiles.precision()
    pair_backward_kernel[(NC * (C // tiles.R) * H, B)](
        x.q, x.k, x.g, x.beta, x.daqk, x.dakk, x.dq, x.dk, x.dg, x.db, x.g if cu_seqlens is None else cu_seqlens,
        x.g if chunks is None else chunks, dq, dk, dg, db, T, G, H, K, C, R=tiles.R, BK=BK,
        LEVELS=tiles.R.bit_length() - 1, NEAR=near, FAR=far, PACKED=chunks is not None, num_warps=tiles.warps,
        num_stages=tiles.stages, maxnreg=tiles.registers,
    )  # fmt: skip
    return dq, dk, db, dg
