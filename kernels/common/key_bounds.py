"""Which rows read a unit of keys: closed gates, borders, windows and pruning as kernels that own keys need them.

The forward knows for each row its first key (``since``, ``start``). Both never move left along the rows, so that the
rows which read a key are one range: a binary search finds its end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.constants import KEY_UNIT, ROW_UNIT
from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import cdiv, row_strides


@triton.jit
def _halve(p, bound, lo, hi):
    """A step of the search for the first index i in lo .. hi with p[i] > bound, for a block of bounds."""
    mid = (lo + hi) // 2
    m = mid < hi
    up = m & (tl.load(p + mid, mask=m, other=0) <= bound)
    return tl.where(up, mid + 1, lo), tl.where(up | (mid >= hi), hi, mid)


@launched
@triton.jit(do_not_specialize=["T", "S", "n_steps", "stride_lb", "stride_lh"])
def key_bounds_kernel(p_since, p_start, p_end, p_full, p_open, p_cut, T, S, n_steps, stride_lb, stride_lh,
                      H: tl.constexpr, RU: tl.constexpr, KU: tl.constexpr, BU: tl.constexpr, HAS_SINCE: tl.constexpr,
                      HAS_START: tl.constexpr):  # fmt: skip
    """Per key unit [B, H, S / KU]: first row that sees none of it, first row that misses some of it, first that misses
    some without pruning, and the first row that pruning alone lets see none of it.

    The searches go side by side: each of their steps waits for memory.
    """
    i_bh, i_c = tl.program_id(0), tl.program_id(1)
    i_b, i_h = (i_bh // H).to(tl.int64), i_bh % H
    n_u, n_t = tl.cdiv(S, KU), tl.cdiv(T, RU)
    o_u = i_c * BU + tl.arange(0, BU)
    p_l = p_since + i_b * stride_lb + i_h.to(tl.int64) * stride_lh + (S - T)
    p_s = p_start + i_bh.to(tl.int64) * n_t
    none, rows = o_u * 0, o_u * 0 + T
    b_end, b_full, b_cut, h_end, h_full, h_cut = none, none, none, rows, rows, none + n_t
    for _ in range(n_steps):
        if HAS_SINCE:
            b_end, h_end = _halve(p_l, o_u * KU + KU - 1, b_end, h_end)
            b_full, h_full = _halve(p_l, o_u * KU, b_full, h_full)
        if HAS_START:
            b_cut, h_cut = _halve(p_s, o_u * KU, b_cut, h_cut)
    if not HAS_SINCE:
        b_end, b_full = rows, rows
    p_u = i_bh.to(tl.int64) * n_u + o_u
    tl.store(p_open + p_u, b_full, mask=o_u < n_u)
    if HAS_START:
        b_cut = tl.minimum(b_cut * RU, T)
        b_end, b_full = tl.minimum(b_end, b_cut), tl.minimum(b_full, b_cut)
        tl.store(p_cut + p_u, b_cut, mask=o_u < n_u)
    tl.store(p_end + p_u, b_end, mask=o_u < n_u)
    tl.store(p_full + p_u, b_full, mask=o_u < n_u)


class KeyBounds(NamedTuple):
    """The rows that see each unit of KEY_UNIT keys, as borders [B, H, ceil(S / KEY_UNIT)] int32.

    Attributes:
        end: rows from here on see nothing of the unit.
        full: rows before this one see all of it.
        open: rows before this one see all of it that pruning leaves.
        cut: rows from here on see nothing of it by pruning alone; undefined without pruning.
    """

    end: Tensor
    full: Tensor
    open: Tensor
    cut: Tensor


def key_bounds(visible: Tensor | None, computed: Tensor | None, B: int, T: int, H: int, S: int) -> KeyBounds:
    """For the backward pass, from the first visible keys of rows and the first computed ones of units of rows."""
    some = visible if visible is not None else computed
    assert some is not None
    n_u = cdiv(S, KEY_UNIT)
    bounds = KeyBounds(*torch.empty((4, B, H, n_u), dtype=torch.int32, device=some.device))
    key_bounds_kernel[(B * H, cdiv(n_u, 128))](
        some if visible is None else visible, some if computed is None else computed, *bounds, T, S,
        T.bit_length() + 1, *row_strides(visible), H=H, RU=ROW_UNIT, KU=KEY_UNIT, BU=128,
        HAS_SINCE=visible is not None, HAS_START=computed is not None,
    )  # fmt: skip
    return bounds
