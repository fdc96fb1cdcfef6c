"""Tokens with n Householder-like factors, each of which writes (DeltaProduct), as n sub-tokens of one factor."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.algebra.parts import PARTS


def sub_tokens(q: Tensor, k: Tensor, v: Tensor, gate: Gate) -> tuple[Tensor, Tensor, Tensor, Gate]:
    r"""The inputs with n sub-tokens for every token, which the delta rule takes as T n
    tokens of one factor each.

    .. math:: S_t = e^{g_t} S_{t-1} H_{t1} \cdots H_{tn} + \sum_f \beta_{tf} v_{tf} k_{tf}^\top H_{t,f+1} \cdots H_{tn},
              \qquad H_{tf} = I - \beta_{tf} k_{tf} k_{tf}^\top

    A token's first sub-token has the other parts of its gate; its last sub-token has its query, and so its output
    (:func:`outputs`). Source: Siems et al., "DeltaProduct", 2025 (arXiv:2502.10297), section 3.

    Args:
        q: ``[B, T, H, K]``.
        k: ``[B, T, G, n, K]``, which w must be.
        v: ``[B, T, G, n, V]``.
        gate: w ``[B, T, G, n, K]``, beta ``[B, T, G, n]``, and any other parts, per token.

    Returns:
        ``[B, T n, H, K]``, ``[B, T n, G, K]``, ``[B, T n, G, V]`` and a gate without an axis of factors.
    """
    n = k.shape[3]

    def in_turn(x: Tensor) -> Tensor:
        return x.movedim(3, 2).flatten(1, 2)

    def at(x: Tensor, place: int, filler: float = 0.0) -> Tensor:
        rows = x.new_full((*x.shape[:2], n, *x.shape[2:]), filler)
        return torch.cat([rows[:, :, :place], x[:, :, None], rows[:, :, place + 1 :]], 2).flatten(1, 2)

    each = gate.per_token(q)
    parts = {
        name: in_turn(x) if PARTS[name].factored else at(x, 0, PARTS[name].neutral)
        for name in each.parts if (x := getattr(each, name)) is not None
    }  # fmt: skip
    return at(q, n - 1), in_turn(k), in_turn(v), replace(gate, **parts)


def token_outputs(o: Tensor, n: int) -> Tensor:
    """The tokens' outputs ``[B, T, ...]`` from those of their sub-tokens, ``[B, T n, ...]``."""
    return o[:, n - 1 :: n]
