r"""Linear attention: the recurrence without a gate.

.. math:: S_t = S_{t-1} + v_t k_t^\top, \qquad o_t = S_t q_t = \sum_{j \le t} (k_j^\top q_t)\, v_j

Softmax dual: NoPE. Source: Katharopoulos et al., "Transformers are RNNs", 2020,
without the normaliser.
"""

from attnzoo.algebra.transitions import Identity
from attnzoo.forms.backends.chunks import SCALAR_DECAY
from attnzoo.forms.backends.fla import FLA_SCALAR_DECAY
from attnzoo.forms.linear import LinearForms

TITLE = "Linear attention"
PAPER = "Katharopoulos et al., 2020 (arXiv:2006.16236)"
EQUATIONS = (
    "Sₜ = Sₜ₋₁ + vₜ kₜᵀ",
    "oₜ = Sₜ (λ qₜ)",
    "   = Σⱼ (λ kⱼᵀ qₜ) vⱼ",
)
LAYER = {"feature_map": "elu", "output_norm": "rms"}

FORMS = LinearForms(Identity(), kernels={"triton": SCALAR_DECAY, "fla": FLA_SCALAR_DECAY})
