r"""PaTH with RoPE: rotations and Householder-like transitions, both inside the logits.

.. math:: \mathrm{logit}_{tj} = \lambda\, k_j^\top
          \Big(\prod_{l=j+1}^{t} \mathrm{Rot}(\theta_l) (I - \beta_l w_l w_l^\top)\Big)\, q_t

Linear dual: DeltaNet with selective RoPE. Sources: Yang et al., "PaTH Attention", 2025, and Movahedi et al., "Selective
Rotary Position Embedding", 2025; fixed angles are ``gate=("rotary", "path")``.
"""

from attnzoo.encodings.products import softmax_forms

TITLE = "PaTH with selective RoPE"
PAPER = "Yang et al., 2025 (arXiv:2505.16381), and Movahedi et al., 2025 (arXiv:2511.17388)"
LAYER = {"gate": ("selective", "path")}

FORMS = softmax_forms("angle", "w", "beta")
