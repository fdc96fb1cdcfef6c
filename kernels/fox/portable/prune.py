"""Pruning for FoX: the worst row of each row unit, and from it the unit's first key (``common/pruning.py``)."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.constants import KEY_UNIT, LOG2E, NEAR_UNITS, ROW_UNIT, SLACK
from attnzoo.kernels.common.device import machine
from attnzoo.kernels.common.gate_bias import base_shift, const_gate, gate_at, key_bias
from attnzoo.kernels.common.jit_constants import TL_LOG2E
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import (
    can_describe,
    cdiv,
    dot_precision,
    gate_kind,
    head_block,
    power_of_2,
    row_strides,
    tile_descriptor,
    valid_strides,
)
from attnzoo.kernels.common.online_softmax import weights_of
from attnzoo.kernels.common.pruning import need_rows, none_above, norm_max, prune_scan_kernel
from attnzoo.kernels.common.rows import RowGates
from attnzoo.kernels.common.scores import scores
from attnzoo.kernels.common.tile_loads import head_and_tile, keys_there, load_keys
from attnzoo.kernels.fox.operands import FoxOperands
from attnzoo.kernels.fox.plan import prune_tiles


@launched
@triton.jit(do_not_specialize=["p_since", "T", "S", "NS", "stride_lb", "stride_lh", "stride_mb"])
def fox_prune_rows_kernel(
    p_q, p_k, p_qmax, p_kmax, p_bound, p_c, p_base, p_g, p_since, p_valid, p_need, T, S, NS, scale2, log2_s, b_none,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_ks, stride_kh, stride_lb, stride_lh, stride_mb, stride_ms,
    H: tl.constexpr, REP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, RU: tl.constexpr, KU: tl.constexpr,
    BR: tl.constexpr, GATE: tl.constexpr, TAIL: tl.constexpr, NEAR: tl.constexpr, HAS_BOUND: tl.constexpr,
    HAS_SINCE: tl.constexpr, HAS_VALID: tl.constexpr, TMA: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Worst row of each row unit, [B, H, T / RU] float64: c_i + U_i - l_i (tail) or c_i + 2 U + log N (paper).

    b_none: the tail bound drops nothing from rows with c_i - c_0 above it. NS: units that c and base have room for.
    p_since holds the T rows alone.
    """
    i_bh, i_t = head_and_tile(tl.cdiv(T, RU))
    i_b32, i_h = i_bh // H, i_bh % H
    i_b = i_b32.to(tl.int64)
    i_bg = i_b * (H // REP) + i_h // REP
    off = S - T
    p_first = i_t * RU + off
    o_t, o_s, o_k = tl.arange(0, BR), tl.arange(0, KU), tl.arange(0, BK)
    b_slope = tl.zeros([], tl.float32)
    if GATE == 1:
        b_slope = const_gate(p_g, i_h)
    p_c += i_bh.to(tl.int64) * (NS * KU)
    p_base += i_bh.to(tl.int64) * (NS + 1)
    b_c = gate_at(p_c, p_base, b_slope, p_first, GATE, KU)
    if TAIL:  # worst row of U_i - l_i, with l_i in the frame of this unit
        b_worst = tl.full([], float("inf"), tl.float32)
        b_end = gate_at(p_c, p_base, b_slope, tl.minimum(p_first + RU, S) - 1, GATE, KU)
        if b_end - gate_at(p_c, p_base, b_slope, 0, GATE, KU) <= b_none:
            if not TMA:
                p_q += i_b * stride_qb + i_h.to(tl.int64) * stride_qh
                p_k += i_b * stride_kb + (i_h // REP).to(tl.int64) * stride_kh
            p_since += i_b * stride_lb + i_h.to(tl.int64) * stride_lh
            b_kmax = tl.load(p_kmax + i_bg)
            b_worst = tl.full([], float("-inf"), tl.float32)
            for i_r in range(RU // BR):
                r = i_t * RU + i_r * BR
                b_q = load_keys(p_q, i_b32, r, i_h, o_t, o_k, stride_qt, T, K, BK, TMA, True)
                b_pos, m_t = r + off + o_t, r + o_t < T
                b_since = b_pos * 0
                if HAS_SINCE:
                    b_since = tl.load(p_since + r + o_t, mask=m_t, other=0)
                b_m = tl.full([BR], float("-inf"), tl.float32)
                b_l = tl.zeros([BR], tl.float32)
                for i_s in range(tl.maximum(p_first // KU - NEAR, 0), tl.cdiv(tl.minimum(r + off + BR, S), KU)):
                    s = i_s * KU
                    b_k = load_keys(p_k, i_b32, s, i_h // REP, o_s, o_k, stride_ks, S, K, BK, TMA, True)
                    b_shift = base_shift(p_base, b_slope, b_c, s, GATE, KU)
                    b_y = scores(tl.dot(b_q, tl.trans(b_k), input_precision=PREC), scale2)  # [BR, KU]
                    b_y += key_bias(p_c, b_slope, b_shift, s, o_s, GATE)[None, :]
                    m_y = ((s + o_s)[None, :] <= b_pos[:, None]) & ((s + o_s)[None, :] >= b_since[:, None])
                    b_y = tl.where(m_y, b_y, float("-inf"))
                    if HAS_VALID:
                        m_there = keys_there(p_valid + i_b * stride_mb, s, o_s, S, stride_ms)
                        b_y = tl.where(m_there[None, :], b_y, float("-inf"))
                    b_m, b_w, b_a = weights_of(b_y, b_m)
                    b_l = b_l * b_a + tl.sum(b_w, 1)
                b_row = need_rows(b_q, b_kmax, p_bound, i_h, b_m + tl.log2(b_l), m_t, scale2, HAS_BOUND)
                b_worst = tl.maximum(b_worst, tl.max(b_row, 0))
    else:
        b_u = scores(tl.sqrt(tl.load(p_qmax + i_bh) * tl.load(p_kmax + i_bg)) * 1.0001, scale2)
        if HAS_BOUND:
            b_u = tl.minimum(b_u, tl.load(p_bound + i_h).to(tl.float32) * TL_LOG2E)
        b_worst = 2.0 * b_u + log2_s
    tl.store(p_need + i_bh.to(tl.int64) * tl.cdiv(T, RU) + i_t, b_c + b_worst.to(tl.float64))


def prune_starts(
    given: FoxOperands, rows: RowGates, tails: Tensor | None, valid: Tensor | None = None, longest: Tensor | None = None
) -> Tensor:
    """First key of each unit of ROW_UNIT query rows, a multiple of KEY_UNIT. No host synchronisation.

    Args:
        given: q and k with contiguous last dims, and the bound: the smaller of ``logit_bound`` and what the norms of q
            and k say counts.
        rows: of a gate per token, its sums (which may have room for more); first visible keys of all positions or of
            the T rows alone.
        tails: of ``gate_sums``, of a gate per token.
        valid: [B, S] bool, the keys that exist; the certificate holds for rows that see themselves.
        longest: [B, G] float32, the largest |k|^2 of each key head, or None to measure it, where sums have no room.

    Returns:
        [B, H, ceil(T / ROW_UNIT)] int32, non-decreasing along the rows.
    """
    (q, k, _, log_decay, _, options, *_), (c, base, first_visible, _) = given, rows
    (B, T, H, K), (S, G), n_t = q.shape, k.shape[1:3], cdiv(q.shape[1], ROW_UNIT)
    tail, gate, bound = options.bound == "tail", gate_kind(log_decay), options.logit_bound
    start = torch.empty((B, H, n_t), dtype=torch.int32, device=q.device)
    need = torch.empty((B, H, n_t), dtype=torch.float64, device=q.device)
    none = none_above(options.log_eps, ROW_UNIT + (NEAR_UNITS + 1) * KEY_UNIT)
    if longest is None:
        longest = norm_max(k, base=base if tail else None, none=none)
    of_rows = longest if tail else norm_max(q)
    NS = cdiv(S, KEY_UNIT) if base is None else base.shape[2] - 1
    first_visible = None if first_visible is None else first_visible[..., first_visible.shape[2] - T :]
    there, where = need if valid is None else valid, machine(q.device)
    t = prune_tiles(T, K, q.dtype, where)
    if t.tma and not can_describe(q, k):
        t = prune_tiles(T, K, q.dtype, where, described=False)
    p_q, p_k = (tile_descriptor(q, t.BT), tile_descriptor(k, t.BS)) if t.tma else (q, k)
    fox_prune_rows_kernel[(B * H * n_t,)](
        p_q, p_k, of_rows, longest, longest if bound is None else bound, longest if c is None else c,
        longest if base is None else base, log_decay, start if first_visible is None else first_visible, there, need, T,
        S, NS, options.scale2, math.log2(S), none, *q.stride()[:3], *k.stride()[:3],
        *row_strides(first_visible), *valid_strides(valid), H=H, REP=H // G, K=K, BK=head_block(K), RU=ROW_UNIT,
        KU=KEY_UNIT, BR=t.BT, GATE=gate, TAIL=tail, NEAR=NEAR_UNITS, HAS_BOUND=bound is not None,
        HAS_SINCE=first_visible is not None, HAS_VALID=valid is not None, TMA=t.tma, PREC=dot_precision(q.dtype),
        num_warps=t.num_warps, num_stages=t.num_stages,
    )  # fmt: skip
    prune_scan_kernel[(B * H,)](
        need, longest if base is None else base, log_decay, longest if tails is None else tails, start, T, S, NS,
        options.log_eps * LOG2E - SLACK, cdiv(S, KEY_UNIT).bit_length() + 1, H=H, RU=ROW_UNIT, KU=KEY_UNIT,
        BN=min(1024, max(16, power_of_2(n_t))), GATE=gate, TAIL=tail,
    )  # fmt: skip
    return start
