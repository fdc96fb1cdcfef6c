"""Forward kernel: FoX's online softmax over the levels of the tree of carries.

A row tile meets the keys of its own pair of blocks (128 tokens: ``diag`` within a block, the blocks' carried q and k
across), then for each level s >= 1 whose bit is set in its position, h = 64 * 2^s keys read against its own q^s
(``layout.py``). Gates, bounds and the frame of the log-sum-exp are those of FoX's forward. On Hopper
``hopper/forward.py`` computes the same.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.constants import KEY_UNIT, ROW_UNIT
from attnzoo.kernels.common.gate_bias import base_shift, gate_at, gates_from
from attnzoo.kernels.common.jit_constants import TL_LOG2E
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import can_describe, cdiv, dot_precision, head_block, row_strides, tile_descriptor
from attnzoo.kernels.common.online_softmax import row_bounds, softmax_tile
from attnzoo.kernels.common.plans import Plan
from attnzoo.kernels.common.tile_loads import load_keys, load_tile, schedule
from attnzoo.kernels.levels.operands import LevelRows
from attnzoo.kernels.levels.plan import pair_width


@triton.jit
def pair_scores(p_diag, b_q, b_k, b_row, s, o_s, T, stride_d, PREC: tl.constexpr, C: tl.constexpr):
    """Unscaled scores of rows b_row with the keys s + o_s of one block of the same pair of blocks. # [BT, BS]

    stride_d: elements from one block of diag to the next.
    """
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PREC)
    m_own = b_row // C == s // C
    p_d = p_diag + (s // C).to(tl.int64) * stride_d + (b_row % C)[:, None] * C + (s % C + o_s)[None, :]
    b_d = tl.load(p_d, mask=(m_own & (b_row < T))[:, None], other=0.0)
    return tl.where(m_own[:, None], b_d, b_s)


@triton.jit
def level_tile(p_x, i_b, R, r, i_h, o_r, o_d, N: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, n,
                TMA: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """Rows r + o_r of one head of a level of [n_levels, B, R, N, D], by descriptor or by pointer. # [BR, BD]

    i_b: level * B + batch; n: rows that exist from r on (read if MASK).
    """
    if TMA:
        b = p_x.load([i_b, r, i_h, 0]).reshape([o_r.shape[0], BD])
    else:
        p_t = p_x + ((i_b.to(tl.int64) * R + r) * N + i_h) * D
        b = load_tile(p_t, o_r, o_d, N * D, n, D, BD, MASK)
    return b


@triton.jit
def base_at(p_base, s, GATE: tl.constexpr, KU: tl.constexpr):
    """The running gate sum before the unit of key s. # float64

    A loop loads it one tile ahead and converts it where it is used: converting at once would wait for the load.
    """
    return tl.load(p_base + s // KU) if GATE == 2 else tl.zeros([], tl.float64)


@triton.jit
def level_keys(row, i_l, lo, BS: tl.constexpr, RU: tl.constexpr):
    """Keys of level i_l + 1 of a row tile: child size, node, first and last key tile; none if the level is not its.

    lo: first key tile that these rows see.
    """
    h = RU << i_l
    u = row // (2 * h)
    begin = tl.maximum(u * (2 * h // BS), lo)
    stop = tl.where((row // h) % 2 == 1, (2 * u + 1) * (h // BS), begin)
    return h, u, begin, stop


@launched
@triton.jit(do_not_specialize=["B", "T", "Tq", "Tk", "n_levels", "n_heads", "stride_lb", "stride_lh"])
def path_fwd_portable_kernel(
    p_diag, p_qb, p_kb, p_q, p_k, p_v, p_vd, p_o, p_rest, p_lse, p_c, p_base, p_since, p_start, p_sink, B, T, Tq, Tk,
    n_levels, n_heads, scale2, stride_vb, stride_vt, stride_vh, stride_ob, stride_ot, stride_oh, stride_lb, stride_lh,
    H: tl.constexpr, REP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, BP: tl.constexpr, RU: tl.constexpr, KU: tl.constexpr, GATE: tl.constexpr,
    HAS_SINCE: tl.constexpr, HAS_START: tl.constexpr, HAS_REST: tl.constexpr, HAS_SINK: tl.constexpr, TMA: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """Output [B, T, H, V] and log2-sum-exp [B, H, T]; one program per row tile, the longest rows first."""
    G: tl.constexpr = H // REP
    i_t, i_bh = schedule(tl.cdiv(T, BT), n_heads)
    i_t = tl.cdiv(T, BT) - 1 - i_t
    i_b32, i_h = i_bh // H, i_bh % H
    i_b, i_g, i_h64 = i_b32.to(tl.int64), i_h // REP, i_h.to(tl.int64)
    row = i_t * BT
    last = tl.minimum(row + BT, T) - 1
    o_t, o_s, o_p = tl.arange(0, BT), tl.arange(0, BS), tl.arange(0, BP)
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    b_row = row + o_t  # [BT]
    m_t = b_row < T
    p_v += i_b * stride_vb + i_h64 // REP * stride_vh
    p_vt = p_vd  # a descriptor
    if not TMA:
        p_vt = p_v
    n_u = tl.cdiv(T, KU)
    p_c += i_bh.to(tl.int64) * (n_u * KU)
    p_base += i_bh.to(tl.int64) * (n_u + 1)
    p_since += i_b * stride_lb + i_h64 * stride_lh
    p_start += i_bh.to(tl.int64) * tl.cdiv(T, RU)
    b_slope = tl.zeros([], tl.float32)
    b_ref = gate_at(p_c, p_base, b_slope, row // RU * RU, GATE, KU)
    b_since = b_row
    if HAS_SINCE:
        b_since = tl.load(p_since + b_row, mask=m_t, other=0)
    lo, full, _, _, _ = row_bounds(p_since, p_start, i_t, row, last, BT, BS, RU, KU, HAS_SINCE, HAS_START)
    b_m = tl.full([BT], float("-inf"), tl.float32)
    b_l = tl.zeros([BT], tl.float32)
    if HAS_SINK:  # one more logit, without a value: moved to the frame of the row unit
        b_m = b_l + tl.load(p_sink + i_h).to(tl.float32) * TL_LOG2E
        if GATE != 0:
            b_m += gates_from(p_c, p_base, b_slope, b_row, b_ref, m_t, GATE, KU)
        b_l = tl.where(b_m == float("-inf"), 0.0, 1.0)
    b_o = tl.zeros([BT, BV], tl.float32)

    # own pair of blocks
    pair = row // RU * RU
    p_diag += (i_b * n_u * H + i_h) * (KU * KU)
    p_qb += (i_b * T * H + i_h) * K
    p_kb += (i_b * T * G + i_g) * K
    b_q = load_tile(p_qb + row.to(tl.int64) * (H * K), o_t, o_k, H * K, T - row, K, BK, True)
    for i in tl.range(tl.cdiv(last + 1 - pair, BP), num_stages=1):  # or diag would be staged through shared memory
        s = pair + i * BP
        b_shift = base_shift(p_base, b_slope, b_ref, s, GATE, KU)
        b_k = load_tile(p_kb + s.to(tl.int64) * (G * K), o_p, o_k, G * K, T - s, K, BK, True)
        b_s = pair_scores(p_diag, b_q, b_k, b_row, s, o_p, T, H * KU * KU, PREC, KU)
        b_v = load_tile(p_v + s.to(tl.int64) * stride_vt, o_p, o_v, stride_vt, T - s, V, BV, True)
        b_o, b_m, b_l = softmax_tile(b_o, b_m, b_l, b_s, b_v, p_c, b_slope, b_shift, s, o_p, b_row, b_since, scale2,
                                     GATE, HAS_SINCE, PREC, True)  # fmt: skip

    # levels
    for i in range(n_levels):
        h, u, begin, stop = level_keys(row, i, lo, BS, RU)
        if begin < stop:
            i_lb = i * B + i_b32
            r = row - (u + 1) * h
            b_q = level_tile(p_q, i_lb, Tq, r, i_h, o_t, o_k, H, K, BK, T - row, False, True)
            back = u * h  # of a key: its token minus its packed row
            mid = tl.minimum(tl.maximum(begin, full), stop)
            if HAS_SINCE:
                for i_s in tl.range(begin, mid, num_stages=1):
                    s = i_s * BS
                    b_shift = base_shift(p_base, b_slope, b_ref, s, GATE, KU)
                    b_k = level_tile(p_k, i_lb, Tk, s - back, i_g, o_s, o_k, G, K, BK, BS, TMA, False)
                    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PREC)
                    b_v = load_keys(p_vt, i_b32, s, i_g, o_s, o_v, stride_vt, T, V, BV, TMA, False)
                    b_o, b_m, b_l = softmax_tile(b_o, b_m, b_l, b_s, b_v, p_c, b_slope, b_shift, s, o_s, b_row, b_since,
                                                 scale2, GATE, HAS_SINCE, PREC, True)  # fmt: skip
            b_base = base_at(p_base, mid * BS, GATE, KU)
            for i_s in range(mid, stop):
                s = i_s * BS
                b_shift = (b_ref - b_base).to(tl.float32)
                b_base = base_at(p_base, s + BS, GATE, KU)
                b_k = level_tile(p_k, i_lb, Tk, s - back, i_g, o_s, o_k, G, K, BK, BS, TMA, False)
                b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PREC)
                b_v = load_keys(p_vt, i_b32, s, i_g, o_s, o_v, stride_vt, T, V, BV, TMA, False)
                b_o, b_m, b_l = softmax_tile(b_o, b_m, b_l, b_s, b_v, p_c, b_slope, b_shift, s, o_s, b_row, b_since,
                                             scale2, GATE, HAS_SINCE, PREC, False)  # fmt: skip
    b_o = b_o / b_l[:, None]
    b_oh = b_o.to(p_o.dtype.element_ty)
    p_ot = i_b * stride_ob + i_h64 * stride_oh + row.to(tl.int64) * stride_ot + o_t[:, None] * stride_ot + o_v[None, :]
    m_o = m_t[:, None] & (o_v[None, :] < V)
    tl.store(p_o + p_ot, b_oh, mask=m_o)
    if HAS_REST:  # what the rounding dropped
        tl.store(p_rest + p_ot, (b_o - b_oh.to(tl.float32)).to(p_rest.dtype.element_ty), mask=m_o)
    tl.store(p_lse + i_bh.to(tl.int64) * T + b_row, b_m + tl.log2(b_l), mask=m_t)


def value_block(K: int, V: int) -> int:
    """Width of tiles of values in the portable kernels: not less than that of keys, up to 64.

    With 64 columns of keys and 32 of values, ptxas 12.8 (of Triton 3.6 and 3.7, for sm_90a) leaves out what sets the
    address of a product's operand: gradients are wrong, or the kernel fails.
    """
    return max(head_block(V), min(head_block(K), 64))


def levels_descriptor(x: Tensor, rows: int) -> Any:
    """Descriptor of levels [n, B, R, H, D] for tiles of ``rows`` rows of one head; the first index is n * B."""
    return tile_descriptor(x.flatten(0, 1), rows)


def levels_forward(x: LevelRows, plan: Plan) -> None:
    """Fill o, lse and o_rest of the rows; lse is the log2-sum-exp in the frame of the row unit."""
    (block, levels, v, o, lse, rows, o_rest, sink, options), t = x, plan.of("fwd")
    (B, T, H, K), (G, V), n = block.q.shape, v.shape[2:], levels.q.shape[0]
    tma, BV = t.tma and n > 0 and can_describe(v), value_block(K, V)
    p_k, p_vd = (levels_descriptor(levels.k, t.BS), tile_descriptor(v, t.BS, BV)) if tma else (levels.k, v)
    path_fwd_portable_kernel[(cdiv(T, t.BT) * B * H,)](
        block.diag, block.q, block.k, levels.q, p_k, v, p_vd, o, o if o_rest is None else o_rest, lse,
        *rows.pointers(lse), lse if sink is None else sink, B, T, levels.q.shape[2], levels.k.shape[2], n,
        min(t.heads, B * H), options.scale2, *v.stride()[:3], *o.stride()[:3], *row_strides(rows.first_visible), H=H,
        REP=H // G, K=K, V=V, BK=head_block(K), BV=BV, BT=t.BT, BS=t.BS, BP=pair_width(t, max(K, V)), RU=ROW_UNIT,
        KU=KEY_UNIT, GATE=x.gate, **rows.flags, HAS_REST=o_rest is not None, HAS_SINK=sink is not None, TMA=tma,
        PREC=dot_precision(v.dtype), num_warps=t.num_warps, num_stages=t.num_stages, maxnreg=t.maxnreg,
    )  # fmt: skip
