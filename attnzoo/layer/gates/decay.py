"""Projections to a scalar decay per head: constants, forget gates and step sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.algebra.values import has_values
from attnzoo.errors import check_least
from attnzoo.kernels.linear import DecayLogits
from attnzoo.layer.gates.base import GateProjection, Sizes, Write, bias_reaching, step_biases
from attnzoo.layer.modules import log_decays, product, softplus
from attnzoo.layer.stream import Stream
from attnzoo.precision import GateAffine, fill, wide


class ALiBiSlope(GateProjection):
    """``g = -m_h`` with slopes ``m_h = 2^(-8 h / H)``, h = 1..H (Press et al., 2022, section 3).

    Where H is no power of two: the slopes of the largest power of two P below H, then every other slope of 2P (the
    authors' code).

    Args:
        learnable_slopes: train the slopes (kept positive by training their logarithm).
    """

    provides = ("log_decay",)
    log_slope: Tensor

    def __init__(self, sizes: Sizes, *, learnable_slopes: bool = False) -> None:
        super().__init__(sizes)
        self.keep("log_slope", torch.empty(sizes.num_heads), trainable=learnable_slopes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        H = self.sizes.num_heads
        P = 1 << (H.bit_length() - 1)  # slopes 2^(-8 h / P), h = 1..P, then h = 1/2, 3/2, ...
        places = [*range(1, P + 1), *(h + 0.5 for h in range(H - P))]
        fill(self.log_slope, torch.tensor([-8 * h / P * math.log(2) for h in places]))

    def forward(self, x: Tensor, k: Tensor, stream: Stream) -> tuple[Gate, Write]:
        return Gate(log_decay=-wide(self.log_slope).exp()), None


class RetentionDecay(GateProjection):
    """``g = log(1 - 2^(-5 - h))``, h = 0..H-1 (Sun et al., 2023, section 2.2: the gammas of the heads)."""

    provides = ("log_decay",)
    log_gamma: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.keep("log_gamma", torch.empty(sizes.num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        fill(self.log_gamma, torch.tensor([math.log1p(-(2.0 ** (-5 - h))) for h in range(self.sizes.num_heads)]))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load the weights, refusing log-decays above 0: a layer does not check the gates of its own projections."""
        loaded = state_dict.get(f"{prefix}log_gamma")
        if loaded is not None and has_values(loaded) and not bool((loaded <= 0).all()):
            raise ValueError(f"{prefix}log_gamma: expected log decays of 0 or below, got {loaded.tolist()}")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, x: Tensor, k: Tensor, stream: Stream) -> tuple[Gate, Write]:
        return Gate(log_decay=wide(self.log_gamma)), None


class ForgetGate(GateProjection):
    """``g_t = log sigmoid(w x_t + b)`` per head (Lin et al., 2025, section 3).

    Args:
        scale_forget: multiply the logits by ``K^(-1/2)``, as flash-linear-attention does in PaTH-FoX.
        gate_bias: b at the start, 0 in the paper; the larger it is, the closer the gates are to 1.
    """

    provides = ("log_decay",)
    thin = "forget_proj"

    def __init__(self, sizes: Sizes, *, scale_forget: bool = False, gate_bias: float = 0.0) -> None:
        super().__init__(sizes)
        self.factor = sizes.head_dim**-0.5 if scale_forget else 1.0
        self.forget_proj = GateAffine(sizes.hidden_size, sizes.num_heads, bias=gate_bias)
        self.reset_parameters()

    @classmethod
    def opened(cls, tokens: float, options: Mapping[str, Any]) -> dict[str, Any]:
        return {"gate_bias": bias_reaching(tokens)}

    def logits(self, x: Tensor) -> DecayLogits:
        """The logits from which the decays of x are computed."""
        return DecayLogits(*product(self.forget_proj, x), factor=self.factor)

    def forward(self, x: Tensor, k: Tensor, stream: Stream) -> tuple[Gate, Write]:
        known = stream.products.get(self.known)
        g = F.logsigmoid(wide(self.forget_proj(x) if known is None else self.forget_proj.biased(known)))
        return Gate(log_decay=g if self.factor == 1 else g * self.factor), None


