"""Tiles of dQ in the order in which the threads of Hopper's one pass hold them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def held_tile(p_x, BT: tl.constexpr, BK: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """A tile of dQ from the order in which M by N warps hold it. # [BT, BK]

    Loaded so that M warps hold it as they hold the result of a product.
    """
    o_n, o_c = tl.arange(0, N)[:, None, None, None], tl.arange(0, BK // N // 8)[None, :, None, None]
    o_m, o_l = tl.arange(0, M)[None, None, :, None], tl.arange(0, 128)[None, None, None, :]
    b_x = tl.load(p_x + ((o_c * N + o_n) * M + o_m) * 128 + o_l)
    b_x = tl.permute(tl.reshape(b_x, [N, BK // N // 8, M, 8, 4, 2, 2]), [2, 5, 3, 0, 1, 4, 6])
    return tl.reshape(b_x, [BT, BK])


@triton.jit
def tile_order(b_x, BT: tl.constexpr, BK: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """A tile of dQ from the order in which M by N warps of the product hold it. # [BT, BK]"""
    return tl.reshape(tl.permute(tl.reshape(b_x, [BK // N // 8, N, M, 8, 4, 2, 2]), [2, 5, 3, 1, 0, 4, 6]), [BT, BK])
