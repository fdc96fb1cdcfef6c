"""Inputs, the float64 oracle and the error budget of the wall kernel tests."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import fox_cases
import torch
from fox_cases import DEVICE, run
from torch import Tensor

from attnzoo.kernels.wall import wall_attention
from attnzoo.kernels.wall.reference import wall_reference


@dataclass(frozen=True)
class Case:
    """One call of wall_attention: sizes, gate regime, and options."""

    B: int = 1
    T: int = 150
    H: int = 2
    G: int = 1
    K: int = 16
    V: int = 16
    gate: str = "mixed"  # open, mixed, strong (to -50 a token), shut, ones (log gate exactly 0)
    decay: str = ""  # of the scalar gate beside it: open, mixed, or none
    sink: bool = False
    cu_seqlens: tuple[int, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    S = property(lambda self: self.T)  # what the budget asks for

    def __str__(self) -> str:
        extra = "".join(f"-{k}" for k in self.options) + ("-packed" if self.cu_seqlens else "")
        sink = "-sink" if self.sink else ""
        sink += f"-{self.decay}" if self.decay else ""
        return f"{self.gate}-B{self.B}T{self.T}H{self.H}G{self.G}K{self.K}V{self.V}{extra}{sink}"


def draw_gate(case: Any, regime: str, generator: torch.Generator) -> Tensor:
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

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x = {
        "q": randn(case.B, case.T, case.H, case.K).to(dtype),
        "k": randn(case.B, case.T, case.G, case.K).to(dtype),
        "v": randn(case.B, case.T, case.G, case.V).to(dtype),
        "do": randn(case.B, case.T, case.H, case.V).to(dtype),
        "log_diag": draw_gate(case, case.gate, generator),
    }
    if case.decay:
        g = 0.3 * torch.nn.functional.logsigmoid(randn(case.B, case.T, case.H) + 1)
        x["log_decay"] = g.masked_fill(g < -0.9, -math.inf) if case.decay == "mixed" else g
    if case.sink:
        x["sink"] = randn(case.H)
    return {name: t.to(DEVICE) for name, t in x.items()}


def triton(case: Case, x: dict[str, Tensor]) -> dict[str, Tensor]:
    return run(wall_attention, case, x, impl="triton")


def within_budget(case: Case, x: dict[str, Tensor], ours: dict[str, Tensor]) -> None:
    """The budget of the fox kernels; gradients of gates and sinks are sums over the tokens."""
    fox_cases.within_budget(case, x, ours, wall_reference, ("dlog_diag", "dlog_decay", "dsink"))
