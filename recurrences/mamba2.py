r"""Mamba-2 (state space duality): a data-dependent scalar decay.

.. math:: S_t = e^{g_t} S_{t-1} + v_t k_t^\top, \qquad g_t \le 0

Softmax dual: FoX, the same gate in the exponent. Source: Dao and Gu, "Transformers are SSMs", 2024,
section 3.2; the step size is part of v here. The layer is the paper's block; ``block="gated"`` is a simpler one, with
queries and keys of its own for each head. With several groups of B and C, give ``num_qk_heads`` and
``output_norm_groups`` that number both.
"""

from attnzoo.algebra.transitions import Identity
from attnzoo.forms.backends.chunks import SCALAR_DECAY
from attnzoo.forms.backends.fla import FLA_SCALAR_DECAY
from attnzoo.forms.linear import LinearForms

TITLE = "Mamba-2"
PAPER = "Dao and Gu, 2024 (arXiv:2405.21060)"
EQUATIONS = (
    "Sₜ = exp(gₜ) Sₜ₋₁ + vₜ kₜᵀ",
    "oₜ = Sₜ (λ qₜ)",
    "   = Σⱼ (λ kⱼᵀ qₜ) exp(gⱼ₊₁ + ⋯ + gₜ) vⱼ",
)
LAYER = {  # section 7 and figure 6: B and C are k and q, shared by all heads, and x is v
    "gate": "mamba2", "num_qk_heads": 1, "head_dim": 128, "expand": 2, "conv_size": 4, "conv_bias": True, "scale": 1.0,
    "skip": True, "output_norm": "rms", "output_norm_groups": 1, "output_norm_eps": 1e-5, "output_gate": "swish",
    "gate_before_norm": True,
}  # fmt: skip

FORMS = LinearForms(Identity(), kernels={"triton": SCALAR_DECAY, "fla": FLA_SCALAR_DECAY})
