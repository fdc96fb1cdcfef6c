r"""GLA with a scalar decay beside that of each channel.

.. math:: S_t = e^{g_t} S_{t-1}\, \mathrm{Diag}(e^{a_t}) + v_t k_t^\top

A scalar gate is a gate of all channels alike, so this is GLA with ``a_t + g_t``; under the softmax the two differ.
Softmax dual: Wall with its scalar gate. Sources: Yang et al., "Gated Linear Attention Transformers with
Hardware-Efficient Training", 2024; Mamba-2's gate is Dao and Gu's, 2024.
"""

from attnzoo.recurrences.products import linear_forms

TITLE = "GLA with a scalar gate"
PAPER = "Yang et al., 2024 (arXiv:2312.06635), and Dao and Gu, 2024 (arXiv:2405.21060)"
LAYER = {"gate": ("softplus", "low_rank"), "output_norm": "rms", "output_gate": "swish"}

FORMS = linear_forms("log_decay", "log_diag")
