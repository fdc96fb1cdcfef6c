"""Forward for few query rows over many keys (decoding, short prefill chunks): the keys are split.

One program per row block would leave most of the GPU idle, and one global head would set the time. Here a program takes
a chunk of keys and all rows that read the same key head: the T tokens of its REP query heads, packed in one tile. A
second kernel combines the chunks in a fixed order, so the result is deterministic. Pruned chunks end at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.constants import KEY_UNIT
from attnzoo.kernels.common.device import multiprocessors
from attnzoo.kernels.common.gate_bias import const_gate
from attnzoo.kernels.common.jit_constants import TL_LOG2E
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import (
    cdiv,
    dot_precision,
    gate_kind,
    head_block,
    power_of_2,
    row_strides,
    valid_strides,
)
from attnzoo.kernels.common.online_softmax import put_together, weights_of
from attnzoo.kernels.common.plans import Plan
from attnzoo.kernels.common.rows import RowGates
from attnzoo.kernels.common.scores import scores
from attnzoo.kernels.common.tile_loads import keys_there, load_tile
from attnzoo.kernels.fox.operands import FoxOperands


@triton.jit
def _row_gate(p_c, p_base, b_slope, o_h, pos, m, NS, GATE: tl.constexpr, KU: tl.constexpr):
    """The running sum of log2 gates of heads o_h at positions pos. # [BT] float64"""
    if GATE == 2:
        b = tl.load(p_base + o_h * (NS + 1) + pos // KU, mask=m, other=0.0)
        b += tl.load(p_c + o_h * (NS * KU) + pos, mask=m, other=0.0).to(tl.float64)
    else:
        b = pos * b_slope.to(tl.float64)
    return b


@launched
@triton.jit(do_not_specialize=["p_since", "T", "S", "NS", "n_chunks", "stride_lb", "stride_lh", "stride_mb"])
def fox_split_kernel(
    p_q, p_k, p_v, p_part, p_lse, p_c, p_base, p_g, p_since, p_start, p_valid, T, S, NS, n_chunks, scale2,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_lb, stride_lh, stride_mb, stride_ms,
    H: tl.constexpr, REP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, CHUNK: tl.constexpr, KU: tl.constexpr, GATE: tl.constexpr,
    HAS_SINCE: tl.constexpr, HAS_START: tl.constexpr, HAS_VALID: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Normalised output [B, H, T, n_chunks, V] float32 and log2-sum-exp [B, H, T, n_chunks] of one chunk of keys.

    NS: units of KU keys that the gate sums have room for; p_since holds the T rows alone.
    """
    i_bg, i_c = tl.program_id(0), tl.program_id(1)
    i_b, i_g = (i_bg // (H // REP)).to(tl.int64), i_bg % (H // REP)
    o_r, o_s, o_k, o_v = tl.arange(0, BT), tl.arange(0, BS), tl.arange(0, BK), tl.arange(0, BV)
    m_r = o_r < T * REP
    o_t, o_rep = o_r % T, tl.minimum(o_r // T, REP - 1)
    o_h = i_b * H + i_g * REP + o_rep  # [BT] int64
    b_pos = o_t + (S - T)
    b_slope = tl.zeros([BT], tl.float32)
    if GATE == 1:
        b_slope = const_gate(p_g, i_g * REP + o_rep)
    b_ref = _row_gate(p_c, p_base, b_slope, o_h, o_t * 0 + (S - T), m_r, NS, GATE, KU)  # [BT]
    b_since = b_pos * 0
    if HAS_SINCE:
        b_since = tl.load(
            p_since + i_b * stride_lb + (i_g * REP + o_rep).to(tl.int64) * stride_lh + o_t, mask=m_r, other=S
        )
    if HAS_START:
        b_since = tl.maximum(b_since, tl.load(p_start + o_h, mask=m_r, other=S))
    first = i_c * CHUNK
    lo = tl.maximum(first, tl.min(tl.where(m_r, b_since, S), 0) // KU * KU)
    p_qr = p_q + i_b * stride_qb + (o_t * stride_qt + (i_g * REP + o_rep).to(tl.int64) * stride_qh)[:, None]
    p_qr += o_k[None, :]
    b_q = tl.load(p_qr, mask=m_r[:, None] & (o_k[None, :] < K), other=0.0)  # [BT, BK]
    p_k += i_b * stride_kb + i_g.to(tl.int64) * stride_kh
    p_v += i_b * stride_vb + i_g.to(tl.int64) * stride_vh
    b_m = tl.full([BT], float("-inf"), tl.float32)
    b_l = tl.zeros([BT], tl.float32)
    b_o = tl.zeros([BT, BV], tl.float32)
    p_valid += i_b * stride_mb
    for s in range(lo, tl.minimum(first + CHUNK, S), BS):
        b_k = load_tile(p_k + s * stride_ks.to(tl.int64), o_s, o_k, stride_ks, S - s, K, BK, True)
        b_v = load_tile(p_v + s * stride_vs.to(tl.int64), o_s, o_v, stride_vs, S - s, V, BV, True)
        b_y = scores(tl.dot(b_q, tl.trans(b_k), input_precision=PREC), scale2)  # [BT, BS]
        if GATE == 2:
            b_shift = (b_ref - tl.load(p_base + o_h * (NS + 1) + s // KU)).to(tl.float32)
            b_y += b_shift[:, None] - tl.load(p_c + (o_h * (NS * KU) + s)[:, None] + o_s[None, :])
        elif GATE == 1:
            b_shift = (b_ref - s * b_slope.to(tl.float64)).to(tl.float32)
            b_y += b_shift[:, None] - o_s.to(tl.float32)[None, :] * b_slope[:, None]
        if HAS_VALID:  # what does not exist may hold anything
            m_there = keys_there(p_valid, s, o_s, S, stride_ms)
            b_y, b_v = tl.where(m_there[None, :], b_y, float("-inf")), tl.where(m_there[:, None], b_v, 0.0)
        m_y = ((s + o_s)[None, :] <= b_pos[:, None]) & ((s + o_s)[None, :] >= b_since[:, None])
        b_y = tl.where(m_y, b_y, float("-inf"))
        b_m, b_p, b_a = weights_of(b_y, b_m)
        b_l = b_l * b_a + tl.sum(b_p, 1)
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o * b_a[:, None], input_precision=PREC)  # [BT, BV]
    o_part = (o_h * T + o_t) * n_chunks + i_c
    tl.store(p_lse + o_part, tl.where(b_l > 0.0, b_m + tl.log2(b_l), float("-inf")), mask=m_r)
    b_o = b_o / tl.where(b_l > 0.0, b_l, 1.0)[:, None]
    tl.store(p_part + o_part[:, None] * V + o_v[None, :], b_o, mask=m_r[:, None] & (o_v[None, :] < V))


@launched
@triton.jit(do_not_specialize=["T", "S", "NS", "n_chunks"])
def fox_combine_kernel(
    p_part, p_lses, p_o, p_lse, p_c, p_base, p_g, p_sink, T, S, NS, n_chunks,
    H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr, KU: tl.constexpr, GATE: tl.constexpr,
    HAS_SINK: tl.constexpr,
):  # fmt: skip
    """Output [B, T, H, V] and log2-sum-exp [B, H, T] of one row from its chunks, and its sink."""
    i_bh, i_t = tl.program_id(0), tl.program_id(1)
    i_h = i_bh % H
    o_n, o_v = tl.arange(0, BN), tl.arange(0, BV)
    p_row = (i_bh.to(tl.int64) * T + i_t) * n_chunks
    b_m = tl.full([], float("-inf"), tl.float32)
    b_l = tl.zeros([], tl.float32)
    b_o = tl.zeros([BV], tl.float32)
    if HAS_SINK:  # in the frame of the row unit, as every logit
        b_m = tl.load(p_sink + i_h).to(tl.float32) * TL_LOG2E
        if GATE != 0:
            b_slope = tl.zeros([1], tl.float32)
            if GATE == 1:
                b_slope += const_gate(p_g, i_h)
            o_h, o_0 = tl.zeros([1], tl.int64) + i_bh, tl.zeros([1], tl.int32) + (S - T)
            b_c = _row_gate(p_c, p_base, b_slope, o_h, o_0, o_0 >= 0, NS, GATE, KU)
            b_c -= _row_gate(p_c, p_base, b_slope, o_h, o_0 + i_t, o_0 >= 0, NS, GATE, KU)
            b_m += tl.sum(b_c, 0).to(tl.float32)
        b_l = tl.where(b_m == float("-inf"), 0.0, 1.0)
    for n in range(0, n_chunks, BN):
        m_n = n + o_n < n_chunks
        b_o, b_m, b_l = put_together(b_o, b_m, b_l, p_part, p_lses, p_row + n + o_n, m_n, o_v, V)
    i_b = i_bh // H
    p_out = p_o + ((i_b * T + i_t).to(tl.int64) * H + i_h) * V + o_v
    tl.store(p_out, (b_o / tl.where(b_l > 0.0, b_l, 1.0)).to(p_o.dtype.element_ty), mask=o_v < V)
    tl.store(p_lse + i_bh.to(tl.int64) * T + i_t, tl.where(b_l > 0.0, b_m + tl.log2(b_l), float("-inf")))


def _chunk(programs: int, S: int, device: torch.device) -> int:
    """Keys per program: enough programs to fill the GPU eight times, 256 to 2048 keys each."""
    if device.type != "cuda":
        return 4 * KEY_UNIT
    return min(2048, max(256, power_of_2(S * programs // (8 * multiprocessors(device)))))


def _tile(width: int, element_size: int) -> tuple[int, int]:
    """Keys per step and stages, for keys and values of ``width`` numbers together: at most 64 KiB of shared memory."""
    fits = 32768 // (width * element_size)
    BS = min(KEY_UNIT, max(16, 1 << fits.bit_length() - 1))
    return BS, 3 if BS * width * element_size <= 16384 else 2 if BS * width * element_size <= 32768 else 1


def fox_split_forward(
    given: FoxOperands, rows: RowGates, plan: Plan, *, o_rest: Tensor | None = None, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Launch both kernels; what ``forward.fox_forward`` takes and returns, for few rows (``plan.SPLIT_ROWS``).

    c and base may have room for more than S keys; first visible keys may be those of the T rows alone.
    """
    q, k, v, log_decay, sink, options, *_ = given
    (B, T, H, K), (S, G), V = q.shape, k.shape[1:3], v.shape[3]
    if rows.first_visible is not None:
        rows = rows._replace(first_visible=rows.first_visible[..., rows.first_visible.shape[2] - T :])
    if o_rest is not None:  # the sum over chunks is not taken apart
        o_rest.zero_()
    chunk = _chunk(B * G, S, q.device)
    n, gate = cdiv(S, chunk), gate_kind(log_decay)
    o, lse = q.new_empty((B, T, H, V)), q.new_empty((B, H, T), dtype=torch.float32)
    part, lses = lse.new_empty((B, H, T, n, V)), lse.new_empty((B, H, T, n))
    BV = head_block(V)
    BS, num_stages = _tile(head_block(K) + BV, q.element_size())
    c, base, since, start = rows.pointers(lse)
    p_g, there = lse if log_decay is None else log_decay, lse if valid is None else valid
    NS = rows.base.shape[2] - 1 if rows.base is not None else 0
    fox_split_kernel[(B * G, n)](
        q, k, v, part, lses, c, base, p_g, since, start, there, T, S, NS, n, options.scale2, *q.stride()[:3],
        *k.stride()[:3], *v.stride()[:3], *row_strides(rows.first_visible), *valid_strides(valid), **given.dims,
        **rows.flags, BT=max(16, power_of_2(T * H // G)), BS=BS, CHUNK=chunk, KU=KEY_UNIT, GATE=gate,
        HAS_VALID=valid is not None, PREC=dot_precision(q.dtype), num_warps=4, num_stages=num_stages,
    )  # fmt: skip
    fox_combine_kernel[(B * H, T)](
        part, lses, o, lse, c, base, p_g, lse if sink is None else sink, T, S, NS, n, H=H, V=V, BV=BV, BN=16,
        KU=KEY_UNIT, GATE=gate, HAS_SINK=sink is not None, num_warps=4,
    )  # fmt: skip
    return o, lse
