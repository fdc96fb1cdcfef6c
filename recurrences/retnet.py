r"""Retention: one constant scalar decay per head.

.. math:: S_t = \gamma_h S_{t-1} + v_t k_t^\top, \qquad \gamma_h = e^{g_h}

Softmax dual: ALiBi, whose slope is :math:`-g_h`. Source: Sun et al., "Retentive Network", 2023, eq. 5-7.
"""

from attnzoo.algebra.transitions import Identity
from attnzoo.forms.backends.chunks import SCALAR_DECAY
from attnzoo.forms.backends.fla import FLA_SCALAR_DECAY
from attnzoo.forms.linear import LinearForms

TITLE = "RetNet"
PAPER = "Sun et al., 2023 (arXiv:2307.08621)"
EQUATIONS = (
    "gₜ = −m",
    "Sₜ = exp(−m) Sₜ₋₁ + vₜ kₜᵀ",
    "oₜ = Sₜ (λ qₜ)",
    "   = Σⱼ (λ kⱼᵀ qₜ) exp(−m (t − j)) vⱼ",
)
LAYER = {  # as in the authors' code (torchscale), where the paper's GroupNorm is an RMSNorm per head
    "gate": "retention", "expand": 2, "rotary": 10_000.0, "rotary_angles": "retnet", "output_norm": "rms",
    "output_gate": "swish",
}  # fmt: skip

FORMS = LinearForms(Identity(), kernels={"triton": SCALAR_DECAY, "fla": FLA_SCALAR_DECAY})
