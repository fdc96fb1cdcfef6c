"""The base class of gate projections, which map the hidden states of a layer to the gate of its variant.

A projection takes the layer's sizes and its own options by keyword, declares the gate parts it ``provides``, and maps
``(x [B, T, D], k [B, T, G, K], stream)`` to a gate and a write strength (None, a factor on v ``[B, T, H]`` or
``[B, T, G]``, or ``DELTA_RULE``), with the keys that it makes as :class:`Keyed`. A variant's file names its default
projection; any other that provides the same parts can replace it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.layer.modules import ShortConvolution
from attnzoo.layer.stream import Stream
from attnzoo.precision import GateAffine, PreciseModule

DELTA_RULE: Literal["delta_rule"] = "delta_rule"  # a write strength: w is k itself, and beta also scales v


@dataclass(frozen=True)
class Keyed:
    """What a gate projection that makes the keys returns in place of a write strength.

    Args:
        keys: of the core, ``[B, T, G, K]``.
        strength: the write strength, or None.
    """

    keys: Tensor
    strength: Strength = None


Strength = Tensor | Literal["delta_rule"] | None
Write = Strength | Keyed


@dataclass(frozen=True)
class Sizes:
    """D hidden, H query heads, G key/value heads, K key channels per head."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


class GateProjection(PreciseModule):
    """Base of all gate projections, itself without a gate.

    A subclass declares in ``provides`` the gate parts that it makes, in ``unit_keys`` that it needs keys of unit length
    (w = k), in ``writes`` that it returns a write strength, and in ``makes_keys`` that it returns the core's keys.

    Args:
        sizes: the layer's sizes.
    """

    provides: ClassVar[tuple[str, ...]] = ()
    unit_keys: ClassVar[bool] = False  # whether w = k, so that the layer must normalise its keys
    writes: ClassVar[bool] = False  # whether it returns a write strength, for the linear side only
    makes_keys: ClassVar[bool] = False  # whether it returns them, as Keyed
    thin: ClassVar[str] = ""  # its map of x whose product the layer may make; not inherited
    known: ClassVar[str] = ""  # the name of this product in ``stream.products``
    impl: str = "auto"  # that of the layer

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.thin = vars(cls).get("thin", "")
        cls.known = cls.thin.removesuffix("_proj")

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes

    @classmethod
    def opened(cls, tokens: float, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options with which decays begin by falling to 1/e in so many tokens; none where no option says it.

        Args:
            tokens: of that fall, where the projection's weights are 0.
            options: other options of the projection, where they are given.
        """
        return {}

    @property
    def maps(self) -> dict[str, GateAffine]:
        """Thin maps of x by the names that their products have in ``stream.products``, where the layer makes them."""
        part = getattr(self, self.thin) if self.thin else None
        return {} if part is None else {self.known: part}

    def reset_parameters(self) -> None:
        """Initialise the weights as the projection's paper does."""
        for part in self.children():
            if isinstance(part, GateAffine | ShortConvolution):
                part.reset_parameters()

    def forward(self, x: Tensor, k: Tensor, stream: Stream) -> tuple[Gate, Write]:
        """The gate, and the write strength of each token.

        Args:
            x: hidden states, ``[B, T, D]``.
            k: keys after norm and feature map, ``[B, T, G, K]``, or ``[B, T, G, n, K]`` where each token has n.
            stream: the rows' padding and cache, for projections that look back (a short convolution).

        Returns:
            A gate with the parts ``provides``, and a factor on v ``[B, T, H]`` or ``[B, T, G]``, or None, or
            ``DELTA_RULE`` where w is k and that factor is beta, or a :class:`Keyed` with one of them.
        """
        return Gate(), None

    def written(
        self, k: Tensor, v: Tensor, gate: Gate, write: Strength, stream: Stream
    ) -> tuple[Tensor, Tensor, Strength]:
        """The core's keys and values, ``[B, T, G, n, K]`` where a token writes n, and the strength that is left."""
        return k, v, write


def step_biases(count: int, least: float, most: float) -> Tensor:
    """Biases ``[count]`` at which softplus is a step size, drawn log-uniformly from ``least`` to ``most``."""
    step = torch.empty(count).uniform_(math.log(least), math.log(most)).exp()
    return step if step.is_meta else step + torch.log(-torch.expm1(-step))  # the inverse of softplus


def bias_reaching(tokens: float) -> float:
    """The logit, to three digits, of a gate that falls to 1/e in so many tokens."""
    return round(-math.log(math.expm1(1 / tokens)), 3)
