r"""FoX with RoPE: a forget gate beside the logits, and a rotation of queries and keys inside them.

.. math:: \mathrm{logit}_{tj} = \lambda\, k_j^\top \mathrm{Rot}(\theta_{j+1} + \cdots + \theta_t)\, q_t
          + \sum_{l=j+1}^{t} \log f_l

Linear dual: the transition of Mamba-3. Sources: Lin et al., "Forgetting Transformer", 2025, who try it with RoPE's
angles (``gate=("rotary", "forget")``); Movahedi et al., "Selective Rotary Position Embedding", 2025, for angles from
the input, the default here.
"""

from attnzoo.encodings.products import softmax_forms

TITLE = "FoX with selective RoPE"
PAPER = "Lin et al., 2025 (arXiv:2503.02130), and Movahedi et al., 2025 (arXiv:2511.17388)"
LAYER = {"gate": ("selective", "forget")}

FORMS = softmax_forms("log_decay", "angle")
