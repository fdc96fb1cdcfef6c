"""RWKV-7's gate: decays per channel, and what is erased along another vector than is read along."""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.algebra.gate import Gate, expand_heads
from attnzoo.layer.gates.base import GateProjection, Keyed, Sizes, Write
from attnzoo.layer.modules import TokenMix, l2_normalize
from attnzoo.layer.stream import Stream
from attnzoo.precision import GateAffine, fill, wide

SLOWEST = -0.6065306597126334  # -exp(-1/2): no channel decays faster than by this log per token


class ObliqueDelta(GateProjection):
    """``a_t = -exp(-1/2) sigmoid(.)`` per channel, ``u_t = exp(-a_t) kappa_t`` and ``w_t = r_t kappa_t`` with a unit
    vector ``kappa_t`` along ``k_k k_t`` and rates ``r_t = sigmoid(.)``; and the keys ``k_t (1 + (r_t - 1) k_a)``.

    Both sigmoids are of low-rank maps of tokens mixed with the one before, the decays' with a tanh inside (Peng et al.,
    2025, RWKV-7, section 4.1). Its authors begin each layer of a model a little differently; here all begin as their
    first.

    Args:
        decay_rank: rank of the decays' map.
        rate_rank: rank of the rates' map.

    Raises:
        ValueError: a rank below 1.
    """

    provides = ("log_diag", "w", "beta", "u")
    makes_keys = True
    channel_bias: Tensor
    rate_bias: Tensor
    erased_scale: Tensor
    rate_share: Tensor

    def __init__(self, sizes: Sizes, *, decay_rank: int = 64, rate_rank: int = 64) -> None:
        super().__init__(sizes)
        for name, rank in (("decay_rank", decay_rank), ("rate_rank", rate_rank)):
            if rank < 1:
                raise ValueError(f"{name}: expected at least 1, got {rank}")
        D, channels = sizes.hidden_size, sizes.num_kv_heads * sizes.head_dim
        self.mix = TokenMix(D, (0.9, 0.9))
        self.decay_down, self.rate_down = (GateAffine(D, rank, bias=None) for rank in (decay_rank, rate_rank))
        self.decay_up, self.rate_up = (GateAffine(rank, channels, bias=None) for rank in (decay_rank, rate_rank))
        for name in ("channel_bias", "rate_bias", "erased_scale", "rate_share"):
            self.keep(name, torch.empty(channels), trainable=True)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.mix.reset_parameters()
        fill(self.channel_bias, torch.linspace(-5.5, 0.5, len(self.channel_bias)))
        for parameter, start in ((self.rate_bias, -0.19), (self.erased_scale, 0.71), (self.rate_share, 1.02)):
            fill(parameter, torch.full(parameter.shape, start))

    def forward(self, x: Tensor, k: Tensor, stream: Stream) -> tuple[Gate, Write]:
        of_decay, of_rate = self.mix(x, stream, "gate_mix")
        heads = k.shape[2:]
        decay = wide(self.decay_up(self.decay_down(of_decay).tanh())) + self.channel_bias
        log_diag = SLOWEST * decay.sigmoid().unflatten(-1, heads)
        rate = (wide(self.rate_up(self.rate_down(of_rate))) + self.rate_bias).sigmoid().unflatten(-1, heads)
        kappa = l2_normalize(wide(k) * self.erased_scale.view(heads), self.impl)
        gate = Gate(
            log_diag=expand_heads(log_diag, self.sizes.num_heads), w=rate * kappa,
            beta=torch.ones_like(log_diag[..., 0]), u=(-log_diag).exp() * kappa,
        )  # fmt: skip
        return gate, Keyed((k * (1 + (rate - 1) * self.rate_share.view(heads))).to(k.dtype))
