"""Wall attention written out densely: the definition the kernels are held to. No Triton here.

    o_i = sum_j softmax_j(scale sum_c q_ic k_jc exp(a_{j+1,c} + ... + a_ic) + c_i - c_j) v_j,     j <= i

with c the running sum of log_decay (all 0 without one).
Averbuch and Pai (Tilde Research), Wall attention, in flash-linear-attention 0.6.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from einops import repeat
from torch import Tensor

from attnzoo.algebra.pruning import Prune
from attnzoo.kernels.common.constants import ROW_UNIT
from attnzoo.kernels.common.dense import decayed_scores, dense_readout, first_visible, running_sums
from attnzoo.kernels.path.reference import starts_by_scores


def wall_reference(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """The output of ``wall_reference_lse``, with its arguments."""
    return wall_reference_lse(q, k, v, **options)[0]


def wall_reference_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_diag: Tensor,
    log_decay: Tensor | None = None,
    scale: float | None = None,
    prune: Prune | None = None,
    window: int | None = None,
    sink: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    logit_bound: Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Dense Wall attention; arguments as ``wall_attention``. Memory O(T^2).

    Args:
        compute_dtype: dtype of the operands of the matrix products (the softmax is float32 or better). Default: float64
            for float64 inputs, else float32.

    Returns:
        [B, T, H, V] in q's dtype, and the log-sum-exp of each row [B, T, H], float32 or better.
    """
    B, T, H, K = q.shape
    scale = K**-0.5 if scale is None else scale
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    cd = wide if compute_dtype is None else compute_dtype
    c, closed = running_sums(log_decay, B, T, H, q.device)
    since = first_visible(closed, window, cu_seqlens)
    pos = torch.arange(T, device=q.device)
    visible = (pos <= pos[:, None]) & (pos >= since[..., None])  # [B, H, T, T]
    if prune is not None:
        exact = functools.partial(decayed_scores, log_diag=log_diag.detach().double())
        start = starts_by_scores(exact, q, k, c, since, scale, prune, logit_bound)
        visible &= pos >= start.repeat_interleave(ROW_UNIT, -1)[..., :T, None]
    decay = (c[..., :, None] - c[..., None, :]).masked_fill(~visible, 0.0).to(wide)
    logits = (decayed_scores(q, k, log_diag, compute_dtype) * scale + decay).masked_fill(~visible, -math.inf)
    o, lse = dense_readout(logits, repeat(v.to(cd), "b t g v -> b (g r) t v", r=H // v.shape[2]), sink)
    return o.to(q.dtype), lse
