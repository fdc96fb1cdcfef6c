r"""Wall: the diagonal gate of GLA inside the softmax logits.

.. math:: \mathrm{logit}_{tj} = \lambda \sum_c k_{jc}\, q_{tc} \exp\!\Big(\sum_{l=j+1}^{t} a_{lc}\Big)

A matrix transition acts inside the dot product, so a per-channel decay scales each channel's share of the
logit (it does not add to the logit, as a scalar gate does). Linear dual: GLA. Source: Averbuch and Pai (Tilde
Research), Wall attention, in flash-linear-attention 0.6 (``fla/ops/wall_attn/naive.py`` states the logits).
"""

from attnzoo.algebra.diagonal import Diagonal
from attnzoo.forms.backends.wall import wall_kernel
from attnzoo.forms.softmax import SoftmaxForms

TITLE = "Wall"
PAPER = "Tilde Research, in flash-linear-attention 0.6.0 (2026), ops/wall_attn"
EQUATIONS = (
    "ℓₜⱼ = λ kⱼᵀ Diag(exp(aⱼ₊₁ + ⋯ + aₜ)) qₜ",
    "oₜ = Σⱼ softmaxⱼ(ℓₜⱼ) vⱼ",
)
LAYER = {"gate": "low_rank", "gate_rank": None, "temperature": 1.0, "gate_bias": 8.0}

FORMS = SoftmaxForms(Diagonal(), kernels={"triton": wall_kernel()})
