r"""Fragments of a sequence: what one of them must say of itself so that those after it can go on without it.

A fragment is a stretch of consecutive tokens. Its keys carried forward to its end, its queries carried back to its
start and the product :math:`P` of its transitions are all that is ever asked of it: between two fragments a < b

.. math:: \mathrm{logit}_{tj} = \lambda\, \tilde k_j^\top P_{a+1} \cdots P_{b-1}\, \tilde q_t
          + (\text{gates from } j \text{ to } a\text{'s end, of the fragments between, and up to } t)

is plain dense attention with one bias per key, whatever the variant, and the linear side is a scan of states over the
same products. Time is the second-to-last axis and heads come before it, as in :mod:`attnzoo.algebra.transitions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from attnzoo.algebra.block_decay import edge_decay
from attnzoo.algebra.transitions import HeadGate, Identity, Transition, cut

BLOCK = 64  # tokens whose closed form is written out at once


@dataclass(frozen=True, eq=False)
class CarriedFragment:
    """One fragment of T tokens in closed form.

    Args:
        q: queries carried back to its start, ``R_1 ... R_t q_t``, ``[B, H, T, K]``.
        k: keys carried forward to its end, ``(R_{j+1} ... R_T)^T k_j``, ``[B, H, T, K]``.
        entry: ``g_1 + ... + g_t``, ``[B, H, T]``.
        exit: ``g_{j+1} + ... + g_T``, ``[B, H, T]``.
        total: the diagonal blocks of ``(R_1 ... R_T)^T``, ``[B, H, K/P, P, P]``; None for the identity.
        decay: ``g_1 + ... + g_T``, ``[B, H]``.
    """

    q: Tensor
    k: Tensor
    entry: Tensor
    exit: Tensor
    total: Tensor | None
    decay: Tensor


def carried(transition: Transition, q: Tensor, k: Tensor, gate: HeadGate) -> CarriedFragment:
    """The closed form of the fragment with these tokens: blocks of them, and the products of the blocks around each."""
    g = q.new_zeros(q.shape[:-1]) if gate.log_decay is None else gate.log_decay
    entry, exit, decay = edge_decay(g)
    if isinstance(transition, Identity):
        return CarriedFragment(q, k, entry, exit, None, decay)
    T, K = q.shape[-2:]
    P = transition.width or K
    block = transition.block(cut(q, BLOCK), cut(k, BLOCK), gate.cut(BLOCK))
    eye = torch.eye(P, dtype=q.dtype, device=q.device).repeat(K // P, 1)
    totals = transition.carry(block.total, eye.expand(*block.q.shape[:-2], K, P)).unflatten(-2, (K // P, P))
    before, after, total = _around(totals)
    q, k = (x.flatten(2, 3)[:, :, :T] for x in (times(before.mT, block.q), times(after, block.k)))
    return CarriedFragment(q, k, entry, exit, total, decay)


def _around(totals: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The products of the blocks before each of N and of those after it, and of all, of ``[B, H, N, K/P, P, P]``.

    Neighbours are joined, and pairs of them, so that it takes log2(N) steps and each product is made once.
    """
    N = totals.shape[2]
    if N == 1:
        eye = torch.eye(totals.shape[-1], dtype=totals.dtype, device=totals.device).expand_as(totals)
        return eye, eye, totals[:, :, 0]
    odd = totals[:, :, N - N % 2 :]  # the last fragment where N is odd, else empty
    early, late = totals[:, :, : N - N % 2].unflatten(2, (-1, 2)).unbind(3)
    before, after, total = _around(torch.cat([late @ early, odd], 2))
    pairs = late.shape[2]
    first, last = before[:, :, :pairs], after[:, :, :pairs]
    before = torch.cat([torch.stack([first, early @ first], 3).flatten(2, 3), before[:, :, pairs:]], 2)
    after = torch.cat([torch.stack([last @ late, last], 3).flatten(2, 3), after[:, :, pairs:]], 2)
    return before, after, total


def times(total: Tensor | None, rows: Tensor) -> Tensor:
    """``M x`` for each row x of ``[..., C, K]``, with M by its diagonal blocks ``[..., K/P, P, P]`` (None: identity).

    With the ``total`` of later fragments it carries keys over them.
    """
    if total is None:
        return rows
    if total.shape[-3] == 1:
        return rows @ total[..., 0, :, :].mT
    if total.shape[-1] == 1:
        return rows * total[..., None, :, 0, 0]
    return torch.einsum("...npm,...cnm->...cnp", total, rows.unflatten(-1, (total.shape[-3], -1))).flatten(-2)


def joined(earlier: Tensor | None, later: Tensor | None) -> Tensor | None:
    """The ``total`` of two neighbours (None: identity)."""
    if earlier is None or later is None:
        return later if earlier is None else earlier
    return later @ earlier


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Dense attention with one bias per key, and its log-sum-exp: all that later rows want of earlier keys.

    Args:
        q: scaled queries, carried back to the start of their fragment, ``[B, H, T, K]``.
        k: keys carried forward to there, ``[B, H, S, K]``.
        v: ``[B, H, S, V]``.
        bias: the gates between each key and there, ``[B, H, S]``; -inf hides a key.

    Returns:
        o ``[B, H, T, V]`` and ``[B, H, T]``: zeros and -inf where every key is hidden.
    """
    logits = q @ k.mT + bias[..., None, :]
    hidden = torch.isneginf(logits).all(-1, keepdim=True)
    logits = logits.masked_fill(hidden, 0.0)
    o = (logits.softmax(-1) @ v).masked_fill(hidden, 0.0)
    return o, logits.logsumexp(-1).masked_fill(hidden[..., 0], -torch.inf)


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The attention over all keys from that over some at a time: outputs weighted by ``exp`` of their log-sum-exps.

    Args:
        parts: o ``[..., V]`` and lse ``[...]`` of each; a row must have a key in one of them at least.
    """
    lse = torch.stack([lse for _, lse in parts])
    shares = lse.softmax(0)
    o = sum(share[..., None] * o for share, (o, _) in zip(shares, parts, strict=True))
    return cast(Tensor, o), lse.logsumexp(0)


def state_of(fragment: CarriedFragment, v: Tensor) -> Tensor:
    """The state ``S^T [B, H, K, V]`` that a fragment leaves on the linear side from an empty one, with v as written."""
    return (fragment.k * fragment.exit.exp()[..., None]).mT @ v


def starts(totals: Sequence[Tensor | None], decays: Sequence[Tensor], states: Sequence[Tensor]) -> list[Tensor]:
    """The state that each fragment begins with, from what each leaves by itself: ``S_{a+1} = e^{G_a} P_a^T S_a + U_a``.

    Args:
        totals, decays: of each fragment, as :class:`CarriedFragment` has them.
        states: U, ``[B, H, K, V]`` each.
    """
    state, found = torch.zeros_like(states[0]), []
    for total, decay, left in zip(totals, decays, states, strict=True):
        found.append(state)
        state = decay.exp()[..., None, None] * times(total, state.mT).mT + left
    return found


def read(fragment: CarriedFragment, state: Tensor, scale: float) -> Tensor:
    """The part ``[B, H, T, V]`` of a fragment's output that comes from the state before it."""
    return scale * fragment.entry.exp()[..., None] * (fragment.q @ state)
