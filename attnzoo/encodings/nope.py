r"""NoPE: softmax attention without any position encoding.

.. math:: o_t = \sum_{j \le t} \mathrm{softmax}_j(\lambda\, k_j^\top q_t)\, v_j

with :math:`\lambda` the scale. Linear dual: linear attention. Source: Kazemnejad et al., "The Impact of Positional
Encoding on Length Generalization in Transformers", 2023.
"""

from attnzoo.forms.additive import AdditiveForms

TITLE = "NoPE"
PAPER = "Kazemnejad et al., 2023 (arXiv:2305.19466)"
EQUATIONS = (
    "ℓₜⱼ = λ kⱼᵀ qₜ",
    "oₜ = Σⱼ softmaxⱼ(ℓₜⱼ) vⱼ",
)
LAYER = {"gate": "none"}

FORMS = AdditiveForms()
