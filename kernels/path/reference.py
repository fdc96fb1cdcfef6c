"""PaTH attention written out densely: the definition the kernels are held to. No Triton here.

    o_i = sum_j softmax_j(scale k_j^T R_{j+1} ... R_i q_i + c_i - c_j) v_j,     R_t = I - beta_t w_t w_t^T,     j <= i

with c the running sum of log_decay (all 0 without one), and R_t = Diag(exp(log_diag_t)) (I - beta_t w_t w_t^T) where
channels decay. Yang et al., "PaTH Attention: Position Encoding via Accumulating Householder Transformations", 2025,
sections 2.2 and 3, here with the log gate unscaled.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor

from attnzoo.algebra.gate import expand_heads
from attnzoo.kernels.common.calls import with_lse
from attnzoo.kernels.common.dense_reference import attention_by_scores, decayed_scores, starts_by_scores
from attnzoo.kernels.common.options import AttentionOptions
from attnzoo.precision import wide_dtype


def path_scores(q: Tensor, k: Tensor, w: Tensor, beta: Tensor, compute_dtype: torch.dtype | None = None) -> Tensor:
    """``k_j^T R_{j+1} ... R_i q_i`` for j <= i, 0 above: [B, H, T, T], unscaled, float32 or better.

    The product unrolls into ``q_i - sum_{l <= i} (...) w_l`` with coefficients that solve one triangular system for all
    of T (the UT transform, Yang et al., 2024, eq. 10):

        S = tril(Q K^T) - tril(Q W^T) (I + tril(Diag(beta) W W^T, -1))^-1 Diag(beta) tril(W K^T, -1)

    Args:
        compute_dtype: dtype of the operands of matrix products; the system is solved in float32 or better.
    """
    T, H, G = q.shape[1], q.shape[2], k.shape[2]
    wide = wide_dtype(q.dtype)
    cd = wide if compute_dtype is None else compute_dtype
    qh, kh, wh = (rearrange(x.to(cd), "b t h k -> b h t k") for x in (q, k, w))
    strength = rearrange(beta.to(wide), "b t g -> b g t 1")
    system = torch.eye(T, dtype=wide, device=q.device) + (strength * (wh @ wh.mT).to(wide)).tril(-1)
    erased = torch.linalg.solve_triangular(
        system, strength * (wh @ kh.mT).to(wide).tril(-1), upper=False, unitriangular=True
    )
    kh, wh, erased = (repeat(x, "b g t d -> b (g r) t d", r=H // G) for x in (kh, wh, erased.to(cd)))
    direct, turned = (qh @ kh.mT).to(wide), ((qh @ wh.mT).tril() @ erased).to(wide)
    return (direct - turned).tril()


def decayed_path_scores(
    q: Tensor, k: Tensor, w: Tensor, beta: Tensor, log_diag: Tensor, compute_dtype: torch.dtype | None = None
) -> Tensor:
    """As ``path_scores``, each product of that system taken through the decays between its tokens.

    Args:
        log_diag: [B, T, H, K].
    """
    T, H = q.shape[1:3]
    wide = wide_dtype(q.dtype)
    cd = wide if compute_dtype is None else compute_dtype
    k, w, beta = (expand_heads(x, H) for x in (k, w, beta))
    strength = rearrange(beta.to(wide), "b t h -> b h t 1")
    qk, qw, wk, ww = (decayed_scores(x, y, log_diag, cd) for x in (q, w) for y in (k, w))
    system = torch.eye(T, dtype=wide, device=q.device) + (strength * ww).tril(-1)
    erased = torch.linalg.solve_triangular(system, strength * wk.tril(-1), upper=False, unitriangular=True)
    turned = (qw.to(cd) @ erased.to(cd)).to(wide)
    scores: Tensor = qk - turned
    return scores


def prune_starts_reference(
    q: Tensor, k: Tensor, w: Tensor, beta: Tensor, c: Tensor, since: Tensor,
    options: AttentionOptions,
) -> Tensor:  # fmt: skip
    """``starts_by_scores`` with those of PaTH; w: [B, T, G, K]; beta: [B, T, G]."""

    def products(q: Tensor, k: Tensor) -> Tensor:
        return path_scores(q, k, w.detach().double(), beta.detach().double())

    return starts_by_scores(products, q, k, c, since, options)


def path_reference_lse(
    q: Tensor, k: Tensor, v: Tensor, *, w: Tensor, beta: Tensor, log_diag: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Dense PaTH attention; arguments as ``path_attention``, the rest as ``attention_by_scores``."""
    if log_diag is None:
        return attention_by_scores(path_scores, (w, beta), q, k, v, **options)
    return attention_by_scores(decayed_path_scores, (w, beta, log_diag), q, k, v, **options)


path_reference = with_lse(path_reference_lse)
