r"""FoX, the Forgetting Transformer: softmax attention with a data-dependent forget gate.

.. math:: \mathrm{logit}_{tj} = \lambda\, k_j^\top q_t + \sum_{l=j+1}^{t} \log f_l

with :math:`g_l = \log f_l`. Linear dual: the scalar gate of Mamba-2. Sources: Lin et al., "Forgetting Transformer:
Softmax Attention with a Forget Gate", 2025, section 3; for pruning, Lin et al., "Adaptive Computation
Pruning for the Forgetting Transformer", 2025.
"""

from attnzoo.forms.additive import AdditiveForms

TITLE = "FoX"
PAPER = "Lin et al., 2025 (arXiv:2503.02130)"
EQUATIONS = (
    "ℓₜⱼ = λ kⱼᵀ qₜ + gⱼ₊₁ + ⋯ + gₜ",
    "oₜ = Σⱼ softmaxⱼ(ℓₜⱼ) vⱼ",
)
LAYER = {"gate": "forget"}

FORMS = AdditiveForms()
