"""Projections to a matrix transition: decays per channel, angles, and Householder-like factors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.errors import check_least, unknown
from attnzoo.kernels.linear import DecayLogits
from attnzoo.layer.gates.base import DELTA_RULE, GateProjection, Sizes, Write, bias_reaching
from attnzoo.layer.modules import ShortConvolution, l2_normalize, log_decays, product
from attnzoo.layer.stream import Stream
from attnzoo.precision import GateAffine, fill, wide


class LowRankDiagonal(GateProjection):
    """``a_t = log sigmoid(W_2 W_1 x_t + b) / temperature`` per channel (Yang et al., 2024, GLA, section 4.4).

    Args:
        gate_rank: rank of the projection; None for a full one, without ``W_1``.
        temperature: the larger it is, the closer the gates are to 1.
        gate_bias: b at the start.

    Raises:
        ValueError: ``gate_rank < 1`` or ``temperature <= 0``.
    """

    provides = ("log_diag",)
    thin = "down"

    def __init__(
        self, sizes: Sizes, *, gate_rank: int | None = 16, temperature: float = 16.0, gate_bias: float = 0.0
    ) -> None:
        super().__init__(sizes)
        check_least(1, gate_rank=gate_rank)
        if temperature <= 0:
            raise ValueError(f"temperature: expected a positive number, got {temperature}")
        self.temperature = temperature
        self.down = None if gate_rank is None else GateAffine(sizes.hidden_size, gate_rank, bias=None)
        self.up = GateAffine(gate_rank or sizes.hidden_size, sizes.num_heads * sizes.head_dim, bias=gate_bias)
        self.reset_parameters()

    @classmethod
    def opened(cls, tokens: float, options: Mapping[str, Any]) -> dict[str, Any]:
        return {"gate_bias": bias_reaching(tokens / options.get("temperature", 16.0))}

    def logits(self, x: Tensor, apart: bool = True, known: Tensor | None = None) -> DecayLogits:
        """The logits from which the decays of x are computed; ``apart``: their bias comes beside them; ``known``: the
        product of the first map."""
        low = x if self.down is None else self.down(x) if known is None else self.down.biased(known)
        return DecayLogits(*product(self.up, low, apart), factor=1 / self.temperature)

    def forward(self, x: Tensor, k: Tensor, stream: Stream) -> tuple[Gate, Write]:
        known = stream.products.get(self.known)
        a, _ = log_decays(self.logits(x, apart=x.is_cuda, known=known), self.impl)
        return Gate(log_diag=a.unflatten(-1, (self.sizes.num_heads, self.sizes.head_dim))), None


class RotaryAngles(GateProjection):
    """Angles ``theta^(-2i/K)``, i = 0..K/2-1, in radians per token (Su et al., 2021, eq. 15).

    Args:
        theta: the base; 500000 as in the baselines of FoX.
        rotated: number of rotated channels per head, the first ones, taken as K in the formula; None for all.

    Raises:
        ValueError: ``theta < 1``, or a number of rotated channels that is odd or larger than a head's.
    """

    provides = ("angle",)
    angle: Tensor

    def __init__(self, sizes: Sizes, *, theta: float = 500_000.0, rotated: int | None = None) -> None:
        super().__init__(sizes)
        if theta < 1:
            raise ValueError(f"theta: expected a base of at least 1 (no angle over 1 radian), got {theta}")
        if rotated is not None and not (0 < rotated <= sizes.head_dim and rotated % 2 == 0):
            raise ValueError(f"rotated: expected an even number of channels up to K = {sizes.head_dim}, got {rotated}")
        self.theta, self.rotated = theta, rotated
        self.keep("angle", self._angles())

    def _angles(self) -> Tensor:
        K = self.sizes.head_dim
        angle = rotary_angles(self.rotated or K, self.theta)
        return F.pad(angle, (0, K // 2 - len(angle)))

    def reset_parameters(self) -> None:
        fill(self.angle, self._angles())

    def forward(self, x: Tensor, k: Tensor, stream: Stream) -> tuple[Gate, Write]:
        return Gate(angle=wide(self.angle)), None


class DeltaRule(GateProjection):
    """``w = k`` (unit keys), ``beta_t = sigmoid(w x_t)``, which also is the write strength (Yang et al., 2024).

    Args:
        allow_neg_eigval: double beta, so that eigenvalues of the transition reach -1 (Grazzi et al., 2025).
        num_householder: n, the number of erasures and writes per token, each with its own key, value and beta
            (DeltaProduct, Siems et al., 2025, section 3).

    Raises:
        ValueError: ``num_householder < 1``.
    """

    provides = ("w", "beta")
    unit_keys = True
    writes = True
    thin = "beta_proj"

    def __init__(self, sizes: Sizes, *, allow_neg_eigval: bool = False, num_householder: int = 1) -> None:
        super().__init__(sizes)
        self.allow_neg_eigval, self.factors = allow_neg_eigval, checked_factors(num_householder)
        self.beta_proj = GateAffine(sizes.hidden_size, sizes.num_kv_heads * self.factors, bias=None)
        self.reset_parameters()

    def forward(self, x: Tensor, k: Tensor, stream: Stream) -> tuple[Gate, Write]:
        known = stream.products.get(self.known)
        logits = self.beta_proj(x) if known is None else self.beta_proj.biased(known)
        beta = by_factor(wide(logits).sigmoid(), -1, self.factors)
        if self.allow_neg_eigval:
            beta = 2 * beta
            if k.dtype.itemsize == 2:  # a rounded key may be longer than 1, so that the factor could expand
                beta = beta / wide(k.detach()).square().sum(-1).clamp(min=1)
        return Gate(w=k, beta=beta), DELTA_RULE


class PathTransition(GateProjection):
    """PaTH's own ``w`` and ``beta = 2 sigmoid(.)`` (Yang et al., 2025, section 2.2); scores use the keys as they are.

    Args:
        w: ``"low_rank"``: a low-rank projection and a short convolution, normalised; ``"key"``: the normalised key.
        w_rank: rank of that projection.
        w_conv_size: width of that convolution in tokens, 0 for none.
        num_householder: n, factors per token, each with a w and a beta of its own: the dual of DeltaProduct's
            transition (Siems et al., 2025).

    Raises:
        ValueError: an unknown ``w``, ``w_rank < 1``, ``w_conv_size < 0`` or ``num_householder < 1``, or with
            ``w="key"`` several factors or options of the projection.
    """

    provides = ("w", "beta")

    def __init__(
        self, sizes: Sizes, *, w: str = "low_rank", w_rank: int = 32, w_conv_size: int = 3, num_householder: int = 1
    ) -> None:
        super().__init__(sizes)
        if w not in ("low_rank", "key"):
            raise unknown("w", w, ("low_rank", "key"))
        check_least(1, w_rank=w_rank)
        if w_conv_size < 0:
            raise ValueError(f"w_conv_size: expected a number of tokens >= 0, got {w_conv_size}")
        if w == "key" and num_householder > 1:
            raise ValueError(f"num_householder: expected 1 with w='key' (a token has one key), got {num_householder}")
        for name, given, usual in (("w_rank", w_rank, 32), ("w_conv_size", w_conv_size, 3)):
            if w == "key" and given != usual:
                raise ValueError(f"{name}: expected {usual} with w='key' (no projection to w), got {given}")
        self.factors = checked_factors(num_householder)
        width = sizes.num_kv_heads * self.factors * sizes.head_dim
        self.w_down = self.w_up = self.w_conv = None
        if w == "low_rank":
            self.w_down = GateAffine(sizes.hidden_size, w_rank, bias=None)
            self.w_up = GateAffine(w_rank, width, bias=None)
            self.w_conv = ShortConvolution(width, w_conv_size) if w_conv_size else None
        self.beta_proj = GateAffine(sizes.hidden_size, sizes.num_kv_heads * self.factors)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for module in (self.w_down, self.w_up, self.beta_proj, self.w_conv):  # not in the order of their names
            if module is not None:
                module.reset_parameters()

    def forward(self, x: Tensor, k: Tensor, stream: Stream) -> tuple[Gate, Write]:
        w, down, up, conv = k, self.w_down, self.w_up, self.w_conv
        if down is not None and up is not None:
            w = up(down(x))
            if conv is not None:
                w = conv(w, stream, "w")
            w = by_factor(w.unflatten(-1, (-1, self.sizes.head_dim)), -2, self.factors)
        beta = 2 * by_factor(wide(self.beta_proj(x)).sigmoid(), -1, self.factors)
        return Gate(w=l2_normalize(wide(w), self.impl), beta=beta), None  # a rounded w may be longer than 1


def checked_factors(number: int) -> int:
    """``num_householder`` itself.

    Raises:
        ValueError: less than one factor.
    """
    if number < 1:
        raise ValueError(f"num_householder: expected at least 1 factor per token, got {number}")
    return number


def by_factor(x: Tensor, heads: int, factors: int) -> Tensor:
    """``x`` with its axis ``heads`` of G n entries split into G and n; unchanged where n is 1."""
    return x if factors == 1 else x.unflatten(heads, (-1, factors))


def rotary_angles(head_dim: int, theta: float, to_the_end: bool = False) -> Tensor:
    """``theta^(-2i/K)`` for i = 0..K/2-1; ``theta^(-i/(K/2-1))``, down to 1/theta, where ``to_the_end`` (RetNet).

    Raises:
        ValueError: an odd ``head_dim``.
    """
    if head_dim % 2:
        raise ValueError(
            "head_dim (by default hidden_size / num_heads): expected an even number of channels to rotate in pairs, "
            f"got {head_dim}"
        )
    with torch.device("cpu"):  # on the meta device PyTorch imports its compiler for powers
        if to_the_end:
            angles = theta ** -torch.linspace(0, 1, head_dim // 2, dtype=torch.float64)
        else:
            angles = theta ** (-torch.arange(0, head_dim, 2).double() / head_dim)
    return angles.to(torch.get_default_device())
