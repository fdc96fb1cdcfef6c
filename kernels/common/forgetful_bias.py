"""The bias of a key by its retention, and its gradient, as kernels compute them pair by pair (``retention.py``).

KIND is the number of a key's numbers: 0 without retention, 1 for a rate, 2 for base and fade. ``rule`` is
``numbers_of(Rule)``: threshold, remembered tokens, limit in log2 units, temperature (None: infinite).
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.kernels.common.approximate import log2, reciprocal
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
        b_r = reciprocal(1.0 + tl.exp2(b_fade * log2(1.0 + tl.maximum(b_age, 0.0)) - b_base))
    else:
        b_r = tl.exp2(-b_base * tl.maximum(b_age, 1.0))
    return tl.where(b_age < rule[1], 1.0, b_r)


@triton.jit
def forgetful_bias(b_r, rule):
    """B of retentions, in log2 units."""
    if rule[3] is None:
        b = tl.where(b_r < rule[0], float("-inf"), 0.0)
    else:
        b = tl.maximum(-log2(1.0 + tl.exp2((rule[0] - b_r) * (rule[3] * TL_LOG2E))), -rule[2])
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
        b = reciprocal(1.0 + tl.exp2((rule[0] - b_r) * (rule[3] * TL_LOG2E)))
    return b


@triton.jit
def bias_slope(b_r, rule):
    """The derivative of B by r."""
    b = b_r * 0.0
    if rule[3] is not None:
        b_u = tl.exp2((rule[0] - b_r) * (rule[3] * TL_LOG2E))
        b = tl.where(log2(1.0 + b_u) <= rule[2], rule[3] * (b_u * reciprocal(1.0 + b_u)), 0.0)
    return b


@triton.jit
def retention_slope(b_r, b_age, rule, KIND: tl.constexpr):
    """The derivative of r by a key's base, or by its rate."""
    b = b_r * (1.0 - b_r) if KIND == 2 else -b_r * tl.maximum(b_age, 1.0)
    return tl.where(b_age >= rule[1], b, 0.0)


@triton.jit
def fade_share(b_age):
    """The derivative by fade over that by base, -log(1 + age); written so that compilers do not keep it from r on."""
    return (1.0 - log2(2.0 + 2.0 * tl.maximum(b_age, 0.0))) * (1.0 / TL_LOG2E)
