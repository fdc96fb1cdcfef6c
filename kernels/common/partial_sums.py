"""Sums over programs, each of which has written its share: the same numbers at each run, as no program waits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import cdiv

WARPS = 8192  # that keep a large GPU busy, some time after one another


@launched
@triton.jit(do_not_specialize=["P"])
def partial_sums_kernel(p_x, p_y, P, N: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr):
    """The sums of BN columns of x [P, N]."""
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    b_sum = tl.zeros([BP, BN], tl.float32)
    for i in range(0, P, BP):
        o_p = i + tl.arange(0, BP)
        m = (o_p < P)[:, None] & (o_n < N)[None, :]
        b_sum += tl.load(p_x + o_p[:, None].to(tl.int64) * N + o_n[None, :], mask=m, other=0.0)
    tl.store(p_y + o_n, tl.sum(b_sum, 0).to(p_y.dtype.element_ty), mask=o_n < N)


def partial_sums(partial: Tensor, like: Tensor) -> Tensor:
    """The sum over the first axis of ``partial [P, ...]`` float32, in the shape and dtype of ``like``."""
    P, N = partial.shape[0], partial[0].numel()
    total = torch.empty(like.shape, dtype=like.dtype, device=partial.device)
    partial_sums_kernel[(cdiv(N, 32),)](partial, total, P, N, 32, 32, num_warps=4)
    return total


def program_shares(rows: int, tile: int, columns: int, num_warps: int) -> tuple[int, int]:
    """How many tiles of rows a program adds up, and how many programs that takes for each of the columns.

    More programs than keep a GPU busy would only write more shares.
    """
    tiles = cdiv(rows, tile)
    each = max(1, cdiv(tiles * columns * num_warps, WARPS))
    return each, cdiv(tiles, each)
