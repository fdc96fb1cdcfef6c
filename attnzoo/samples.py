"""Random inputs for tests, ``attnzoo verify`` and examples."""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.errors import unknown
from attnzoo.registry import get

Regime = Literal["mixed", "open", "closing", "zero", "closed"]


def random_gate(
    name: str,
    B: int,
    T: int,
    H: int,
    G: int,
    K: int,
    *,
    dtype: torch.dtype = torch.float64,
    regime: Regime = "mixed",
    generator: torch.Generator | None = None,
) -> Gate:
    """A gate with the parts that variant ``name`` needs.

    Args:
        name: any of ``list_variants()``; B, T, H, G, K, dtype: as in :func:`random_inputs`.
        generator: of the random draws; None for torch's global one.
        regime: ``open`` (log gates near 0), ``closing`` (about -5 per token), ``zero`` (log gates and beta exactly 0,
            angle 0), ``closed`` (a quarter of the log gates -inf, beta 0 or 2), ``mixed`` (all of these).
    """
    if regime not in get_args(Regime):
        raise unknown("regime", regime, get_args(Regime))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, generator=generator)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, dtype=dtype, generator=generator)

    def log_gate(*shape: int) -> Tensor:
        shift = {"open": 5.0, "closing": -5.0}.get(regime, 1.0)
        g = F.logsigmoid(2 * normal(*shape) + shift)
        draw = uniform(*shape)
        if regime == "zero":
            g = torch.zeros_like(g)
        if regime == "closed":
            g = g.masked_fill(draw < 0.25, -torch.inf)
        if regime == "mixed":
            g = g.masked_fill(draw < 0.05, -torch.inf).masked_fill(draw > 0.9, 0.0)
        return g

    requires = get(name).requires
    parts: dict[str, Tensor] = {}
    if "log_decay" in requires:
        parts["log_decay"] = log_gate(B, T, H)
    if "log_diag" in requires:
        parts["log_diag"] = log_gate(B, T, H, K)
    if "angle" in requires:
        parts["angle"] = normal(B, T, H, K // 2) * (regime != "zero")
    if "w" in requires:
        parts["w"] = F.normalize(normal(B, T, G, K), dim=-1)
    if "beta" in requires:
        beta, draw = 2 * uniform(B, T, G), uniform(B, T, G)
        if regime == "zero":
            beta = torch.zeros_like(beta)
        if regime in ("closed", "mixed"):
            rare = 0.5 if regime == "closed" else 0.1
            beta = beta.masked_fill(draw < rare, 0.0).masked_fill(draw > 1 - rare, 2.0)
        parts["beta"] = beta
    return Gate(**parts)


def random_inputs(
    name: str,
    B: int = 2,
    T: int = 24,
    H: int = 4,
    G: int = 2,
    K: int = 8,
    V: int = 6,
    *,
    dtype: torch.dtype = torch.float64,
    regime: Regime = "mixed",
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Gate]:
    """Normal q, k, v and a gate for variant ``name``.

    Args:
        name: any of ``list_variants()``.
        B: batch.
        T: tokens.
        H: query heads.
        G: key heads.
        K: key channels.
        V: value channels.
        dtype: of everything.
        regime: of the gate, see :func:`random_gate`.
        seed: the same seed gives the same inputs.

    Returns:
        q ``[B, T, H, K]``, k ``[B, T, G, K]``, v ``[B, T, G, V]`` and the gate.
    """
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(B, T, H, K, dtype=dtype, generator=generator)
    k = torch.randn(B, T, G, K, dtype=dtype, generator=generator)
    v = torch.randn(B, T, G, V, dtype=dtype, generator=generator)
    return q, k, v, random_gate(name, B, T, H, G, K, dtype=dtype, regime=regime, generator=generator)
