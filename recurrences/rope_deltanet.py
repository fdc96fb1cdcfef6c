r"""DeltaNet whose state also turns: a rotation by angles from the input, then the erasing factor.

.. math:: S_t = S_{t-1}\, \mathrm{Rot}(\theta_t) (I - \beta_t w_t w_t^\top) + v_t k_t^\top

With :math:`P_t = \mathrm{Rot}(\theta_1 + \cdots + \theta_t)` it is DeltaNet on ``P_t q_t``, ``P_t k_t`` and
``P_t w_t``, so with w = k it is DeltaNet behind RoPE; behind RoPE with a w that is not turned, it is this with
``w_t = P_t^T w``. Softmax dual: PaTH with RoPE. Sources: Yang et al., 2024, for the delta rule; Movahedi et al.,
"Selective Rotary Position Embedding", 2025, for the angles.
"""

from attnzoo.recurrences.products import linear_forms

TITLE = "DeltaNet with selective RoPE"
PAPER = "Yang et al., 2024 (arXiv:2406.06484), and Movahedi et al., 2025 (arXiv:2511.17388)"
LAYER = {"gate": ("selective", "delta"), "qk_norm": "l2", "conv_size": 4, "output_norm": "rms"}

FORMS = linear_forms("angle", "w", "beta")
