r"""RWKV-7: decays per channel, erases along w_t what it reads along u_t, writes v_t k_t^T.

.. math:: S_t = S_{t-1}\, \mathrm{Diag}(e^{a_t}) (I - \beta_t u_t w_t^\top) + v_t k_t^\top

Its authors write :math:`S_{t-1} (\mathrm{Diag}(e^{a_t}) - \kappa_t (r_t \odot \kappa_t)^\top)` with a unit vector
:math:`\kappa_t` and a rate :math:`r_t` per channel: that is :math:`u_t = e^{-a_t} \odot \kappa_t`,
:math:`w_t = r_t \odot \kappa_t` and :math:`\beta_t = 1`. Softmax dual: ``rwkv7_path``. Source: Peng et al., "RWKV-7
'Goose' with Expressive Dynamic State Evolution", 2025, eq. 17; flash-linear-attention's ``fla/layers/rwkv7.py`` for the
layer, which is tested against that class.
"""

from attnzoo.recurrences.products import linear_forms

TITLE = "RWKV-7"
PAPER = "Peng et al., 2025 (arXiv:2503.14456)"
LAYER = {
    "gate": "rwkv7", "token_mix": True, "scale": 1.0, "output_norm": "group", "output_norm_bias": True,
    "output_norm_eps": 6.4e-4, "bonus": True, "output_gate": "lora",
}  # fmt: skip

FORMS = linear_forms("log_diag", "w", "beta", "u")
