"""The bias of a key by its retention, and its gradient, as kernels compute them pair by pair (``retention.py``).

KIND is the number of a key's numbers: 0 without retention, 1 for a rate, 2 for base and fade. ``rule`` is
``numbers_of(Rule)``: threshold, remembered tokens, limit in log2 units, temperature (None: infinite), exp(-limit), and
how far r has fallen where B is at its limit and where a key counts as not held. NEAR: whether ages may be below those
of remembered tokens, or negative.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.kernels.common.approximate import log2, reciprocal
from attnzoo.kernels.common.jit_constants import TL_LOG2E


@triton.jit
def least_age(rule, KIND: tl.constexpr):
    """The age of keys from which on they may be forgotten. # int32"""
    return 0 if KIND == 0 else tl.minimum(rule[1], 1e9).to(tl.int32)


@triton.jit
def load_retention(p_keep, b_s, S, stride, KIND: tl.constexpr):
    """Base (in log2 units) and fade of the keys b_s of one head. # [len(b_s)] each"""
    p = p_keep + b_s.to(tl.int64) * stride
    b_base = tl.load(p, mask=b_s < S, other=0.0)
    b_fade = b_base
    if KIND == 2:
        b_fade = tl.load(p + 1, mask=b_s < S, other=0.0)
    return b_base * TL_LOG2E, b_fade


@triton.jit
def fallen(b_base, b_fade, b_n, KIND: tl.constexpr):
    """How far r has fallen of keys that n >= 1 tokens from theirs on have seen: log2(1 / r - 1), or -log2(r)."""
    return b_fade * log2(b_n) - b_base if KIND == 2 else b_base * b_n - b_base


@triton.jit
def tokens_to_fall(b_base, b_fade, m, least, KIND: tl.constexpr):
    """Tokens after which all keys of m have fallen as far as ``least``, at most 2^30. # int32 scalar"""
    if KIND == 2:
        b_n = tl.exp2(tl.clamp((least + b_base) / tl.maximum(b_fade, 1e-9), 0.0, 30.0))
    else:
        b_n = 1.0 + least / tl.maximum(b_base, 1e-9)
    return tl.minimum(tl.max(tl.where(m, b_n, 1.0), 0) * 1.0001, 1.0 * 2**30).to(tl.int32) + 1


@triton.jit
def retained(b_base, b_fade, b_n, rule, KIND: tl.constexpr, NEAR: tl.constexpr):
    """r of keys that n tokens from theirs on have seen (1 + age), float32; b_base and b_fade broadcast to b_n."""
    b = fallen(b_base, b_fade, tl.maximum(b_n, 1.0 if KIND == 2 else 2.0) if NEAR else b_n, KIND)
    b_r = reciprocal(1.0 + tl.exp2(b)) if KIND == 2 else tl.exp2(-b)
    return tl.where(b_n <= rule[1], 1.0, b_r) if NEAR else b_r


@triton.jit
def odds_gone(b_r, rule):
    """(1 - share) / share of :func:`held_share`, for a finite temperature."""
    b_sharp = rule[3] * TL_LOG2E
    return tl.exp2(rule[0] * b_sharp - b_r * b_sharp)


@triton.jit
def forgetful_bias(b_r, rule):
    """B of retentions, in log2 units."""
    if rule[3] is None:
        b = tl.where(b_r < rule[0], float("-inf"), 0.0)
    else:
        b = tl.maximum(-log2(1.0 + odds_gone(b_r, rule)), -rule[2])
    return b


@triton.jit
def load_tile_of_keys(p_numbers, s, o_s, S, KIND: tl.constexpr):
    """Base (in log2 units) and fade of the keys s + o_s, one tile, of one head of ``forgotten.TiledKeys``."""
    b_base = tl.load(p_numbers + s + o_s)
    b_fade = b_base
    if KIND == 2:
        b_fade = tl.load(p_numbers + tl.cdiv(S, o_s.shape[0]) * o_s.shape[0] + s + o_s)
    return b_base, b_fade


@triton.jit
def row_forgetful_bias(p_keep, p_gone, s, o_s, b_pos, p_first, S, rule, KIND: tl.constexpr, NEAR: tl.constexpr):
    """B of the keys s + o_s, one tile of ``forgotten.TiledKeys``, for rows at b_pos, from p_first on. # [BT, BS]"""
    b_base, b_fade = load_tile_of_keys(p_keep, s, o_s, S, KIND)
    b_n = (b_pos - s + 1).to(tl.float32)[:, None] - o_s.to(tl.float32)[None, :]
    if NEAR:
        b = forgetful_bias(retained(b_base[None, :], b_fade[None, :], b_n, rule, KIND, NEAR), rule)
    elif p_first - s - (o_s.shape[0] - 2) >= tl.load(p_gone + s // o_s.shape[0]):
        b = tl.zeros_like(b_n) + (float("-inf") if rule[3] is None else -rule[2])
    else:
        b = forgetful_bias(retained(b_base[None, :], b_fade[None, :], b_n, rule, KIND, NEAR), rule)
    return b


@triton.jit
def held_share(b_r, rule):
    """sigma(temperature (r - threshold)) of retentions, of a finite temperature: how likely a key is still held."""
    return reciprocal(1.0 + odds_gone(b_r, rule))


@triton.jit
def kept_weight(b_r, rule):
    """exp(B) of retentions, of a finite temperature, and the derivative of B by r."""
    b_odds = odds_gone(b_r, rule)
    b_held = reciprocal(1.0 + b_odds)
    return tl.maximum(b_held, rule[4]), tl.where(b_held >= rule[4], rule[3] * (b_odds * b_held), 0.0)


@triton.jit
def retention_slope(b_r, b_n, rule, KIND: tl.constexpr, NEAR: tl.constexpr):
    """The derivative of r by a key's base, or by its rate."""
    b = b_r - b_r * b_r if KIND == 2 else b_r - b_r * (tl.maximum(b_n, 2.0) if NEAR else b_n)
    return tl.where(b_n > rule[1], b, 0.0) if NEAR else b
