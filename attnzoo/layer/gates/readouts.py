"""Projections to the gate parts that readouts alone read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.errors import check_least
from attnzoo.layer.gates.base import GateProjection, Sizes, Write
from attnzoo.layer.gates.decay import ForgetGate
from attnzoo.layer.modules import softplus
from attnzoo.layer.stream import Stream
from attnzoo.precision import GateAffine, fill, wide


class BackwardForgetGate(ForgetGate):
    """``h_t = log sigmoid(w x_t + b)`` per head: FoX's forget gate towards later tokens.

    Args:
        gate_bias_back: b at the start.
    """

    provides = ("log_decay_back",)

    def __init__(self, sizes: Sizes, *, gate_bias_back: float = 0.0) -> None:
        super().__init__(sizes, gate_bias=gate_bias_back)

    @classmethod
    def opened(cls, tokens: float, options: Mapping[str, Any]) -> dict[str, Any]:
        return {"gate_bias_back": super().opened(tokens, options)["gate_bias"]}

    def forward(self, x: Tensor, k: Tensor, stream: Stream) -> tuple[Gate, Write]:
        gate, write = super().forward(x, k, stream)
        return Gate(log_decay_back=gate.log_decay), write


class LevelWeights(GateProjection):
    """``mu_t = softplus(c_h w x_t)`` per head and level, with a learned c_h, 1 at the start (Guo et al., 2025; the map
    is that of flash-linear-attention's layer).

    Args:
        num_levels: L; the last one holds all tokens that are older than those of the others.

    Raises:
        ValueError: fewer than 1.
    """

    provides = ("levels",)
    level_scale: Tensor

    def __init__(self, sizes: Sizes, *, num_levels: int = 15) -> None:
        super().__init__(sizes)
        check_least(1, num_levels=num_levels)
        self.num_levels = num_levels
        self.level_proj = GateAffine(sizes.hidden_size, sizes.num_heads * num_levels, bias=None)
        self.keep("level_scale", torch.empty(sizes.num_heads, num_levels), trainable=True)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        fill(self.level_scale, torch.ones(self.sizes.num_heads, self.num_levels))

    def forward(self, x: Tensor, k: Tensor, stream: Stream) -> tuple[Gate, Write]:
        logits = wide(self.level_proj(x)).unflatten(-1, (self.sizes.num_heads, self.num_levels))
        return Gate(levels=softplus(wide(self.level_scale) * logits)), None
