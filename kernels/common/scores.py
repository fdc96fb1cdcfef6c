"""From the products of queries and keys to their scores, as all portable kernels make them."""

from __future__ import annotations

import triton


@triton.jit
def scores(b_s, scale2):
    """The scores of products b_s = q k^T, in log2 units; scale2: ``OpOptions.scale2``. Of a bound of |b_s|, a bound."""
    return b_s * scale2
