"""How many keys rows hold, and the gradient of that by key."""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.kernels.common.approximate import log2
from attnzoo.kernels.common.forgetful_bias import (
    held_share,
    least_age,
    load_retention,
    load_tile_of_keys,
    retained,
    retention_slope,
    tokens_to_fall,
)
from attnzoo.kernels.common.jit_constants import TL_LOG2E
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.online_softmax import row_bounds
from attnzoo.kernels.common.tile_loads import head_and_tile


@launched
@triton.jit(do_not_specialize=["T"])
def retention_held_kernel(
    p_keep, p_gone, p_first, p_n, T, rule,
    G: tl.constexpr, KIND: tl.constexpr, HAS_FIRST: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Numbers [B, T, G] of the keys that rows hold; one program per block of rows."""
    i_bg, i_t = head_and_tile(tl.cdiv(T, BT))
    i_b, i_g = (i_bg // G).to(tl.int64), (i_bg % G).to(tl.int64)
    p_keep += i_bg.to(tl.int64) * KIND * tl.cdiv(T, BS) * BS
    p_gone += i_bg * tl.cdiv(T, BS)
    t, last = i_t * BT, tl.minimum(i_t * BT + BT, T) - 1
    b_t, o_s = t + tl.arange(0, BT), tl.arange(0, BS)
    b_first = b_t * 0
    if HAS_FIRST:
        b_first = tl.load(p_first + b_t, mask=b_t < T, other=0)
    lo, full, mid, n_left, n_diag = row_bounds(
        p_first, p_first, i_t, t, last, BT, BS, BT, BS, HAS_FIRST, False, least_age(rule, KIND)
    )
    b_held = tl.zeros([BT, BS], tl.float32)
    for i in range(n_left + n_diag):
        s = tl.where(i < n_diag, mid + i, lo + i - n_diag) * BS
        b_base, b_fade = load_tile_of_keys(p_keep, s, o_s, T, KIND)
        b_n = (b_t - s + 1).to(tl.float32)[:, None] - o_s.to(tl.float32)[None, :]
        b = held_share(retained(b_base[None, :], b_fade[None, :], b_n, rule, KIND, True), rule)
        b_held += tl.where((b_n >= 1.0) & ((s + o_s)[None, :] >= b_first[:, None]), b, 0.0)
    for i_s in range(full, mid):
        b_base, b_fade = load_tile_of_keys(p_keep, i_s * BS, o_s, T, KIND)
        if t - i_s * BS - (BS - 2) < tl.load(p_gone + i_s):
            b_n = (b_t - i_s * BS + 1).to(tl.float32)[:, None] - o_s.to(tl.float32)[None, :]
            b_held += held_share(retained(b_base[None, :], b_fade[None, :], b_n, rule, KIND, False), rule)
    tl.store(p_n + (i_b * T + b_t) * G + i_g, tl.sum(b_held, 1), mask=b_t < T)


@triton.jit
def _held_bwd_tile(b_dbase, b_dfade, b_base, b_fade, b_stop, p_dn, s, b_s, t, o_t, T, rule, G: tl.constexpr,
                   KIND: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """The gradient of keys from the row tile that starts at t, in log2 units of fade. # [BS, BT]"""
    b_dn = tl.load(p_dn + (t + o_t).to(tl.int64) * G, mask=t + o_t < T, other=0.0)
    b_n = (t - s + o_t + 1).to(tl.float32)[None, :] - (b_s - s).to(tl.float32)[:, None]
    b_r = retained(b_base[:, None], b_fade[:, None], b_n, rule, KIND, MASK)
    b_held = held_share(b_r, rule)
    b_slope = b_dn[None, :] * (b_held - b_held * b_held) * retention_slope(b_r, b_n, rule, KIND, MASK)
    if MASK:
        b_slope = tl.where((b_n >= 1.0) & ((t + o_t)[None, :] < b_stop[:, None]), b_slope, 0.0)
        b_n = tl.maximum(b_n, 1.0)
    b_dbase += b_slope
    if KIND == 2:
        b_dfade -= b_slope * log2(b_n)
    return b_dbase, b_dfade


@launched
@triton.jit(do_not_specialize=["T"])
def retention_held_bwd_kernel(
    p_keep, p_stop, p_dn, p_dkeep, T, rule, stride_rb, stride_rs, stride_rh,
    G: tl.constexpr, KIND: tl.constexpr, HAS_STOP: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """The gradient of keys, [B, T, G, KIND]; one program per block of keys."""
    i_bg, i_s = head_and_tile(tl.cdiv(T, BS))
    i_b, i_g = (i_bg // G).to(tl.int64), (i_bg % G).to(tl.int64)
    p_keep += i_b * stride_rb + i_g * stride_rh
    p_dn += i_b * T * G + i_g
    s = i_s * BS
    o_t, b_s = tl.arange(0, BT), s + tl.arange(0, BS)
    b_base, b_fade = load_retention(p_keep, b_s, T, stride_rs, KIND)
    hi, full, b_stop = T, T, b_s * 0 + T
    if HAS_STOP:
        hi, full = tl.load(p_stop + tl.minimum(s + BS, T) - 1), tl.load(p_stop + s)
        b_stop = tl.load(p_stop + b_s, mask=b_s < T, other=0)
    lo = s // BT * BT
    mid = tl.cdiv(s + BS - 1 + least_age(rule, KIND), BT) * BT  # from here rows may forget every key
    tail = tl.maximum(full // BT * BT, mid)  # from here rows do not see every key, or do not exist
    n_head, n_tail = tl.cdiv(tl.maximum(tl.minimum(mid, hi) - lo, 0), BT), tl.cdiv(tl.maximum(hi - tail, 0), BT)
    b_dbase, b_dfade = tl.zeros([BS, BT], tl.float32), tl.zeros([BS, BT], tl.float32)
    for i in range(n_head + n_tail):
        t = tl.where(i < n_head, lo + i * BT, tail + (i - n_head) * BT)
        b_dbase, b_dfade = _held_bwd_tile(
            b_dbase, b_dfade, b_base, b_fade, b_stop, p_dn, s, b_s, t, o_t, T, rule, G, KIND, True
        )
    gone = s + BS - 1 + tokens_to_fall(b_base, b_fade, b_s < T, rule[6], KIND)  # from here rows hold no key
    for t in range(mid, tl.minimum(tl.minimum(tail, hi), gone), BT):
        b_dbase, b_dfade = _held_bwd_tile(
            b_dbase, b_dfade, b_base, b_fade, b_stop, p_dn, s, b_s, t, o_t, T, rule, G, KIND, False
        )
    p_dkeep += ((i_b * T + b_s) * G + i_g) * KIND
    tl.store(p_dkeep, tl.sum(b_dbase, 1) * rule[3], mask=b_s < T)
    if KIND == 2:
        tl.store(p_dkeep + 1, tl.sum(b_dfade, 1) * (rule[3] * (1.0 / TL_LOG2E)), mask=b_s < T)
