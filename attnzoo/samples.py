"""Random inputs for tests, ``attnzoo verify`` and examples."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.algebra.parts import PARTS, Draws, GatePart, Regime
from attnzoo.errors import check_least, unknown
from attnzoo.registry import get

__all__ = ["Regime", "random_gate", "random_inputs"]
FREE = 5  # length of an axis that only one part has


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
    factors: int | None = None,
) -> Gate:
    """A gate with the parts that variant ``name`` needs.

    Args:
        name: any of ``list_variants()``; B, T, H, G, K, dtype: as in :func:`random_inputs`.
        generator: source of random numbers; None for torch's global one.
        regime: ``open`` (log gates near 0), ``closing`` (about -5 per token), ``zero`` (log gates and beta exactly 0,
            angle 0), ``closed`` (a quarter of the log gates -inf, beta 0 or 2), ``mixed`` (all of these).
        factors: Householder-like factors per token; None for one, and no axis of them.

    Raises:
        ValueError: no such variant or regime (the message names the nearest), or `factors` below 1 or of a variant
            without `w`.
    """
    if regime not in get_args(Regime):
        raise unknown("regime", regime, get_args(Regime))
    requires = get(name).requires
    if factors is not None and not any(PARTS[part].factored for part in requires):
        raise ValueError(f"factors: expected None, for gates of {name!r} have no w, got {factors}")
    check_least(1, factors=factors)

    draws = Draws(regime, dtype, generator)
    sizes = {"B": B, "T": T, "H": H, "G": G, "K": K, "K/2": K // 2, "H or 1": H, "n": factors or 1}
    several = factors is not None
    return Gate(
        **{
            part: declared.sample(draws, tuple(sizes.get(axis, FREE) for axis in _shape(declared, several).split(", ")))
            for part, declared in PARTS.items()
            if part in requires
        }
    )


def _shape(part: GatePart, several: bool) -> str:
    return part.shapes[several and part.factored]


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
    factors: int | None = None,
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
        dtype: dtype of all tensors.
        regime: regime of the gate, see :func:`random_gate`.
        seed: the same seed gives the same inputs.
        factors: factors of the gate, see :func:`random_gate`.

    Returns:
        q ``[B, T, H, K]``, k ``[B, T, G, K]``, v ``[B, T, G, V]`` and the gate.
    """
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(B, T, H, K, dtype=dtype, generator=generator)
    k = torch.randn(B, T, G, K, dtype=dtype, generator=generator)
    v = torch.randn(B, T, G, V, dtype=dtype, generator=generator)
    gate = random_gate(name, B, T, H, G, K, dtype=dtype, regime=regime, generator=generator, factors=factors)
    return q, k, v, gate
