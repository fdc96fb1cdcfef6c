r"""DeltaNet: a Householder-like transition that erases before it writes.

.. math:: S_t = S_{t-1} (I - \beta_t w_t w_t^\top) + v_t k_t^\top, \qquad |w_t| = 1,\; \beta_t \in [0, 2]

The delta rule of Schlag et al., 2021 (eq. 25) is w = k with unit keys and the write strength in the value
(:math:`\beta_t v_t` for v). Softmax dual: PaTH. Chunkwise form: Yang et al., "Parallelizing Linear
Transformers with the Delta Rule over Sequence Length", 2024, eq. 7-11, here with w apart from k:
with the erased row :math:`u_t = \beta_t w_t^\top S_{t-1}^\top`, :math:`L = \mathrm{tril}(\beta W W^\top, -1)` and
:math:`X = (I + L)^{-1} \mathrm{Diag}(\beta)` (the UT transform),

.. math:: U = X\,(W S_0^\top + \mathrm{tril}(W K^\top, -1)\, V).
"""

from typing import cast

import torch
from torch import Tensor

from attnzoo.fla_forms import fla_delta_rule
from attnzoo.gate import Gate
from attnzoo.linear import LinearForms
from attnzoo.transitions import Block, Transition

TITLE = "DeltaNet"
PAPER = "Yang et al., 2024 (arXiv:2406.06484)"
LAYER = {"gate": "delta", "feature_map": "silu", "qk_norm": "l2", "conv_size": 4, "output_norm": "rms"}


class Householder(Transition):
    """``R_t = I - beta_t w_t w_t^T``; ``total`` is the transposed product of the block, ``[..., K, K]``."""

    def apply(self, gate: Gate, state: Tensor) -> Tensor:
        w = cast(Tensor, gate.w)[..., None, :]
        return state - w.mT @ (cast(Tensor, gate.beta)[..., None, None] * (w @ state))

    def block(self, q: Tensor, k: Tensor, gate: Gate) -> Block:
        w, beta = cast(Tensor, gate.w), cast(Tensor, gate.beta)[..., None]
        C, K = w.shape[-2:]
        qw = (q @ w.mT).tril()
        wk = (w @ k.mT).tril(-1)
        lower = (beta * (w @ w.mT)).tril(-1)
        # X [wk | w] at once: the rows erased from the values of this block, and from the state before it
        erased = torch.linalg.solve_triangular(lower, beta * torch.cat([wk, w], -1), upper=False, unitriangular=True)
        from_values, from_state = erased.split([C, K], -1)
        return Block(
            scores=q @ k.mT - qw @ from_values,
            q=q - qw @ from_state,
            k=k - from_values.mT @ w,
            total=torch.eye(K, dtype=w.dtype, device=w.device) - w.mT @ from_state,
        )

    def carry(self, total: Tensor, state: Tensor) -> Tensor:
        return total @ state


_forms = LinearForms(Householder())
step, recurrent, parallel, chunk, extend = (
    _forms.step, _forms.recurrent, _forms.parallel, _forms.chunk, _forms.extend,
)  # fmt: skip
fla = fla_delta_rule
