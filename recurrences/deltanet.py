r"""DeltaNet: erases along w_t, then writes v_t k_t^T; with ``delta_rule=True``, w = k and beta_t v_t k_t^T is written.

.. math:: S_t = S_{t-1} (I - \beta_t w_t w_t^\top) + v_t k_t^\top, \qquad |w_t| = 1,\; \beta_t \in [0, 2]

The delta rule of Schlag et al., 2021, is w = k with unit keys and the write strength in the value
(:math:`\beta_t v_t` for v). Softmax dual: PaTH. Chunkwise form: Yang et al., "Parallelizing Linear
Transformers with the Delta Rule over Sequence Length", 2024, here with w apart from k:
with the erased row :math:`u_t = \beta_t w_t^\top S_{t-1}^\top`, :math:`L = \mathrm{tril}(\beta W W^\top, -1)` and
:math:`X = (I + L)^{-1} \mathrm{Diag}(\beta)` (the UT transform),

.. math:: U = X\,(W S_0^\top + \mathrm{tril}(W K^\top, -1)\, V).
"""

from typing import cast

from torch import Tensor

from attnzoo.algebra.parts import PARTS
from attnzoo.algebra.transitions import ClosedForm, HeadGate, Identity, Transition
from attnzoo.algebra.triangular import RankOne, in_order, rank_one_block
from attnzoo.forms.backends.fla import FLA_DELTA_RULE
from attnzoo.forms.backends.recurrent import FEW_TOKENS
from attnzoo.forms.linear import LinearForms

TITLE = "DeltaNet"
PAPER = "Yang et al., 2024 (arXiv:2406.06484)"
EQUATIONS = (
    "Rₜ = I − βₜ wₜ wₜᵀ",
    "Sₜ = Sₜ₋₁ Rₜ + vₜ kₜᵀ",
    "oₜ = Sₜ (λ qₜ)",
    "   = Σⱼ (λ kⱼᵀ Rⱼ₊₁ ⋯ Rₜ qₜ) vⱼ",
)
LAYER = {"gate": "delta", "qk_norm": "l2", "conv_size": 4, "output_norm": "rms"}


class Householder(Transition):
    """``R_t = I - beta_t w_t w_t^T``, or the product of n such factors; ``total`` is the block's transposed product.

    ``total`` is ``[..., K, K]``. In a :class:`~attnzoo.algebra.transitions.Product` this factor must stand last."""

    parts = ("w", "beta")
    symbol = PARTS["w"].factor
    factored = True

    def apply(self, gate: HeadGate, state: Tensor) -> Tensor:
        w, beta = cast(Tensor, gate.w)[..., None, :], cast(Tensor, gate.beta)[..., None, None]
        several = gate.factors is not None
        for one, strength in zip(w.unbind(-3), beta.unbind(-3), strict=True) if several else [(w, beta)]:
            state = state.addcmul(one.mT, strength * (one @ state), value=-1)
        return state

    def block(self, q: Tensor, k: Tensor, gate: HeadGate) -> ClosedForm:
        return self.block_after(Identity(), q, k, gate)

    def scores(self, q: Tensor, k: Tensor, gate: HeadGate) -> Tensor:
        factors = in_order(cast(Tensor, gate.w), cast(Tensor, gate.beta), gate.factors is not None)
        return RankOne(Identity(), q, k, *factors, gate).scores()

    def block_after(self, first: Transition, q: Tensor, k: Tensor, gate: HeadGate) -> ClosedForm:
        factors = in_order(cast(Tensor, gate.w), cast(Tensor, gate.beta), gate.factors is not None)
        return rank_one_block(first, q, k, *factors, gate)


class Oblique(Transition):
    """``R_t = I - beta_t u_t w_t^T``: erased is what stands along w, by what is read along u."""

    parts = ("w", "beta", "u")
    symbol = PARTS["u"].factor
    expands = True

    def apply(self, gate: HeadGate, state: Tensor) -> Tensor:
        w, u = cast(Tensor, gate.w)[..., None, :], cast(Tensor, gate.u)[..., None, :]
        return state - w.mT @ (cast(Tensor, gate.beta)[..., None, None] * (u @ state))

    def block(self, q: Tensor, k: Tensor, gate: HeadGate) -> ClosedForm:
        return self.block_after(Identity(), q, k, gate)

    def block_after(self, first: Transition, q: Tensor, k: Tensor, gate: HeadGate) -> ClosedForm:
        beta = cast(Tensor, gate.beta)[..., None]
        return rank_one_block(first, q, k, [cast(Tensor, gate.w)], beta, gate, [cast(Tensor, gate.u)])


FORMS = LinearForms(Householder(), chunk_size=32, kernels={"triton": FEW_TOKENS, "fla": FLA_DELTA_RULE})
