"""How many keys rows hold, and the gradient of that by key."""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.kernels.common.forgetful_bias import fade_share, held_share, load_retention, retained, retention_slope
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.tile_loads import head_and_tile


@launched
@triton.jit(do_not_specialize=["T"])
def retention_held_kernel(
    p_keep, p_first, p_n, T, rule, stride_rb, stride_rs, stride_rh,
    G: tl.constexpr, KIND: tl.constexpr, HAS_FIRST: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Numbers [B, T, G] of the keys that rows hold; one program per block of rows."""
    i_bg, i_t = head_and_tile(tl.cdiv(T, BT))
    i_b, i_g = (i_bg // G).to(tl.int64), (i_bg % G).to(tl.int64)
    p_keep += i_b * stride_rb + i_g * stride_rh
    b_t, o_s = i_t * BT + tl.arange(0, BT), tl.arange(0, BS)
    lo, b_first = 0, b_t * 0
    if HAS_FIRST:
        lo = tl.load(p_first + i_t * BT) // BS
        b_first = tl.load(p_first + b_t, mask=b_t < T, other=0)
    b_n = tl.zeros([BT], tl.float32)
    for i_s in range(lo, tl.cdiv(tl.minimum(i_t * BT + BT, T), BS)):
        b_s = i_s * BS + o_s
        b_base, b_fade = load_retention(p_keep, b_s, T, stride_rs, KIND)
        b_age = (b_t[:, None] - b_s[None, :]).to(tl.float32)
        b_held = held_share(retained(b_base[None, :], b_fade[None, :], b_age, rule, KIND), rule)  # [BT, BS]
        b_n += tl.sum(tl.where((b_age >= 0.0) & (b_s[None, :] >= b_first[:, None]), b_held, 0.0), 1)
    tl.store(p_n + (i_b * T + b_t) * G + i_g, b_n, mask=b_t < T)


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
    o_t, b_s = tl.arange(0, BT), i_s * BS + tl.arange(0, BS)
    b_base, b_fade = load_retention(p_keep, b_s, T, stride_rs, KIND)
    hi, b_stop = T, b_s * 0 + T
    if HAS_STOP:
        hi = tl.load(p_stop + tl.minimum(i_s * BS + BS, T) - 1)
        b_stop = tl.load(p_stop + b_s, mask=b_s < T, other=0)
    b_dbase, b_dfade = tl.zeros([BS], tl.float32), tl.zeros([BS], tl.float32)
    for t in range(i_s * BS // BT * BT, hi, BT):
        b_t = t + o_t
        b_dn = tl.load(p_dn + (i_b * T + b_t) * G + i_g, mask=b_t < T, other=0.0)
        b_age = (b_t[None, :] - b_s[:, None]).to(tl.float32)
        b_r = retained(b_base[:, None], b_fade[:, None], b_age, rule, KIND)  # [BS, BT]
        b_held = held_share(b_r, rule)
        m = (b_age >= 0.0) & (b_t[None, :] < b_stop[:, None])
        b_dr = tl.where(m, b_dn[None, :] * rule[3] * b_held * (1.0 - b_held), 0.0)
        b_slope = b_dr * retention_slope(b_r, b_age, rule, KIND)
        b_dbase += tl.sum(b_slope, 1)
        if KIND == 2:
            b_dfade += tl.sum(b_slope * fade_share(b_age), 1)
    p_dkeep += ((i_b * T + b_s) * G + i_g) * KIND
    tl.store(p_dkeep, b_dbase, mask=b_s < T)
    if KIND == 2:
        tl.store(p_dkeep + 1, b_dfade, mask=b_s < T)
