r"""Wall with its scalar gate: a decay per channel inside the logits and a forget gate beside them.

.. math:: \mathrm{logit}_{tj} = \lambda \sum_c k_{jc}\, q_{tc} \exp\!\Big(\sum_{l=j+1}^{t} a_{lc}\Big)
          + \sum_{l=j+1}^{t} \log f_l

Linear dual: GLA with a scalar gate. Source: Averbuch and Pai (Tilde Research), flash-linear-attention 0.6,
``fla/layers/wall_attn.py`` with ``use_scalar_gate=True``.
"""

from attnzoo.encodings.products import softmax_forms

TITLE = "Wall with a scalar gate"
PAPER = "Tilde Research, in flash-linear-attention 0.6.0 (2026), ops/wall_attn"
LAYER = {"gate": ("full_rank", "forget"), "gate_bias": 8.0}

FORMS = softmax_forms("log_decay", "log_diag")
