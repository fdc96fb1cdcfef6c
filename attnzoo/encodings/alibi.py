r"""ALiBi: a constant slope per head.

.. math:: \mathrm{logit}_{tj} = \lambda\, k_j^\top q_t - m_h\, (t - j)

with the slope :math:`m_h = -g_h`. Linear dual: RetNet, whose decay is :math:`e^{-m_h}`. Source: Press et al., "Train
Short, Test Long", 2022, section 3 (slopes :math:`2^{-8h/H}`).
"""

from attnzoo.forms.additive import AdditiveForms

TITLE = "ALiBi"
PAPER = "Press et al., 2022 (arXiv:2108.12409)"
EQUATIONS = (
    "gₜ = −m",
    "ℓₜⱼ = λ kⱼᵀ qₜ − m (t − j)",
    "oₜ = Σⱼ softmaxⱼ(ℓₜⱼ) vⱼ",
)
LAYER = {"gate": "alibi"}

FORMS = AdditiveForms()
