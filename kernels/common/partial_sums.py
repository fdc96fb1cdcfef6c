"""Sums over programs, each of which has written its share: the same numbers at each run, as no program waits."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import cdiv

WARPS = 8192  # that keep a large GPU busy, some time after one another


@triton.jit
def _sums(p_x, p_y, i_n, P, stride_p, stride_n, N: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr):
    """The sums of BN columns of x [P, N]."""
    o_n = i_n * BN + tl.arange(0, BN)
    b_sum = tl.zeros([BP, BN], tl.float32)
    for i in range(0, P, BP):
        o_p = i + tl.arange(0, BP)
        m = (o_p < P)[:, None] & (o_n < N)[None, :]
        b_sum += tl.load(p_x + o_p[:, None].to(tl.int64) * stride_p + o_n[None, :] * stride_n, mask=m, other=0.0)
    tl.store(p_y + o_n, tl.sum(b_sum, 0).to(p_y.dtype.element_ty), mask=o_n < N)


@launched
@triton.jit(do_not_specialize=["P", "P2"])
def partial_sums_kernel(
    p_x, p_y, P, stride_p, stride_n, p_x2, p_y2, P2, stride_p2, stride_n2, N: tl.constexpr, N2: tl.constexpr,
    BP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The sums of the columns of x [P, N], and of x2 [P2, N2]."""
    i = tl.program_id(0)
    FIRST: tl.constexpr = (N + BN - 1) // BN
    if i < FIRST:
        _sums(p_x, p_y, i, P, stride_p, stride_n, N, BP, BN)
    else:
        _sums(p_x2, p_y2, i - FIRST, P2, stride_p2, stride_n2, N2, BP, BN)


def partial_sums(*shares: tuple[Tensor, Tensor]) -> list[Tensor]:
    """The sums over the first axis of one or two tensors ``[P, ...]`` float32, whose further axes lie side by side or
    are one, in the shape and dtype of what each comes with: one launch."""
    given: list[Any] = []
    for x, like in shares:
        total = torch.empty(like.shape, dtype=like.dtype, device=x.device)
        given.append((x, total, x.shape[0], x.stride(0), x.stride(1) if x.ndim == 2 else 1))
    (N, *more), totals = [like.numel() for _, like in shares], [one[1] for one in given]
    N2 = more[0] if more else 0
    partial_sums_kernel[(cdiv(N, 32) + cdiv(N2, 32),)](*given[0], *given[-1], N, N2, 32, 32, num_warps=4)
    return totals


def program_shares(rows: int, tile: int, columns: int, num_warps: int) -> tuple[int, int]:
    """How many tiles of rows a program adds up, and how many programs that takes for each of the columns.

    More programs than keep a GPU busy would only write more shares.
    """
    tiles = cdiv(rows, tile)
    each = max(1, cdiv(tiles * columns * num_warps, WARPS))
    return each, cdiv(tiles, each)
