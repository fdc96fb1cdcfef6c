r"""Gated DeltaNet whose state also turns: forgets, turns, erases along w_t, writes v_t k_t^T.

.. math:: S_t = e^{g_t} S_{t-1}\, \mathrm{Rot}(\theta_t) (I - \beta_t w_t w_t^\top) + v_t k_t^\top

Softmax dual: PaTH-FoX with RoPE. Sources: Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2025; Movahedi et al.,
"Selective Rotary Position Embedding", 2025, for the angles.
"""

from attnzoo.recurrences.products import linear_forms

TITLE = "Gated DeltaNet with selective RoPE"
PAPER = "Yang, Kautz and Hatamizadeh, 2025 (arXiv:2412.06464), and Movahedi et al., 2025 (arXiv:2511.17388)"
LAYER = {
    "gate": ("softplus", "selective", "delta"), "qk_norm": "l2", "conv_size": 4,
    "output_norm": "rms", "output_gate": "swish",
}  # fmt: skip

FORMS = linear_forms("log_decay", "angle", "w", "beta")
