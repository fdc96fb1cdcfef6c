"""Wall attention written out densely: the definition the kernels are held to. No Triton here.

    o_i = sum_j softmax_j(scale sum_c q_ic k_jc exp(a_{j+1,c} + ... + a_ic) + c_i - c_j) v_j,     j <= i

with c the running sum of log_decay (all 0 without one).
Averbuch and Pai (Tilde Research), Wall attention, in flash-linear-attention 0.6.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnzoo.kernels.common.calls import with_lse
from attnzoo.kernels.common.dense_reference import attention_by_scores, decayed_scores


def wall_reference_lse(q: Tensor, k: Tensor, v: Tensor, *, log_diag: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Dense Wall attention; arguments as ``wall_attention``, the rest as ``attention_by_scores``."""
    return attention_by_scores(decayed_scores, (log_diag,), q, k, v, **options)


wall_reference = with_lse(wall_reference_lse)
