r"""DeltaNet: a Householder-like transition that erases before it writes.

.. math:: S_t = S_{t-1} (I - \beta_t w_t w_t^\top) + v_t k_t^\top, \qquad |w_t| = 1,\; \beta_t \in [0, 2]

The delta rule of Schlag et al., 2021, is w = k with unit keys and the write strength in the value
(:math:`\beta_t v_t` for v). Softmax dual: PaTH. Chunkwise form: Yang et al., "Parallelizing Linear
Transformers with the Delta Rule over Sequence Length", 2024, here with w apart from k:
with the erased row :math:`u_t = \beta_t w_t^\top S_{t-1}^\top`, :math:`L = \mathrm{tril}(\beta W W^\top, -1)` and
:math:`X = (I + L)^{-1} \mathrm{Diag}(\beta)` (the UT transform),

.. math:: U = X\,(W S_0^\top + \mathrm{tril}(W K^\top, -1)\, V).
"""

from typing import Any, cast

import torch
from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.algebra.transitions import Block, Transition
from attnzoo.forms.fla import FLA_DELTA_RULE
from attnzoo.forms.linear import LinearForms

TITLE = "DeltaNet"
PAPER = "Yang et al., 2024 (arXiv:2406.06484)"
EQUATIONS = (
    "Rₜ = I − βₜ wₜ wₜᵀ",
    "Sₜ = Sₜ₋₁ Rₜ + vₜ kₜᵀ",
    "oₜ = Sₜ (λ qₜ)",
    "   = Σⱼ (λ kⱼᵀ Rⱼ₊₁ ⋯ Rₜ qₜ) vⱼ",
)
LAYER = {"gate": "delta", "feature_map": "silu", "qk_norm": "l2", "conv_size": 4, "output_norm": "rms"}

BASE = 8  # tokens of the smallest block that is inverted row by row


class Householder(Transition):
    """``R_t = I - beta_t w_t w_t^T``; ``total`` is the transposed product of the block, ``[..., K, K]``."""

    def apply(self, gate: Gate, state: Tensor) -> Tensor:
        w = cast(Tensor, gate.w)[..., None, :]
        return state - w.mT @ (cast(Tensor, gate.beta)[..., None, None] * (w @ state))

    def block(self, q: Tensor, k: Tensor, gate: Gate) -> Block:
        w, beta = cast(Tensor, gate.w), cast(Tensor, gate.beta)[..., None]
        qw = (q @ w.mT).tril_()
        wk = (w @ k.mT).tril_(-1)
        lower = (beta * (w @ w.mT)).tril_(-1)
        inverse = unit_lower_inverse(lower) * beta.mT  # X
        from_values, from_state = inverse @ wk, inverse @ w
        return Block(
            scores=q @ k.mT - qw @ from_values,
            q=q - qw @ from_state,
            k=k - from_values.mT @ w,
            total=torch.eye(w.shape[-1], dtype=w.dtype, device=w.device) - w.mT @ from_state,
        )

    def carry(self, total: Tensor, state: Tensor) -> Tensor:
        return total @ state


class _UnitLowerInverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lower: Tensor) -> Tensor:
        C = lower.shape[-1]
        size = max(BASE, 1 << (C - 1).bit_length())
        lower = torch.nn.functional.pad(lower, (0, size - C, 0, size - C))
        blocks = lower.unflatten(-1, (-1, BASE)).unflatten(-3, (-1, BASE)).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
        inverse = torch.eye(BASE, dtype=lower.dtype, device=lower.device).expand(blocks.shape).contiguous()
        for i in range(1, BASE):  # forward substitution, row by row
            inverse[..., i, :i] = -(blocks[..., i : i + 1, :i] @ inverse[..., :i, :i])[..., 0, :]
        m = BASE
        while m < size:  # [[A, 0], [C, D]]^-1 = [[A^-1, 0], [-D^-1 C A^-1, D^-1]]
            first, second = inverse.unflatten(-3, (-1, 2)).unbind(-3)
            pairs = lower.unflatten(-1, (-1, 2 * m)).unflatten(-3, (-1, 2 * m)).diagonal(dim1=-4, dim2=-2)
            corner = pairs.movedim(-1, -3)[..., m:, :m]
            cross = -(second @ corner @ first)
            inverse = torch.cat([torch.cat([first, torch.zeros_like(first)], -1), torch.cat([cross, second], -1)], -2)
            m *= 2
        result: Tensor = inverse[..., 0, :C, :C]
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        transposed: Tensor = ctx.saved_tensors[0].mT
        return -(transposed @ grads[0] @ transposed).tril(-1)


def unit_lower_inverse(lower: Tensor) -> Tensor:
    """``(I + lower)^{-1}`` for strictly lower triangular matrices ``[..., C, C]``, in products of blocks."""
    return cast(Tensor, _UnitLowerInverse.apply(lower))  # type: ignore[no-untyped-call]


FORMS = LinearForms(Householder(), chunk_size=32, kernels={"fla": FLA_DELTA_RULE})
