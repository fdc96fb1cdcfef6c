r"""PaTH-FoX with RoPE: rotations and Householder-like transitions inside the logits, a forget gate beside them.

.. math:: \mathrm{logit}_{tj} = \lambda\, k_j^\top
          \Big(\prod_{l=j+1}^{t} \mathrm{Rot}(\theta_l) (I - \beta_l w_l w_l^\top)\Big)\, q_t
          + \sum_{l=j+1}^{t} \log f_l

Linear dual: Gated DeltaNet with selective RoPE. Sources: Yang et al., "PaTH Attention", 2025, and Movahedi et al.,
"Selective Rotary Position Embedding", 2025; fixed angles are ``gate=("rotary", "path", "forget")``.
"""

from attnzoo.encodings.products import softmax_forms

TITLE = "PaTH-FoX with selective RoPE"
PAPER = "Yang et al., 2025 (arXiv:2505.16381), and Movahedi et al., 2025 (arXiv:2511.17388)"
LAYER = {"gate": ("selective", "path", "forget")}

FORMS = softmax_forms("log_decay", "angle", "w", "beta")
