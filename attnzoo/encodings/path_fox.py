r"""PaTH-FoX: PaTH's transitions inside the logits and FoX's forget gate beside them.

.. math:: \mathrm{logit}_{tj} = \lambda\, k_j^\top \Big(\prod_{l=j+1}^{t} (I - \beta_l w_l w_l^\top)\Big)\, q_t
          + \sum_{l=j+1}^{t} \log f_l

The log gate is not multiplied by the scale: with beta = 0 this is FoX exactly, with f = 1 it is PaTH. Linear dual:
Gated DeltaNet. Source: Yang et al., "PaTH Attention", 2025, section 2.2.
"""

from attnzoo.forms.backends.fox_path import path_kernel
from attnzoo.forms.caches.stores import CarriedKeys
from attnzoo.forms.softmax import SoftmaxForms
from attnzoo.recurrences.deltanet import Householder

TITLE = "PaTH-FoX"
PAPER = "Yang et al., 2025 (arXiv:2505.16381)"
EQUATIONS = (
    "Rₜ = I − βₜ wₜ wₜᵀ",
    "ℓₜⱼ = λ kⱼᵀ Rⱼ₊₁ ⋯ Rₜ qₜ + gⱼ₊₁ + ⋯ + gₜ",
    "oₜ = Σⱼ softmaxⱼ(ℓₜⱼ) vⱼ",
)
LAYER = {"gate": ("path", "forget")}

FORMS = SoftmaxForms(Householder(), store=CarriedKeys(pages=True), kernels={"triton": path_kernel()})
