"""Shares of the live pages of all heads, one list, by the programs of a step.

A head adds EXTRA to its length, about what it costs to begin one.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from attnzoo.kernels.common.launched import launched
from attnzoo.kernels.common.launching import power_of_2

FAR = 1 << 30  # a window over more keys than there can be


class Shares(NamedTuple):
    """The tensors that hold the list of a step's work: which program reads which pages.

    Args:
        first: the first live page of each head, ``[B, G]`` int32.
        begin: the first page that its rows read, ``[B G]`` int32.
        ends: the end of its part of the list, ``[B G]`` int32.
        turn: heads that pruning has looked through, ``[1]`` int32: the last one deals anew.
        extra: EXTRA.
    """

    first: Tensor
    begin: Tensor
    ends: Tensor
    turn: Tensor
    extra: int

    @staticmethod
    def empty(first: Tensor, extra: int) -> Shares:
        """The list of a step that begins at ``first``, not yet filled."""
        BG = first.numel()
        begin, ends, turn = first.new_empty(2 * BG + 1).split((BG, BG, 1))
        return Shares(first, begin, ends, turn, extra)

    @property
    def heads(self) -> int:
        """Heads that a program looks at at a time."""
        return min(1024, power_of_2(self.first.numel()))

    def deal(self, length: Tensor, T: int, window: int, page: int) -> None:
        """Fill it for T rows of sequences of so many tokens, these among them."""
        BG, G = self.first.numel(), self.first.shape[1]
        paged_shares_kernel[(1,)](
            self.first, length, self.begin, self.ends, self.turn, T, BG, G, window, EXTRA=self.extra, PAGE=page,
            BN=self.heads,
        )  # fmt: skip


@triton.jit
def deal_pages(p_first, p_length, p_count, p_begin, p_ends, p_turn, T, BG, G, window, EXTRA: tl.constexpr,
               PAGE: tl.constexpr, BN: tl.constexpr, HAS_COUNT: tl.constexpr):  # fmt: skip
    """The first page that each head's rows read, and the end of its part of the list, [B * G] int32. One program.

    HAS_COUNT: lengths are those before the step, which adds ``count`` tokens, T at most.
    """
    c_end = tl.zeros([], tl.int32)
    for i in range(0, BG, BN):
        o_n = i + tl.arange(0, BN)
        m_n = o_n < BG
        b_len = tl.load(p_length + o_n // G, mask=m_n, other=0).to(tl.int32)
        if HAS_COUNT:
            b_len += tl.minimum(tl.load(p_count + o_n // G, mask=m_n, other=0).to(tl.int32), T)
        b_begin = tl.load(p_first + o_n, mask=m_n, other=0)
        b_begin = tl.maximum(b_begin, tl.maximum(b_len - T - window + 1, 0) // PAGE)
        b_pages = tl.maximum((b_len + PAGE - 1) // PAGE - b_begin, 0)
        b_end = c_end + tl.cumsum(tl.where(m_n, b_pages + EXTRA, 0), 0)  # [BN]
        tl.store(p_begin + o_n, b_begin, mask=m_n)
        tl.store(p_ends + o_n, b_end, mask=m_n)
        c_end = tl.max(b_end, 0)
    tl.store(p_turn, 0)


@launched
@triton.jit(do_not_specialize=["T", "BG", "G", "window"])
def paged_shares_kernel(p_first, p_length, p_begin, p_ends, p_turn, T, BG, G, window, EXTRA: tl.constexpr,
                        PAGE: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """``deal_pages`` by itself."""
    deal_pages(p_first, p_length, p_length, p_begin, p_ends, p_turn, T, BG, G, window, EXTRA, PAGE, BN, False)
