r"""Kimi Delta Attention: forgets per channel, erases along w_t, writes v_t k_t^T; with ``delta_rule=True``, w = k.

.. math:: S_t = S_{t-1}\, \mathrm{Diag}(e^{a_t}) (I - \beta_t w_t w_t^\top) + v_t k_t^\top

Softmax dual: ``path_wall``. Source: Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture", 2025,
eq. 1, and flash-linear-attention's ``fla/layers/kda.py`` for the layer, which is tested against that class.
"""

from attnzoo.recurrences.products import linear_forms

TITLE = "Kimi Delta Attention"
PAPER = "Kimi Team, 2025 (arXiv:2510.26692)"
LAYER = {
    "gate": ("channel_softplus", "delta"), "qk_norm": "l2", "conv_size": 4, "output_norm": "rms",
    "output_gate": "sigmoid", "output_gate_low_rank": True,
}  # fmt: skip

FORMS = linear_forms("log_diag", "w", "beta")
