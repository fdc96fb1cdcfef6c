"""Which rows read a unit of keys: closed gates, borders, windows and pruning as kernels that own keys need them.

The forward knows for each row its first key (``since``, ``start``). Both never move left along the rows, so that the
rows which read a key are one range: a binary search finds its end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.constants import KEY_UNIT, ROW_UNIT
from attnzoo.kernels.common.launching import cdiv, since_strides


@triton.jit
def _first_above(p, n, bound, n_steps):
    """First index i < n with p[i] > bound (n if none) for a block of bounds; p is monotone."""
    lo, hi = bound * 0, bound * 0 + n
    for _ in range(n_steps):
        mid = (lo + hi) // 2
        m = mid < hi
        up = m & (tl.load(p + mid, mask=m, other=0) <= bound)
        lo, hi = tl.where(up, mid + 1, lo), tl.where(up | (mid >= hi), hi, mid)
    return lo


@triton.jit(do_not_specialize=["T", "S", "n_steps", "stride_lb", "stride_lh"])
def key_bounds_kernel(p_since, p_start, p_end, p_full, T, S, n_steps, stride_lb, stride_lh, H: tl.constexpr,
                      RU: tl.constexpr, KU: tl.constexpr, BU: tl.constexpr, HAS_SINCE: tl.constexpr,
                      HAS_START: tl.constexpr):  # fmt: skip
    """Per key unit [B, H, S / KU]: first row that sees none of it, first row that misses some of it."""
    i_bh, i_c = tl.program_id(0), tl.program_id(1)
    i_b, i_h = (i_bh // H).to(tl.int64), i_bh % H
    n_u = tl.cdiv(S, KU)
    o_u = i_c * BU + tl.arange(0, BU)
    b_end = o_u * 0 + T
    b_full = o_u * 0 + T
    if HAS_SINCE:
        p_l = p_since + i_b * stride_lb + i_h.to(tl.int64) * stride_lh + (S - T)
        b_end = _first_above(p_l, T, o_u * KU + KU - 1, n_steps)
        b_full = _first_above(p_l, T, o_u * KU, n_steps)
    if HAS_START:
        n_t = tl.cdiv(T, RU)
        b_cut = tl.minimum(_first_above(p_start + i_bh.to(tl.int64) * n_t, n_t, o_u * KU, n_steps) * RU, T)
        b_end, b_full = tl.minimum(b_end, b_cut), tl.minimum(b_full, b_cut)
    p_u = i_bh.to(tl.int64) * n_u + o_u
    tl.store(p_end + p_u, b_end, mask=o_u < n_u)
    tl.store(p_full + p_u, b_full, mask=o_u < n_u)


def key_bounds(since: Tensor | None, start: Tensor | None, B: int, T: int, H: int, S: int) -> tuple[Tensor, Tensor]:
    """The same boundaries seen from the keys, for the backward pass.

    Returns:
        end, full [B, H, ceil(S / KEY_UNIT)] int32: rows >= end see nothing of the unit, rows < full see all of it.
    """
    some = since if since is not None else start
    assert some is not None
    n_u = cdiv(S, KEY_UNIT)
    end = torch.empty((B, H, n_u), dtype=torch.int32, device=some.device)
    full = torch.empty_like(end)
    key_bounds_kernel[(B * H, cdiv(n_u, 128))](
        some if since is None else since, some if start is None else start, end, full, T, S, T.bit_length() + 1,
        *since_strides(since), H=H, RU=ROW_UNIT, KU=KEY_UNIT, BU=128, HAS_SINCE=since is not None,
        HAS_START=start is not None,
    )  # fmt: skip
    return end, full
