"""The number of heads computed at a time: carried queries and keys of all levels need a workspace, which is bounded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import overload

from torch import Tensor

from attnzoo.kernels.levels.layout import BLOCK, level_count

BUDGET = 17 << 27  # bytes of workspace for carried operands and their gradients (one key head may need more)
KEPT_BUDGET = 4 << 30  # where the operands are kept beside it, and time counts for more than memory


@dataclass(frozen=True)
class HeadGroup:
    """Some batches with all their heads, or some key heads (and their query heads) of one batch."""

    b: slice
    g: slice
    h: slice

    def queries(self, x: Tensor) -> Tensor:
        """HeadGroup of x [B, T, H, ...]."""
        return x[self.b, :, self.h]

    def keys(self, x: Tensor) -> Tensor:
        """HeadGroup of x [B, T, G, ...]."""
        return x[self.b, :, self.g]

    @overload
    def rows(self, x: Tensor) -> Tensor: ...
    @overload
    def rows(self, x: None) -> None: ...
    def rows(self, x: Tensor | None) -> Tensor | None:
        """The part of x [B, H, ...] that belongs to this group; all groups share an x [1, 1, T]."""
        return x if x is None or x.shape[:2] == (1, 1) else x[self.b, self.h]

    def heads(self, x: Tensor | None) -> Tensor | None:
        """The entries of x [H] that belong to this group."""
        return x if x is None else x[self.h]


def head_groups(
    q: Tensor, k: Tensor, backward: bool, one_pass: bool = False, decayed: bool = False, kept: bool = False
) -> list[HeadGroup]:
    """Parts whose workspaces stay below their budget, as even as possible: (batches or key heads) of q [B, T, H, K].

    Args:
        decayed: whether channels decay, too: then a block keeps the products of its pairs.
        kept: whether the carried operands are kept elsewhere, so that only their gradients need a workspace.
    """
    (B, T, H, K), G = map(int, q.shape), int(k.shape[2])  # a compiler may have symbols there
    rep, n = H // G, level_count(T)
    rows = T * (rep + 1) * K * q.element_size() * (n / 2 + 2)
    squares = T * rep * BLOCK * 4 * (6 if decayed else 1) + T * K * K * 4 * 2 / BLOCK
    sums = T * (rep * n / 2 + 1) * K * 4 if one_pass else 0  # dq of the levels and dv in float32
    budget, copies = (KEPT_BUDGET, 1) if kept else (BUDGET, 2 if backward else 1)
    heads = max(1, int(budget / ((rows + squares) * copies + sums)))
    if heads >= G:
        return [HeadGroup(b, slice(0, G), slice(0, H)) for b in _even(B, heads // G)]
    return [
        HeadGroup(slice(b, b + 1), g, slice(g.start * rep, g.stop * rep)) for b in range(B) for g in _even(G, heads)
    ]


def _even(n: int, most: int) -> list[slice]:
    """0 .. n in as few slices of up to ``most`` as can be, or some more if they are equal: kernels compile for each
    number of heads."""
    count = math.ceil(n / most)
    count = next((c for c in range(count, count + count // 2 + 1) if n % c == 0), count)
    size = math.ceil(n / count)
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]
