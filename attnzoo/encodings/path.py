r"""PaTH: logits through accumulated Householder-like transitions.

.. math:: \mathrm{logit}_{tj} = \lambda\, k_j^\top \Big(\prod_{l=j+1}^{t} (I - \beta_l w_l w_l^\top)\Big)\, q_t

Linear dual: DeltaNet. In its recurrent form every cached key is multiplied by each new transition.
Source: Yang et al., "PaTH Attention: Position Encoding via Accumulating Householder Transformations", 2025,
sections 2 and 3.
"""

from attnzoo.forms.backends.fox_path import path_kernel
from attnzoo.forms.caches.stores import CarriedKeys
from attnzoo.forms.softmax import SoftmaxForms
from attnzoo.recurrences.deltanet import Householder

TITLE = "PaTH"
PAPER = "Yang et al., 2025 (arXiv:2505.16381)"
EQUATIONS = (
    "Rₜ = I − βₜ wₜ wₜᵀ",
    "ℓₜⱼ = λ kⱼᵀ Rⱼ₊₁ ⋯ Rₜ qₜ",
    "oₜ = Σⱼ softmaxⱼ(ℓₜⱼ) vⱼ",
)
LAYER = {"gate": "path"}

FORMS = SoftmaxForms(Householder(), store=CarriedKeys(pages=True), kernels={"triton": path_kernel()})
