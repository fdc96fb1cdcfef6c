r"""PaTH-Wall: PaTH's transitions and Wall's decay per channel, both inside the logits.

.. math:: \mathrm{logit}_{tj} = \lambda\, k_j^\top
          \Big(\prod_{l=j+1}^{t} \mathrm{Diag}(e^{a_l}) (I - \beta_l w_l w_l^\top)\Big)\, q_t

Linear dual: Kimi Delta Attention, of which this is the exact dual. We know of no earlier publication of it. The layer
is Wall's gate beside PaTH's.
"""

from attnzoo.encodings.products import softmax_forms

TITLE = "PaTH-Wall"
PAPER = "the exact dual of Kimi Delta Attention (Kimi Team, 2025, arXiv:2510.26692)"
LAYER = {"gate": ("full_rank", "path")}

FORMS = softmax_forms("log_diag", "w", "beta")
