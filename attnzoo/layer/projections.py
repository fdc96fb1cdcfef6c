"""Gate projections: from the hidden states of a layer to the :class:`~attnzoo.algebra.gate.Gate` of its variant.

Each takes the layer's sizes and its own options by keyword, says which gate parts it ``provides``, and maps
``(x [B, T, D], k [B, T, G, K], stream)`` to a gate and a write strength (None, a factor on v ``[B, T, H]`` or
``[B, T, G]``, or ``DELTA_RULE``). A variant's file names its default; any projection that provides the same parts
may stand in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo.algebra.gate import Gate
from attnzoo.errors import unknown
from attnzoo.layer.parts import ShortConvolution, l2_normalize, wide
from attnzoo.layer.stream import Stream

INIT_STD = 0.02
DELTA_RULE: Literal["delta_rule"] = "delta_rule"  # w is k itself, and beta is the write strength as well

Write = Tensor | Literal["delta_rule"] | None


@dataclass(frozen=True)
class Sizes:
    """D hidden, H query heads, G key/value heads, K key channels per head."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


class GateProjection(nn.Module):
    """Base of all projections: no gate at all. ``provides`` names the gate parts that a subclass makes, and
    ``unit_keys`` says that it needs keys of unit length (w = k).

    Args:
        sizes: of the layer.
    """

    provides: ClassVar[tuple[str, ...]] = ()
    unit_keys: ClassVar[bool] = False  # whether w = k, so that the layer must give unit keys

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes

    def reset_parameters(self) -> None:
        """The initialisation of the paper."""

    def forward(self, x: Tensor, k: Tensor, stream: Stream) -> tuple[Gate, Write]:
        """The gate of each token, and how strongly it writes.

        Args:
            x: hidden states, ``[B, T, D]``.
            k: keys as the core gets them, ``[B, T, G, K]``.
            stream: the rows' padding and cache, for projections that look back (a short convolution).

        Returns:
            A gate with the parts ``provides``, and a factor on v ``[B, T, H]`` or ``[B, T, G]``, or None, or
            ``DELTA_RULE`` where w is k and that factor is beta.
        """
        return Gate(), None


