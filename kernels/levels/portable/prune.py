"""Pruning over levels, with a gate: the worst row of each row unit, and from it the unit's first key.

The certificate is FoX's (``common/pruning.py``). It needs only that |q_i| |k_j| bounds a score, and it does, since
every factor of a transition has norm at most 1.

The tail bound's l_i is the log-sum-exp of row i over its own block of keys and the one before it: diag, and q carried
back to the start of its block times k carried to the end of theirs.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.constants import KEY_UNIT, LOG2E, ROW_UNIT, SLACK
from attnzoo.kernels.common.gate_bias import base_shift, gate_at, key_bias
from attnzoo.kernels.common.jit_constants import TL_LOG2E
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import cdiv, dot_precision, head_block, row_strides
from attnzoo.kernels.common.online_softmax import weights_of
from attnzoo.kernels.common.options import OpOptions
from attnzoo.kernels.common.pruning import need_rows, none_above, norm_max, prune_scan_kernel
from attnzoo.kernels.common.rows import RowGates
from attnzoo.kernels.common.scores import scores
from attnzoo.kernels.common.tile_loads import head_and_tile, load_tile
from attnzoo.kernels.levels.layout import Leaves


@launched
@triton.jit(do_not_specialize=["T", "stride_lb", "stride_lh"])
def path_prune_rows_kernel(
    p_q, p_diag, p_qb, p_kb, p_qmax, p_kmax, p_bound, p_c, p_base, p_since, p_need, T, scale2, log2_t, b_none,
    stride_qb, stride_qt, stride_qh, stride_lb, stride_lh,
    H: tl.constexpr, REP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, RU: tl.constexpr, KU: tl.constexpr,
    TAIL: tl.constexpr, HAS_BOUND: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Worst row of each row unit, [B, H, T / RU] float64: c_i + U_i - l_i (tail) or c_i + 2 U + log N (paper).

    b_none: the tail bound drops nothing from rows with c_i - c_0 above it.
    """
    G: tl.constexpr = H // REP
    i_bh, i_t = head_and_tile(tl.cdiv(T, RU))
    i_b, i_h = (i_bh // H).to(tl.int64), (i_bh % H).to(tl.int64)
    i_g = i_h // REP
    o_t, o_s, o_k = tl.arange(0, KU), tl.arange(0, KU), tl.arange(0, BK)
    n_u = tl.cdiv(T, KU)
    p_c += i_bh.to(tl.int64) * (n_u * KU)
    p_base += i_bh.to(tl.int64) * (n_u + 1)
    b_slope = tl.zeros([], tl.float32)
    b_c = gate_at(p_c, p_base, b_slope, i_t * RU, 2, KU)
    b_kmax = tl.load(p_kmax + i_b * G + i_g)
    if TAIL:
        b_worst = tl.full([], float("inf"), tl.float32)
        b_end = gate_at(p_c, p_base, b_slope, tl.minimum(i_t * RU + RU, T) - 1, 2, KU)
        if b_end - gate_at(p_c, p_base, b_slope, 0, 2, KU) <= b_none:
            p_q += i_b * stride_qb + i_h * stride_qh
            p_since += i_b * stride_lb + i_h * stride_lh
            p_qb += (i_b * T * H + i_h) * K
            p_kb += (i_b * T * G + i_g) * K
            b_worst = tl.full([], float("-inf"), tl.float32)
            for i in range(tl.minimum(tl.cdiv(T - i_t * RU, KU), RU // KU)):
                r = i_t * RU + i * KU
                b_pos = r + o_t
                m_t = b_pos < T
                b_since = tl.load(p_since + b_pos, mask=m_t, other=0)[:, None]
                p_d = p_diag + ((i_b * n_u + r // KU) * H + i_h) * (KU * KU) + o_t[:, None] * KU + o_s[None, :]
                b_y = scores(tl.load(p_d, mask=m_t[:, None], other=0.0), scale2)  # [KU, KU]
                b_y += key_bias(p_c, b_slope, base_shift(p_base, b_slope, b_c, r, 2, KU), r, o_s, 2)[None, :]
                b_y = tl.where((o_s[None, :] <= o_t[:, None]) & ((r + o_s)[None, :] >= b_since), b_y, float("-inf"))
                b_m = tl.max(b_y, 1)  # a row sees itself, so this is finite
                b_m = tl.where(m_t, b_m, 0.0)
                b_l = tl.sum(tl.exp2(b_y - b_m[:, None]), 1)
                s = tl.maximum(r - KU, 0)  # the first block has none before it
                b_qb = load_tile(p_qb + r.to(tl.int64) * (H * K), o_t, o_k, H * K, T - r, K, BK, True)
                b_kb = load_tile(p_kb + s.to(tl.int64) * (G * K), o_s, o_k, G * K, T - s, K, BK, True)
                b_y = scores(tl.dot(b_qb, tl.trans(b_kb), input_precision=PREC), scale2)
                b_y += key_bias(p_c, b_slope, base_shift(p_base, b_slope, b_c, s, 2, KU), s, o_s, 2)[None, :]
                b_y = tl.where(((s + o_s)[None, :] >= b_since) & (r > 0), b_y, float("-inf"))
                b_m, b_w, b_a = weights_of(b_y, b_m, False)
                b_l = b_l * b_a + tl.sum(b_w, 1)
                b_q = load_tile(p_q + r.to(tl.int64) * stride_qt, o_t, o_k, stride_qt, T - r, K, BK, True)
                b_row = need_rows(b_q, b_kmax, p_bound, i_h, b_m + tl.log2(b_l), m_t, scale2, HAS_BOUND)
                b_worst = tl.maximum(b_worst, tl.max(b_row[:, None]))  # of one axis, Triton 3.7 fails for Blackwell
    else:
        b_u = scores(tl.sqrt(tl.load(p_qmax + i_bh) * b_kmax) * 1.0001, scale2)
        if HAS_BOUND:
            b_u = tl.minimum(b_u, tl.load(p_bound + i_h).to(tl.float32) * TL_LOG2E)
        b_worst = 2.0 * b_u + log2_t
    tl.store(p_need + i_bh.to(tl.int64) * tl.cdiv(T, RU) + i_t, b_c + b_worst.to(tl.float64))


def block_starts(
    q: Tensor, k: Tensor, block: Leaves | None, rows: RowGates, tails: Tensor, options: OpOptions,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """First key of each unit of ROW_UNIT query rows, a multiple of KEY_UNIT. No host synchronisation.

    Args:
        q, k: [B, T, H, K] and [B, T, G, K] as the caller gave them, last dim contiguous.
        block: what ``block_level`` makes of them; only the tail bound reads it.
        rows, tails: of ``gate_sums``.
        options: the bound, which with ``logit_bound`` is the smaller of it and the norms.
        out: contiguous, where to put the result; default: a new tensor.

    Returns:
        [B, H, ceil(T / ROW_UNIT)] int32, non-decreasing along the rows.
    """
    ((B, T, H, K), G), (c, base, first_visible, _) = (q.shape, k.shape[2]), rows
    assert base is not None
    tail, bound, n_t = options.bound == "tail", options.logit_bound, cdiv(T, ROW_UNIT)
    start = torch.empty((B, H, n_t), dtype=torch.int32, device=q.device) if out is None else out
    need = torch.empty((B, H, n_t), dtype=torch.float64, device=q.device)
    longest = norm_max(k)
    of_rows = longest if tail else norm_max(q)
    assert block is not None or not tail
    diag, qb, kb = (q, q, k) if block is None else (block.diag, block.q, block.k)
    path_prune_rows_kernel[(B * H * n_t,)](
        q, diag, qb, kb, of_rows, longest, longest if bound is None else bound, c, base, first_visible, need, T,
        options.scale2, math.log2(T), none_above(options.log_eps, 2 * KEY_UNIT), *q.stride()[:3],
        *row_strides(first_visible), H=H, REP=H // G, K=K, BK=head_block(K), RU=ROW_UNIT, KU=KEY_UNIT, TAIL=tail,
        HAS_BOUND=bound is not None, PREC=dot_precision(q.dtype), num_warps=4, num_stages=2,
    )  # fmt: skip
    prune_scan_kernel[(B * H,)](
        need, base, longest, tails, start, T, T, base.shape[2] - 1, options.log_eps * LOG2E - SLACK, cdiv(T,
        KEY_UNIT).bit_length() + 1, H=H, RU=ROW_UNIT, KU=KEY_UNIT, BN=min(1024, max(16, triton.next_power_of_2(n_t))),
        GATE=2, TAIL=tail,
    )  # fmt: skip
    return start
