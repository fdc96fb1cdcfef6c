"""In which order heads are worked on where pruning leaves them unequal: those with the most left to compute first.

A head that keeps everything takes programs that run for as long as dozens of a local head's. Where one of them is among
the last heads, most of the GPU waits for it. (Longest processing time first: Graham, "Bounds on Multiprocessing Timing
Anomalies", 1969.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import power_of_2

MOST_HEADS = 256  # with more, the last ones' share of the time is small


@launched
@triton.jit(do_not_specialize=["N", "L"])
def head_order_kernel(p_start, p_order, N, L, BN: tl.constexpr, BL: tl.constexpr):
    """The N rows of p_start [N, L] by their sums, the least first, equal ones in their own order; one program."""
    o_n, o_l = tl.arange(0, BN), tl.arange(0, BL)
    m_n = o_n < N
    b_sum = tl.zeros([BN], tl.float32)  # near enough: of an order nothing but time depends
    for i in range(0, L, BL):
        p_x = p_start + o_n[:, None] * L + (i + o_l)[None, :]
        b_sum += tl.sum(tl.load(p_x, mask=m_n[:, None] & (i + o_l < L)[None, :], other=0).to(tl.float32), 1)
    b_sum = tl.where(m_n, b_sum, float("inf"))
    m_before = (b_sum[None, :] < b_sum[:, None]) | ((b_sum[None, :] == b_sum[:, None]) & (o_n[None, :] < o_n[:, None]))
    tl.store(p_order + tl.sum(m_before.to(tl.int32), 1), o_n, mask=m_n)


def head_order(first_computed: Tensor | None, G: int) -> Tensor | None:
    """Key heads of all sequences, those whose rows begin earliest first; None where all are alike or there are many.

    Args:
        first_computed: [B, H, ceil(T / ROW_UNIT)] first keys, or None.
        G: key heads.

    Returns:
        [B * G] int32, a permutation.
    """
    if first_computed is None or first_computed.shape[0] * G > MOST_HEADS:
        return None
    N = first_computed.shape[0] * G
    order = torch.empty((N,), dtype=torch.int32, device=first_computed.device)
    L, BN = first_computed.numel() // N, max(16, power_of_2(N))
    head_order_kernel[(1,)](first_computed, order, N, L, BN=BN, BL=2048 // BN, num_warps=8)
    return order
