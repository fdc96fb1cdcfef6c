"""From the products of queries and keys to their scores and back to gradients, as all portable kernels make them."""

from __future__ import annotations

import triton
import triton.language as tl

from attnzoo.kernels.common.jit_constants import TL_LOG2E


@triton.jit
def scores(b_s, scale2):
    """The scores of products b_s = q k^T, in log2 units; scale2: ``OpOptions.scale2``. Of a bound of |b_s|, a bound.

    scale2 is (scale, None), or (scale / softcap, softcap) for ``softcap tanh(s / softcap)`` in the place of a score.
    Products of -inf, with keys that do not exist, stay -inf.
    """
    b_y = b_s * scale2[0]
    if scale2[1] is not None:
        b_y = tl.where(b_y == float("-inf"), b_y, _tanh(b_y) * scale2[1])
    return b_y


@triton.jit
def product_gradient(b_ds, b_s, scale2):
    """The gradient of scaled products b_s from that of their scores, dS."""
    if scale2[1] is not None:
        b_t = _tanh(b_s * scale2[0])
        b_ds = b_ds * (1.0 - b_t * b_t)
    return b_ds


@triton.jit
def _tanh(b_x):
    """tanh to a few roundings of float32: its series near 0, where the quotient of exponentials would cancel."""
    b_a, b_2 = tl.abs(b_x), b_x * b_x
    b_e = tl.exp2(b_a * (-2.0 * TL_LOG2E))
    b_far = (1.0 - b_e) / (1.0 + b_e)
    b_near = b_x * (1.0 + b_2 * (-1 / 3 + b_2 * (2 / 15 + b_2 * (-17 / 315 + b_2 * (62 / 2835)))))
    return tl.where(b_a < 0.3, b_near, tl.where(b_x < 0.0, -b_far, b_far))
