r"""The transition of Mamba-3: a scalar decay and a rotation by angles from the input.

.. math:: S_t = e^{g_t} S_{t-1}\, \mathrm{Rot}(\theta_t) + v_t k_t^\top

Softmax dual: FoX with RoPE. Source: Lahoti et al., "Mamba-3: Improved Sequence Modeling using State Space
Principles", 2026, the complex-valued state; mamba_ssm's ``modules/mamba3.py`` for the layer, as first released (since
June 2026 it makes the decay's rate by another positive function than softplus). Its trapezoidal rule writes two tokens
at once and is no part of a transition: by default the step size alone scales what is written (the rule's lambda at 1).
A layer with ``trapezoid=True`` writes two keys per token, and one with ``qk_bias=True`` has biases of B and C; there
are not several inputs per step.
"""

from attnzoo.recurrences.products import linear_forms

TITLE = "Mamba-3"
PAPER = "Lahoti et al., 2026 (arXiv:2603.15569)"
LAYER = {
    "gate": "mamba3", "num_qk_heads": 1, "head_dim": 128, "expand": 2, "qk_norm": "rms",
    "qk_norm_shared": True, "scale": 1.0, "skip": True, "output_gate": "swish",
}  # fmt: skip

FORMS = linear_forms("log_decay", "angle")
