"""Pieces of the dense references. No Triton here."""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.kernels.common.constants import CLOSED


def segment_starts(cu_seqlens: Tensor, S: int) -> Tensor:
    """First position of each token's packed sequence: [S] int32 from cu_seqlens [N+1]."""
    cu = cu_seqlens.to(torch.int64)
    index = torch.searchsorted(cu, torch.arange(S, device=cu.device), right=True) - 1
    return cu[index].to(torch.int32)


def running_sums(log_gate: Tensor | None, B: int, S: int, H: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Running sums c [B, H, S] float64 and closed [B, H, S]; closed gates add nothing to c."""
    if log_gate is None:
        return (
            torch.zeros(B, H, S, dtype=torch.float64, device=device),
            torch.zeros(B, H, S, dtype=torch.bool, device=device),
        )
    if log_gate.ndim == 1:
        log_gate = log_gate.clamp(min=CLOSED).expand(B, S, H)
        closed = torch.zeros(B, S, H, dtype=torch.bool, device=device)
    else:
        closed = log_gate <= CLOSED
    g = log_gate.double().masked_fill(closed, 0.0)
    return g.cumsum(1).transpose(1, 2), closed.transpose(1, 2)


def first_visible(closed: Tensor, window: int | None, cu_seqlens: Tensor | None) -> Tensor:
    """First visible key of each position: [B, H, S]."""
    S = closed.shape[-1]
    pos = torch.arange(S, device=closed.device)
    left = torch.where(closed, pos, 0).cummax(-1).values
    if window is not None:
        left = torch.maximum(left, pos - window + 1)
    if cu_seqlens is not None:
        left = torch.maximum(left, segment_starts(cu_seqlens, S))
    return left
