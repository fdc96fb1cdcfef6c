"""New tokens of PaTH, and the products of the groups of pages whose keys they carry, under one name each."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class PathTokens(NamedTuple):
    """New tokens of a step, besides their queries and values.

    Args:
        k: [B, T, G, K], w: [B, T, G, K] of length 1 or less, beta: [B, T, G] in [0, 2]. With n factors per token, whose
            product in that order is R_t, w is [B, T, G, n, K] and beta [B, T, G, n].
        log_decay: [B, T, H] float32, <= 0, where the state has gates.
        counts: [B] int32, how many of the T tokens each sequence gets: its last ones. None: all.
    """

    k: Tensor
    w: Tensor
    beta: Tensor
    log_decay: Tensor | None = None
    counts: Tensor | None = None


class OpenGroup(NamedTuple):
    """The group of pages that is not whole, float32.

    Args:
        keys: [B, G, S, K], S a multiple of PAGE, as the last token left them.
        factor: [B, G, K, K], transposed product of the group's factors.
        base: [B] int32, how many of the first groups have no product, as their keys stand as the last token of all of
            them left them.
    """

    keys: Tensor
    factor: Tensor
    base: Tensor


class PathGroups(NamedTuple):
    """The products by which queries reach the keys of groups of pages, and the open group.

    Args:
        factors: [B, G, M, K, K] float32, transposed products of whole groups; M groups hold the table's N pages.
        open: the group that is not whole.
    """

    factors: Tensor
    open: OpenGroup
