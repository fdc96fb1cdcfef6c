r"""Mamba-2 (state space duality): a data-dependent scalar decay.

.. math:: S_t = e^{g_t} S_{t-1} + v_t k_t^\top, \qquad g_t \le 0

Softmax dual: FoX, the same gate in the exponent. Source: Dao and Gu, "Transformers are SSMs", 2024,
section 3.2; the step size is part of v here.
"""

from attnzoo.algebra.transitions import Identity
from attnzoo.forms.fla import FLA_SCALAR_DECAY
from attnzoo.forms.linear import LinearForms

TITLE = "Mamba-2"
PAPER = "Dao and Gu, 2024 (arXiv:2405.21060)"
EQUATIONS = (
    "Sₜ = exp(gₜ) Sₜ₋₁ + vₜ kₜᵀ",
    "oₜ = Sₜ (λ qₜ)",
    "   = Σⱼ (λ kⱼᵀ qₜ) exp(gⱼ₊₁ + ⋯ + gₜ) vⱼ",
)
LAYER = {"gate": "mamba2", "conv_size": 4, "output_norm": "rms", "output_gate": "swish"}

FORMS = LinearForms(Identity(), kernels={"fla": FLA_SCALAR_DECAY})