class ALiBiSlope(GateProjection):
    """``g = -m_h`` with slopes ``m_h = 2^(-8 h / H)``, h = 1..H (Press et al., 2022, section 3).

    Args:
        learnable_slopes: train the slopes (kept positive by training their logarithm).
    """

    provides = ("log_decay",)
    log_slope: Tensor

    def __init__(self, sizes: Sizes, *, learnable_slopes: bool = False) -> None:
        super().__init__(sizes)
        _own(self, "log_slope", torch.empty(sizes.num_heads), trainable=learnable_slopes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        H = self.sizes.num_heads
        _fill(self.log_slope, [-8 * (h + 1) / H * math.log(2) for h in range(H)])

    def forward(self, x: Tensor, k: Tensor, stream: Stream) -> tuple[Gate, Write]:
        return _constant(-wide(self.log_slope).exp(), x), None


class RetentionDecay(GateProjection):
    """``g = log(1 - 2^(-5 - h))``, h = 0..H-1 (Sun et al., 2023, section 2.2: the gammas of the heads)."""

    provides = ("log_decay",)
    log_gamma: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        _own(self, "log_gamma", torch.empty(sizes.num_heads), trainable=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        _fill(self.log_gamma, [math.log1p(-(2.0 ** (-5 - h))) for h in range(self.sizes.num_heads)])

    def forward(self, x: Tensor, k: Tensor, stream: Stream) -> tuple[Gate, Write]:
        return _constant(wide(self.log_gamma), x), None


class ForgetGate(GateProjection):
    """``g_t = log sigmoid(w x_t + b)`` per head, b = 0 at the start (Lin et al., 2025, section 3)."""

    provides = ("log_decay",)

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.forget_proj = nn.Linear(sizes.hidden_size, sizes.num_heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        _reset_linear(self.forget_proj)

    def forward(self, x: Tensor, k: Tensor, stream: Stream) -> tuple[Gate, Write]:
        return Gate(log_decay=F.logsigmoid(wide(self.forget_proj(x)))), None


class IndependentForgetGate(GateProjection):
    """``g = log sigmoid(b_h)``: the data-independent forget gate (Lin et al., 2025, appendix D).

    Args:
        t_min: 1/e decay length of the first head, in tokens, at the start.
        t_max: that of the last head; the others lie between, evenly in the logarithm: ``exp(g_h) = exp(-1 / T_h)``.

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
        _own(self, "forget_bias", torch.empty(sizes.num_heads), trainable=self.trainable)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        lengths = torch.linspace(math.log(self.t_min), math.log(self.t_max), self.sizes.num_heads).exp()
        _fill(self.forget_bias, (-torch.log(torch.expm1(1 / lengths))).tolist())

    def forward(self, x: Tensor, k: Tensor, stream: Stream) -> tuple[Gate, Write]:
        return _constant(F.logsigmoid(wide(self.forget_bias)), x), None


class FixedForgetGate(IndependentForgetGate):
    """The data-independent gate at its initial values, not trained: ALiBi with slopes ``1 / T_h``."""

    trainable = False


class SoftplusDecay(GateProjection):
    """``g_t = -a_h dt_t`` with ``dt_t = softplus(w x_t + b)`` and ``a_h > 0`` (Dao and Gu, 2024, section 7).

    Args:
        dt_min: smallest step at the start; b is such that dt is log-uniform in ``[dt_min, dt_max]``.
        dt_max: largest step at the start.
        a_max: a is uniform in ``[1, a_max]`` at the start.

    Raises:
        ValueError: not ``0 < dt_min <= dt_max``, or ``a_max < 1``.
    """

    provides = ("log_decay",)
    dt_bias: Tensor
    log_a: Tensor

    def __init__(self, sizes: Sizes, *, dt_min: float = 0.001, dt_max: float = 0.1, a_max: float = 16.0) -> None:
        super().__init__(sizes)
        if not 0 < dt_min <= dt_max:
            raise ValueError(f"dt_min, dt_max: expected 0 < dt_min <= dt_max, got {dt_min} and {dt_max}")
        if a_max < 1:
            raise ValueError(f"a_max: expected at least 1, got {a_max}")
        self.dt_min, self.dt_max, self.a_max = dt_min, dt_max, a_max
        self.dt_proj = nn.Linear(sizes.hidden_size, sizes.num_heads, bias=False)
        _own(self, "dt_bias", torch.empty(sizes.num_heads), trainable=True)
        _own(self, "log_a", torch.empty(sizes.num_heads), trainable=True)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        _reset_linear(self.dt_proj)
        H = self.sizes.num_heads
        dt = torch.empty(H).uniform_(math.log(self.dt_min), math.log(self.dt_max)).exp()
        _fill(self.dt_bias, (dt + torch.log(-torch.expm1(-dt))).tolist())  # the inverse of softplus
        _fill(self.log_a, torch.empty(H).uniform_(1, self.a_max).log().tolist())

    def step(self, x: Tensor) -> Tensor:
        """dt ``[B, T, H]`` in float32."""
        return F.softplus(wide(self.dt_proj(x)) + wide(self.dt_bias))

    def forward(self, x: Tensor, k: Tensor, stream: Stream) -> tuple[Gate, Write]:
        return Gate(log_decay=-wide(self.log_a).exp() * self.step(x)), None


class Mamba2Decay(SoftplusDecay):
    """The softplus decay whose step also scales what is written: ``v_t`` becomes ``dt_t v_t``."""

    def forward(self, x: Tensor, k: Tensor, stream: Stream) -> tuple[Gate, Write]:
        dt = self.step(x)
        return Gate(log_decay=-wide(self.log_a).exp() * dt), dt


class LowRankDiagonal(GateProjection):
    """``a_t = log sigmoid(W_2 W_1 x_t + b) / temperature`` per channel (Yang et al., 2024, GLA, section 4.4).

    Args:
        gate_rank: rank of the projection.
        temperature: larger keeps the gates nearer to 1.

    Raises:
        ValueError: ``gate_rank < 1`` or ``temperature <= 0``.
    """

    provides = ("log_diag",)

    def __init__(self, sizes: Sizes, *, gate_rank: int = 16, temperature: float = 16.0) -> None:
        super().__init__(sizes)
        if gate_rank < 1:
            raise ValueError(f"gate_rank: expected at least 1, got {gate_rank}")
        if temperature <= 0:
            raise ValueError(f"temperature: expected a positive number, got {temperature}")
        self.temperature = temperature
        self.down = nn.Linear(sizes.hidden_size, gate_rank, bias=False)
        self.up = nn.Linear(gate_rank, sizes.num_heads * sizes.head_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        _reset_linear(self.down)
        _reset_linear(self.up)

    def forward(self, x: Tensor, k: Tensor, stream: Stream) -> tuple[Gate, Write]:
        a = F.logsigmoid(wide(self.up(self.down(x)))) / self.temperature
        return Gate(log_diag=a.unflatten(-1, (self.sizes.num_heads, self.sizes.head_dim))), None


class RotaryAngles(GateProjection):
    """Angles ``theta^(-2i/K)``, i = 0..K/2-1, in radians per token (Su et al., 2021, eq. 15).

    Args:
        theta: the base; 500000 as in the baselines of FoX.

    Raises:
        ValueError: ``theta <= 0`` or an odd head dimension.
    """

    provides = ("angle",)
    angle: Tensor

    def __init__(self, sizes: Sizes, *, theta: float = 500_000.0) -> None:
        super().__init__(sizes)
        if theta <= 0:
            raise ValueError(f"theta: expected a positive number, got {theta}")
        self.theta = theta
        _own(self, "angle", rotary_angles(sizes.head_dim, theta), trainable=False)

    def forward(self, x: Tensor, k: Tensor, stream: Stream) -> tuple[Gate, Write]:
        return Gate(angle=wide(self.angle)), None


class DeltaRule(GateProjection):
    """``w = k`` (unit keys), ``beta_t = sigmoid(w x_t)``, which also is the write strength (Yang et al., 2024).

    Args:
        allow_neg_eigval: double beta, so that eigenvalues of the transition reach -1 (Grazzi et al., 2025).
    """

    provides = ("w", "beta")
    unit_keys = True

    def __init__(self, sizes: Sizes, *, allow_neg_eigval: bool = False) -> None:
        super().__init__(sizes)
        self.allow_neg_eigval = allow_neg_eigval
        self.beta_proj = nn.Linear(sizes.hidden_size, sizes.num_kv_heads, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        _reset_linear(self.beta_proj)

    def forward(self, x: Tensor, k: Tensor, stream: Stream) -> tuple[Gate, Write]:
        beta = wide(self.beta_proj(x)).sigmoid() * (2 if self.allow_neg_eigval else 1)
        return Gate(w=k, beta=beta), DELTA_RULE


class PathTransition(GateProjection):
    """PaTH's own ``w`` and ``beta = 2 sigmoid(.)`` (Yang et al., 2025, section 2.2); keys are read plainly.

    Args:
        w: ``"low_rank"``: a low-rank projection and a short convolution, normalised; ``"key"``: the normalised key.
        w_rank: rank of that projection.
        w_conv_size: width of that convolution in tokens, 0 for none.

    Raises:
        ValueError: an unknown ``w``, ``w_rank < 1`` or ``w_conv_size < 0``.
    """

    provides = ("w", "beta")

    def __init__(self, sizes: Sizes, *, w: str = "low_rank", w_rank: int = 32, w_conv_size: int = 3) -> None:
        super().__init__(sizes)
        if w not in ("low_rank", "key"):
            raise unknown("w", w, ("low_rank", "key"))
        if w_rank < 1:
            raise ValueError(f"w_rank: expected at least 1, got {w_rank}")
        width = sizes.num_kv_heads * sizes.head_dim
        self.w_down = self.w_up = self.w_conv = None
        if w == "low_rank":
            self.w_down = nn.Linear(sizes.hidden_size, w_rank, bias=False)
            self.w_up = nn.Linear(w_rank, width, bias=False)
            self.w_conv = ShortConvolution(width, w_conv_size) if w_conv_size else None
        self.beta_proj = nn.Linear(sizes.hidden_size, sizes.num_kv_heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for module in (self.w_down, self.w_up, self.beta_proj):
            if module is not None:
                _reset_linear(module)
        if self.w_conv is not None:
            self.w_conv.reset_parameters()

    def forward(self, x: Tensor, k: Tensor, stream: Stream) -> tuple[Gate, Write]:
        w = k
        if self.w_down is not None and self.w_up is not None:
            w = self.w_up(self.w_down(x))
            if self.w_conv is not None:
                w = self.w_conv(w, stream, "w")
            w = w.unflatten(-1, (self.sizes.num_kv_heads, self.sizes.head_dim))
        beta = 2 * wide(self.beta_proj(x)).sigmoid()
        w, beta = _unit_or_idle(w, beta)
        return Gate(w=w, beta=beta), None


def rotary_angles(head_dim: int, theta: float) -> Tensor:
    """``theta^(-2i/K)`` for i = 0..K/2-1.

    Raises:
        ValueError: an odd ``head_dim``.
    """
    if head_dim % 2:
        raise ValueError(f"head_dim: expected an even number of channels to rotate in pairs, got {head_dim}")
    return theta ** (-torch.arange(0, head_dim, 2).double() / head_dim)


def _unit_or_idle(w: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """w of unit length, in float32 at least (a rounded one may be longer than 1); where it vanishes, beta is 0."""
    w = wide(w)
    length = w.norm(dim=-1)
    return l2_normalize(w), beta.masked_fill(length < 1e-6, 0.0)


def _constant(log_decay: Tensor, x: Tensor) -> Gate:
    return Gate(log_decay=log_decay.expand(*x.shape[:2], -1))


def _own(module: nn.Module, name: str, value: Tensor, *, trainable: bool) -> None:
    """A float32 parameter (or buffer) that the model leaves as it is: no weight decay, no re-initialisation."""
    if trainable:
        parameter = nn.Parameter(value.float())
        parameter._no_weight_decay = parameter._no_reinit = True  # type: ignore[attr-defined]
        module.register_parameter(name, parameter)
    else:
        module.register_buffer(name, value.float())


def _fill(target: Tensor, values: list[float]) -> None:
    with torch.no_grad():
        target.copy_(torch.tensor(values))


def _reset_linear(linear: nn.Linear) -> None:
    nn.init.normal_(linear.weight, std=INIT_STD)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
