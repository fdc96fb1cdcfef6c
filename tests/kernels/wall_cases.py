"""Inputs, the float64 oracle and the error budget of the wall kernel tests."""

from __future__ import annotations

import math
from dataclasses import dataclass

import fox_cases
import torch
from fox_cases import DEVICE, Packable, heads, run
from torch import Tensor

from attnzoo.kernels.wall import wall_attention
from attnzoo.kernels.wall.reference import wall_reference


@dataclass(frozen=True)
class Case(Packable):
    """One call of wall_attention; gates are open, mixed, strong (to -50 a token), shut or ones (log gate exactly 0)."""

    decay: str = ""  # of the scalar gate beside it: open, mixed, or none


def draw_gate(case: Packable, regime: str, generator: torch.Generator) -> Tensor:
    """Log gates of the channels [B, T, H, K] in a regime."""
    shape = (case.B, case.T, case.H, case.K)
    u, g = torch.rand(shape, generator=generator), -0.2 * torch.rand(shape, generator=generator)
    if regime == "ones":
        return torch.zeros(shape)
    if regime == "shut":
        return torch.full(shape, -math.inf)
    if regime == "strong":
        return 250.0 * g * u**4
    if regime == "mixed":
        g[u < 0.3] = 0.0
        g[u < 0.04] = -30.0
        g[u < 0.02] = -2.0e4
        g[u < 0.01] = -math.inf
    return g


def inputs(case: Case, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """q, k, v, do, log_diag and, where the case has them, log_decay and sink; q and k of unit scale."""
    generator = torch.Generator().manual_seed(seed)
    x = heads(case, dtype, generator)
    x["log_diag"] = draw_gate(case, case.gate, generator)
    if case.decay:
        g = 0.3 * torch.nn.functional.logsigmoid(torch.randn(case.B, case.T, case.H, generator=generator) + 1)
        x["log_decay"] = g.masked_fill(g < -0.9, -math.inf) if case.decay == "mixed" else g
    if case.sink:
        x["sink"] = torch.randn(case.H, generator=generator)
    return {name: t.to(DEVICE) for name, t in x.items()}


def triton(case: Case, x: dict[str, Tensor]) -> dict[str, Tensor]:
    return run(wall_attention, case, x, impl="triton")


def within_budget(case: Case, x: dict[str, Tensor], ours: dict[str, Tensor]) -> None:
    """The budget of the fox kernels; gradients of gates and sinks are sums over the tokens."""
    fox_cases.within_budget(case, x, ours, wall_reference, ("dlog_diag", "dlog_decay", "dsink"))
