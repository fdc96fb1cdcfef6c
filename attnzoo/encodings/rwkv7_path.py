r"""The softmax dual of RWKV-7: its decays per channel and its oblique factors, inside the logits.

.. math:: \mathrm{logit}_{tj} = \lambda\, k_j^\top
          \Big(\prod_{l=j+1}^{t} \mathrm{Diag}(e^{a_l}) (I - \beta_l u_l w_l^\top)\Big)\, q_t

Linear dual: RWKV-7, of which this is the exact dual. We know of no earlier publication of it. The layer is RWKV-7's
gate, which also makes the keys.
"""

from attnzoo.encodings.products import softmax_forms

TITLE = "RWKV-7 as PaTH"
PAPER = "the exact dual of RWKV-7 (Peng et al., 2025, arXiv:2503.14456)"
LAYER = {"gate": "rwkv7"}

FORMS = softmax_forms("log_diag", "w", "beta", "u")
