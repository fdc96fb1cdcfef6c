r"""Gated DeltaNet: forgets, erases along w_t, writes v_t k_t^T; with ``delta_rule=True``, w = k and beta_t v_t k_t^T.

.. math:: S_t = e^{g_t} S_{t-1} (I - \beta_t w_t w_t^\top) + v_t k_t^\top

Softmax dual: PaTH-FoX. Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2025, eq. 10.
"""

from attnzoo.forms.backends.fla import FLA_DELTA_RULE
from attnzoo.forms.backends.recurrent import FEW_TOKENS
from attnzoo.forms.linear import LinearForms
from attnzoo.recurrences.deltanet import Householder

TITLE = "Gated DeltaNet"
PAPER = "Yang, Kautz and Hatamizadeh, 2025 (arXiv:2412.06464)"
EQUATIONS = (
    "Rₜ = I − βₜ wₜ wₜᵀ",
    "Sₜ = exp(gₜ) Sₜ₋₁ Rₜ + vₜ kₜᵀ",
    "oₜ = Sₜ (λ qₜ)",
    "   = Σⱼ (λ kⱼᵀ Rⱼ₊₁ ⋯ Rₜ qₜ) exp(gⱼ₊₁ + ⋯ + gₜ) vⱼ",
)
LAYER = {
    "gate": ("softplus", "delta"), "qk_norm": "l2", "conv_size": 4,
    "output_norm": "rms", "output_gate": "swish",
}  # fmt: skip

FORMS = LinearForms(Householder(), chunk_size=32, kernels={"triton": FEW_TOKENS, "fla": FLA_DELTA_RULE})
