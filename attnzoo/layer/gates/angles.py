"""Projections from the input to angles; fixed angles are in ``matrix``.

A gate holds the angle of each token; forms sum them to phases in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.errors import check_least
from attnzoo.layer.gates.base import GateProjection, Sizes, Strength, Write
from attnzoo.layer.gates.decay import StepSize
from attnzoo.layer.gates.matrix import rotary_angles
from attnzoo.layer.modules import ShortConvolution, l2_normalize, softplus
from attnzoo.layer.stream import Stream
from attnzoo.precision import GateAffine, fill, wide
from attnzoo.recurrences.complex_linear import rotate_all


class SelectiveAngles(GateProjection):
    """``theta_t = f_i phi_t`` with RoPE's frequencies ``f_i`` and ``phi`` a short convolution of ``W_2 W_1 x``.

    Movahedi et al., "Selective Rotary Position Embedding", 2025; x has unit length in each of H equal parts.

    Args:
        theta: the base of the frequencies ``theta^(-2i/K)``; they are not trained.
        angle_rank: rank of the projection.
        angle_conv_size: width of the convolution in tokens, 0 for none.
        phase_gate: multiply the angles by ``sigmoid(w x_t + b)`` per head.

    Raises:
        ValueError: ``theta < 1``, ``angle_rank < 1``, ``angle_conv_size < 0``, an odd K, or H that does not divide D.
    """

    provides = ("angle",)
    frequency: Tensor

    def __init__(
        self, sizes: Sizes, *, theta: float = 500_000.0, angle_rank: int = 16, angle_conv_size: int = 4,
        phase_gate: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(sizes)
        if theta < 1:
            raise ValueError(f"theta: expected a base of at least 1 (no frequency over 1), got {theta}")
        check_least(1, angle_rank=angle_rank)
        if angle_conv_size < 0:
            raise ValueError(f"angle_conv_size: expected a number of tokens >= 0, got {angle_conv_size}")
        if sizes.hidden_size % sizes.num_heads:
            raise ValueError(
                f"hidden_size: expected a multiple of num_heads = {sizes.num_heads} for angles from the input, "
                f"got {sizes.hidden_size}"
            )
        self.theta = theta
        angles = sizes.num_heads * (sizes.head_dim // 2)
        self.keep("frequency", rotary_angles(sizes.head_dim, theta))
        self.angle_down = GateAffine(sizes.hidden_size, angle_rank, bias=None, std=None)
        self.angle_up = GateAffine(angle_rank, angles, bias=None, std=None)
        self.angle_conv = ShortConvolution(angles, angle_conv_size, activation="identity") if angle_conv_size else None
        self.phase_proj = GateAffine(sizes.hidden_size, sizes.num_heads) if phase_gate else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        fill(self.frequency, rotary_angles(self.sizes.head_dim, self.theta))
        super().reset_parameters()

    def forward(self, x: Tensor, k: Tensor, stream: Stream) -> tuple[Gate, Write]:
        H = self.sizes.num_heads
        x = l2_normalize(x.unflatten(-1, (H, -1)), self.impl).flatten(-2)
        low = self.angle_down(x)
        phi = self._up(low) if self.angle_conv is None else self.angle_conv(low, stream, "angle", self._up)
        phi = wide(phi).unflatten(-1, (H, -1))
        if self.phase_proj is not None:
            phi = phi * wide(self.phase_proj(x)).sigmoid()[..., None]
        return Gate(angle=wide(self.frequency) * phi), None

    def _up(self, low: Tensor) -> Tensor:
        up: Tensor = self.angle_up(low)
        return up


class Mamba3Decay(StepSize):
    """``g_t = -a_t dt_t`` and ``theta_t = pi dt_t tanh(W x_t)``, with steps ``dt_t`` that also scale what is written.

    ``dt_t = softplus(w x_t + b)`` and ``a_t = softplus(u x_t)`` are each head's own; all heads share ``W`` (Lahoti et
    al., 2026; mamba_ssm's ``modules/mamba3.py`` as first released, March 2026).

    Args:
        dt_min: smallest step at the start; b is such that dt is log-uniform in ``[dt_min, dt_max]``.
        dt_max: largest step at the start.
        a_min: the least value of a.
        trapezoid: also write each token's key and value at the next token (the trapezoidal rule, section 3.1): with
            ``lambda_t = sigmoid(v x_t)`` token t writes its own by ``lambda_t dt_t``, and that of the one before,
            decayed and turned, by ``(1 - lambda_t) dt_t``. Without it lambda is 1.
        rotated_share: share of each head's channels that are rotated, the first ones; an even number of channels.

    Raises:
        ValueError: not ``0 < dt_min <= dt_max``, ``a_min <= 0``, or a share that is over 1 or less than two channels.
    """

    provides = ("log_decay", "angle")
    writes = True

    def __init__(
        self, sizes: Sizes, *, dt_min: float = 0.001, dt_max: float = 0.1, a_min: float = 1e-4,
        rotated_share: float = 0.5, trapezoid: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(sizes, dt_min=dt_min, dt_max=dt_max)
        if a_min <= 0:
            raise ValueError(f"a_min: expected a positive number, got {a_min}")
        pairs = int(sizes.head_dim * rotated_share) // 2
        if sizes.head_dim % 2 or not 0 < pairs <= sizes.head_dim // 2:
            raise ValueError(
                f"rotated_share: expected two or more of an even number of channels, head_dim = {sizes.head_dim}, "
                f"got {rotated_share}"
            )
        self.a_min, self.still = a_min, sizes.head_dim // 2 - pairs
        self.a_proj = GateAffine(sizes.hidden_size, sizes.num_heads, bias=None)
        self.angle_proj = GateAffine(sizes.hidden_size, pairs, bias=None)
        if trapezoid and sizes.num_kv_heads != sizes.num_heads:
            raise ValueError(f"trapezoid: expected False with num_kv_heads = {sizes.num_kv_heads}, got True")
        self.trap_proj = GateAffine(sizes.hidden_size, sizes.num_heads, bias=None) if trapezoid else None
        self.reset_parameters()

    @classmethod
    def opened(cls, tokens: float, options: Mapping[str, Any]) -> dict[str, Any]:
        return {"dt_min": 1 / (tokens * math.log(2)), "dt_max": 1 / (tokens * math.log(2))}

    def forward(self, x: Tensor, k: Tensor, stream: Stream) -> tuple[Gate, Write]:
        dt = self.step(x)
        a = softplus(wide(self.a_proj(x))).clamp(min=self.a_min)
        angle = math.pi * dt[..., None] * wide(self.angle_proj(x)).tanh()[..., None, :]
        write = dt
        if self.trap_proj is not None:
            own = wide(self.trap_proj(x)).sigmoid()
            write = torch.stack([own * dt, (1 - own) * dt], -1)
        return Gate(log_decay=-a * dt, angle=F.pad(angle, (0, self.still))), write

    def written(
        self, k: Tensor, v: Tensor, gate: Gate, write: Strength, stream: Stream
    ) -> tuple[Tensor, Tensor, Strength]:
        if self.trap_proj is None:
            return k, v, write
        assert isinstance(write, Tensor)
        assert gate.angle is not None
        assert gate.log_decay is not None
        before_k, before_v = (
            stream.before(name, one.flatten(2)).view_as(one) for name, one in (("key", k), ("value", v))
        )
        (before_k,) = rotate_all(-gate.angle.double(), before_k)
        own, past = write.unbind(-1)
        past = past * gate.log_decay.exp()
        values = torch.stack([past[..., None] * before_v, own[..., None] * v], 3)
        return torch.stack([before_k, k], 3), values.to(v.dtype), None
