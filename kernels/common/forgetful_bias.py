"""The bias of a key by its retention, and its gradient, as kernels compute them pair by pair (``retention.py``).

KIND is the number of a key's numbers: 0 without retention, 1 for a rate, 2 for base and fade. ``rule`` is
``numbers_of(Rule)``: threshold, remembered tokens, limit in log2 units, temperature (None: infinite).
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.kernels.common.jit_constants import TL_LOG2E


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
def retained(b_base, b_fade, b_age, rule, KIND: tl.constexpr):
    """r of keys at their ages; b_base and b_fade broadcast to b_age, float32, which may be negative."""
    if KIND == 2:
        b_r = 1.0 / (1.0 + tl.exp2(b_fade * tl.log2(1.0 + tl.maximum(b_age, 0.0)) - b_base))
    else:
        b_r = tl.exp2(-b_base * tl.maximum(b_age, 1.0))
    return tl.where(b_age < rule[1], 1.0, b_r)


@triton.jit
def forgetful_bias(b_r, rule):
    """B of retentions, in log2 units."""
    if rule[3] is None:
        b = tl.where(b_r < rule[0], float("-inf"), 0.0)
    else:
        b = tl.maximum(-tl.log2(1.0 + tl.exp2((rule[0] - b_r) * (rule[3] * TL_LOG2E))), -rule[2])
    return b


@triton.jit
def row_forgetful_bias(p_keep, s, o_s, b_pos, S, stride, rule, KIND: tl.constexpr):
    """B of the keys s + o_s for rows at b_pos. # [BT, BS]"""
    b_base, b_fade = load_retention(p_keep, s + o_s, S, stride, KIND)
    b_age = (b_pos[:, None] - (s + o_s)[None, :]).to(tl.float32)
    return forgetful_bias(retained(b_base[None, :], b_fade[None, :], b_age, rule, KIND), rule)


@triton.jit
def held_share(b_r, rule):
    """sigma(temperature (r - threshold)) of retentions: how likely a key is still held."""
    if rule[3] is None:
        b = tl.where(b_r < rule[0], 0.0, 1.0)
    else:
        b = 1.0 / (1.0 + tl.exp2((rule[0] - b_r) * (rule[3] * TL_LOG2E)))
    return b


@triton.jit
def bias_gradient(b_db, b_r, rule):
    """The gradient of retentions from that of B, b_db."""
    b_dr = b_r * 0.0
    if rule[3] is not None:
        b_u = tl.exp2((rule[0] - b_r) * (rule[3] * TL_LOG2E))
        b_dr = tl.where(tl.log2(1.0 + b_u) <= rule[2], b_db * rule[3] * (b_u / (1.0 + b_u)), 0.0)
    return b_dr


@triton.jit
def retention_gradient(b_dr, b_r, b_age, rule, KIND: tl.constexpr):
    """Gradients of a key's base and fade (for a rate: of it, twice), pair by pair, from that of r, b_dr."""
    b_dr = tl.where(b_age >= rule[1], b_dr, 0.0)
    if KIND == 2:
        b_base = b_dr * b_r * (1.0 - b_r)
        b_fade = b_base * (tl.log2(1.0 + tl.maximum(b_age, 0.0)) / -TL_LOG2E)
    else:
        b_base = -b_dr * b_r * tl.maximum(b_age, 1.0)
        b_fade = b_base
    return b_base, b_fade