class IndependentForgetGate(GateProjection):
    """``g = log sigmoid(b_h)``: the data-independent forget gate (Lin et al., 2025, appendix D).

    Args:
        t_min: T_h of the first head at the start: tokens in which its decay falls to 1/e; 2 in the
            paper's figure 7, with several ``t_max``.
        t_max: T_h of the last head; the others are log-spaced between them, with ``g_h = -1 / T_h``.

    Raises:
        ValueError: not ``0 < t_min <= t_max``.
    """

    provides = ("log_decay",)
    trainable: ClassVar[bool] = True
    forget_bias: Tensor

    def __init__(self, sizes: Sizes, *, t_min: float = 16.0, t_max: float = 4096.0) -> None:
        super().__init__(sizes)
        if not 0 < t_min <= t_max:
            raise ValueError(f"t_min, t_max: expected 0 < t_min <= t_max in tokens, got {t_min} and {t_max}")
        self.t_min, self.t_max = t_min, t_max
        self.keep("forget_bias", torch.empty(sizes.num_heads), trainable=self.trainable)
        self.reset_parameters()

    @classmethod
    def opened(cls, tokens: float, options: Mapping[str, Any]) -> dict[str, Any]:
        return {"t_min": tokens, "t_max": tokens}

    def reset_parameters(self) -> None:
        lengths = torch.linspace(math.log(self.t_min), math.log(self.t_max), self.sizes.num_heads).exp()
        fill(self.forget_bias, -torch.log(torch.expm1(1 / lengths)))

    def forward(self, x: Tensor, k: Tensor, stream: Stream) -> tuple[Gate, Write]:
        return Gate(log_decay=F.logsigmoid(wide(self.forget_bias))), None


class FixedForgetGate(IndependentForgetGate):
    """The data-independent gate at its initial values, not trained: ALiBi with slopes ``1 / T_h``."""

    trainable = False


class StepSize(GateProjection):
    """Step sizes ``dt_t = softplus(w x_t + b)`` per head, from which subclasses compute their gates.

    Args:
        dt_min: smallest step at the start; b is such that dt is log-uniform in ``[dt_min, dt_max]``.
        dt_max: largest step at the start.

    Raises:
        ValueError: not ``0 < dt_min <= dt_max``.
    """

    dt_bias: Tensor

    def __init__(self, sizes: Sizes, *, dt_min: float = 0.001, dt_max: float = 0.1) -> None:
        super().__init__(sizes)
        if not 0 < dt_min <= dt_max:
            raise ValueError(f"dt_min, dt_max: expected 0 < dt_min <= dt_max, got {dt_min} and {dt_max}")
        self.dt_min, self.dt_max = dt_min, dt_max
        self.dt_proj = GateAffine(sizes.hidden_size, sizes.num_heads, bias=None)
        self.keep("dt_bias", torch.empty(sizes.num_heads), trainable=True)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        fill(self.dt_bias, step_biases(self.sizes.num_heads, self.dt_min, self.dt_max))

    def step(self, x: Tensor) -> Tensor:
        """The step sizes dt ``[B, T, H]`` in float32."""
        return softplus(self.dt_proj(x) + wide(self.dt_bias))


class SoftplusDecay(StepSize):
    """``g_t = -a_h dt_t`` with ``dt_t = softplus(w x_t + b)`` and ``a_h > 0`` (Dao and Gu, 2024, section 7).

    Args:
        dt_min: smallest step at the start; b is such that dt is log-uniform in ``[dt_min, dt_max]``.
        dt_max: largest step at the start.
        a_max: a is uniform in ``[1, a_max]`` at the start.

    Raises:
        ValueError: not ``0 < dt_min <= dt_max``, or ``a_max < 1``.
    """

    provides = ("log_decay",)
    thin = "dt_proj"
    log_a: Tensor

    def __init__(self, sizes: Sizes, *, dt_min: float = 0.001, dt_max: float = 0.1, a_max: float = 16.0) -> None:
        super().__init__(sizes, dt_min=dt_min, dt_max=dt_max)
        check_least(1, a_max=a_max)
        self.a_max = a_max
        self.keep("log_a", torch.empty(sizes.num_heads), trainable=True)
        self.reset_parameters()

    @classmethod
    def opened(cls, tokens: float, options: Mapping[str, Any]) -> dict[str, Any]:
        return {"dt_min": 1 / tokens, "dt_max": 1 / tokens, "a_max": 1.0}

    def reset_parameters(self) -> None:
        super().reset_parameters()
        fill(self.log_a, torch.empty(self.sizes.num_heads).uniform_(1, self.a_max).log())

    def logits(self, x: Tensor, known: Tensor | None = None) -> DecayLogits:
        """The logits from which the decays of x are computed; ``known``: the product of the map."""
        step = self.dt_proj(x) if known is None else self.dt_proj.biased(known)
        return DecayLogits(step, self.dt_bias, self.log_a, opposite=True)

    def forward(self, x: Tensor, k: Tensor, stream: Stream) -> tuple[Gate, Write]:
        decay, step = log_decays(self.logits(x, stream.products.get(self.known)), self.impl, steps=self.writes)
        return Gate(log_decay=decay), step


class Mamba2Decay(SoftplusDecay):
    """The softplus decay whose step size is also the write strength: ``v_t`` becomes ``dt_t v_t``."""

    writes = True
    thin = "dt_proj"
