r"""Gated linear attention: a decay per key channel.

.. math:: S_t = S_{t-1}\,\mathrm{Diag}(e^{a_t}) + v_t k_t^\top, \qquad a_t \in \mathbb{R}^K,\; a_t \le 0

Softmax dual: ``wall``. Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient
Training", 2024, eq. 3 and section 4.
"""

from __future__ import annotations

from attnzoo.algebra.diagonal import Diagonal
from attnzoo.forms.backends.fla import FLA_DIAGONAL_DECAY
from attnzoo.forms.backends.recurrent import FEW_TOKENS
from attnzoo.forms.linear import LinearForms

TITLE = "Gated linear attention"
PAPER = "Yang et al., 2024 (arXiv:2312.06635)"
EQUATIONS = (
    "Sₜ = Sₜ₋₁ Diag(exp(aₜ)) + vₜ kₜᵀ",
    "oₜ = Sₜ (λ qₜ)",
    "   = Σⱼ (λ kⱼᵀ Diag(exp(aⱼ₊₁ + ⋯ + aₜ)) qₜ) vⱼ",
)
LAYER = {"gate": "low_rank", "output_norm": "rms", "output_gate": "swish"}

FORMS = LinearForms(Diagonal(), kernels={"triton": FEW_TOKENS, "fla": FLA_DIAGONAL_DECAY})
