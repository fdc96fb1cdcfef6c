"""A chunk of PaTH's tokens in closed form, in plain PyTorch: what a cached step and the cache are made with."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from attnzoo.algebra.diagonal import Diagonal
from attnzoo.algebra.transitions import ClosedForm, HeadGate, heads_first
from attnzoo.algebra.triangular import householder_block, in_order, rank_one_block
from attnzoo.algebra.values import as_given

CHUNK = 64  # most tokens that one pass over the cache takes


def chunk_of(q: Tensor, k: Tensor, w: Tensor, beta: Tensor, log_diag: Tensor | None) -> ClosedForm:
    """``householder_block``, where channels decay, too, with their log gates [..., C, K]."""
    if log_diag is None:
        return householder_block(q, k, w, beta)
    factors = in_order(w, beta, w.ndim > k.ndim)
    return rank_one_block(Diagonal(), q, k, *factors, HeadGate(log_diag=log_diag))


def close_chunk(
    q: Tensor, k: Tensor, w: Tensor, beta: Tensor, log_diag: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A chunk of N tokens in closed form, float32.

    Returns:
        scores [B, H, N, N], queries carried back to its start [B, N, H, K], keys carried to its end [B, N, G, K], and
        the transposed product of its factors [B, G, K, K].
    """
    H = q.shape[2]
    rep = H // k.shape[2]
    qh, kh, wh, bh = (heads_first(x, H, torch.float32) for x in (q, k, w, beta))
    decay = None if log_diag is None else heads_first(log_diag, H, torch.float32)
    with as_given(q):
        block = chunk_of(qh, kh, wh, bh, decay)
    total = cast(Tensor, block.total)[:, ::rep].contiguous()
    return block.scores.contiguous(), block.q.transpose(1, 2).contiguous(), block.k[:, ::rep].transpose(1, 2), total
