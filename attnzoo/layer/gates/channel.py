"""Projections to a decay per channel: of full rank, and by a softplus; the low-rank log-sigmoid one is in
``matrix``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.errors import check_least
from attnzoo.kernels.linear import DecayLogits
from attnzoo.layer.gates.base import GateProjection, Sizes, Write, bias_reaching, step_biases
from attnzoo.layer.modules import log_decays, product
from attnzoo.layer.stream import Stream
from attnzoo.precision import GateAffine, fill


class FullRankDiagonal(GateProjection):
    """``a_t = log sigmoid(W x_t + b)`` per channel (Wall, in flash-linear-attention 0.6, ``layers/wall_attn.py``).

    Args:
        channel_bias: b at the start; the larger, the nearer the gates are to 1.
    """

    provides = ("log_diag",)

    def __init__(self, sizes: Sizes, *, channel_bias: float = 8.0) -> None:
        super().__init__(sizes)
        self.channel_proj = GateAffine(sizes.hidden_size, sizes.num_heads * sizes.head_dim, bias=channel_bias)
        self.reset_parameters()

    @classmethod
    def opened(cls, tokens: float, options: Mapping[str, Any]) -> dict[str, Any]:
        return {"channel_bias": bias_reaching(tokens)}

    def logits(self, x: Tensor, apart: bool = True) -> DecayLogits:
        """The logits from which the decays of x are computed; ``apart``: their bias comes beside them."""
        return DecayLogits(*product(self.channel_proj, x, apart))

    def forward(self, x: Tensor, k: Tensor, stream: Stream) -> tuple[Gate, Write]:
        a, _ = log_decays(self.logits(x, apart=x.is_cuda), self.impl)
        return Gate(log_diag=a.unflatten(-1, (self.sizes.num_heads, self.sizes.head_dim))), None


class SoftplusDiagonal(GateProjection):
    """``a_t = -a_h softplus(W_2 W_1 x_t + b)`` per channel, with ``a_h > 0`` per head (Kimi Team, 2025, Kimi Linear).

    At the start ``a_h`` is uniform in [1, 16] and ``softplus(b)`` log-uniform in [0.001, 0.1], as in Mamba-2.

    Args:
        channel_rank: rank of the projection; None for K.

    Raises:
        ValueError: ``channel_rank < 1``.
    """

    provides = ("log_diag",)
    thin = "channel_down"
    channel_bias: Tensor
    log_a: Tensor

    def __init__(self, sizes: Sizes, *, channel_rank: int | None = None) -> None:
        super().__init__(sizes)
        check_least(1, channel_rank=channel_rank)
        channels, rank = sizes.num_heads * sizes.head_dim, channel_rank or sizes.head_dim
        self.channel_down = GateAffine(sizes.hidden_size, rank, bias=None)
        self.channel_up = GateAffine(rank, channels, bias=None)
        self.keep("channel_bias", torch.empty(channels), trainable=True)
        self.keep("log_a", torch.empty(sizes.num_heads), trainable=True)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        fill(self.channel_bias, step_biases(self.channel_up.out_features, 0.001, 0.1))
        fill(self.log_a, torch.empty(self.sizes.num_heads).uniform_(1, 16).log())

    def logits(self, x: Tensor, known: Tensor | None = None) -> DecayLogits:
        """The logits from which the decays of x are computed; ``known``: the product of the first map."""
        low = self.channel_down(x) if known is None else self.channel_down.biased(known)
        return DecayLogits(self.channel_up(low), self.channel_bias, self.log_a, opposite=True)

    def forward(self, x: Tensor, k: Tensor, stream: Stream) -> tuple[Gate, Write]:
        a, _ = log_decays(self.logits(x, stream.products.get(self.known)), self.impl)
        return Gate(log_diag=a.unflatten(-1, (self.sizes.num_heads, self.sizes.head_dim))), None
