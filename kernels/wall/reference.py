"""Wall attention written out densely: the definition the kernels are held to. No Triton here.

    o_i = sum_j softmax_j(scale sum_c q_ic k_jc exp(a_{j+1,c} + ... + a_ic) + c_i - c_j) v_j,     j <= i

with c the running sum of log_decay (all 0 without one).
Averbuch and Pai (Tilde Research), Wall attention, in flash-linear-attention 0.6.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

from attnzoo.kernels.common.dense import attention_by_scores


def wall_scores(q: Tensor, k: Tensor, log_diag: Tensor, compute_dtype: torch.dtype | None = None) -> Tensor:
    """``sum_c q_ic k_jc exp(a_{j+1,c} + ... + a_ic)`` for j <= i, 0 above: [B, H, T, T], unscaled, float32 or better.

    Rows and keys meet in groups of 1, 2, 4, ... tokens, as factors that are decayed to the border between two groups.

    Args:
        compute_dtype: dtype of the operands of matrix products.
    """
    (_, T, H, _), G = q.shape, k.shape[2]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    cd, size = wide if compute_dtype is None else compute_dtype, 1 << max(1, (T - 1).bit_length())
    k = repeat(k, "b t g k -> b t (g r) k", r=H // G)
    qh, kh, a = (F.pad(rearrange(x.to(wide), "b t h k -> b h t k"), (0, 0, 0, size - T)) for x in (q, k, log_diag))
    out, m = (qh * kh).sum(-1)[..., None, None], 1  # [B, H, groups, m, m]
    while m < size:
        (_, late_q), (early_k, _) = _halves(qh, m), _halves(kh, m)
        before, after = _halves(a, m)
        to_border = F.pad(before[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)
        cross = (late_q * after.cumsum(-2).exp()).to(cd) @ (early_k * to_border.exp()).to(cd).mT
        first, second = out.unflatten(-3, (-1, 2)).unbind(-3)
        rows = torch.cat([first, torch.zeros_like(first)], -1), torch.cat([cross.to(wide), second], -1)
        out, m = torch.cat(rows, -2), 2 * m
    return out[..., 0, :T, :T]


def _halves(x: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """The first and the second m tokens of every group of 2m: [B, H, groups, m, K] each."""
    first, second = x.unflatten(-2, (-1, 2, m)).unbind(-3)
    return first, second


def wall_reference(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """The output of ``wall_reference_lse``, with its arguments."""
    return wall_reference_lse(q, k, v, **options)[0]


def wall_reference_lse(q: Tensor, k: Tensor, v: Tensor, *, log_diag: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Dense Wall attention; arguments as ``wall_attention``, the rest as ``attention_by_scores``."""
    return attention_by_scores(wall_scores, (log_diag,), q, k, v, **options)
