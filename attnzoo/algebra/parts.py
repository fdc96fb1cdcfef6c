"""The parts that a gate may have, each declared here alone: shapes, values, samples, and its place in the product."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import KW_ONLY, dataclass, field
from functools import reduce
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

Regime = Literal["mixed", "open", "closing", "zero", "closed"]
Parts = Any  # a GateParts or Gate, which `attnzoo.algebra.gate` makes of these parts


@dataclass(frozen=True)
class Draws:
    """The random numbers that :func:`attnzoo.samples.random_gate` makes parts of."""

    regime: Regime
    dtype: torch.dtype
    generator: torch.Generator | None

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, generator=self.generator)

    def uniform(self, shape: tuple[int, ...]) -> Tensor:
        return torch.rand(shape, dtype=self.dtype, generator=self.generator)


@dataclass(frozen=True)
class GatePart:
    """One part of a gate: all that the rest of the library must know of it.

    Args:
        symbol: in equations.
        shapes: accepted shapes by the names of their axes (``H or 1``: either), the whole part first; a part of one
            axis holds for every token, and an axis of another name may have any length. A part that may have several
            factors per token has two shapes, the second with their axis n.
        values: what the entries are, in words.
        refuse: a function of the part and its gate that says what is wrong with the part's values, or "".
        sample: a function of random draws and a shape that returns a random part.
        tex: the symbol in TeX, without its token.
        matrix: the factor of R_t, ``[B, T, H, K, K]``, from a float64 gate with an entry per token and query head, and
            q, of which only the shape and the device count; factors are multiplied in the order of :data:`PARTS`. None
            where the part is not a factor of its own.
        factor: that factor in symbols, in ASCII.
        letter: the factor's letter on the documentation page of products.
        of: the part whose factor this one belongs to, and without which it has no effect; with a ``matrix`` of its own
            it makes another factor in that one's place.
        optional: whether the part that it is of may come without it.
        neutral: the value at which the transition is the identity.
        decays: whether the part is a natural log of the fraction that a token leaves.
        expands: whether its factor may make a vector longer: then no certificate holds.
        rounded: whether the part may come in the dtype of q; others must be float32 or float64.
        readout: whether readouts alone read the part, so that it is in no pair.
        projections: the layer's default gate projections for this part, names or classes, on the linear and on the
            softmax side.
    """

    symbol: str
    shapes: tuple[str, ...]
    values: str
    refuse: Callable[[Tensor, Parts], str]
    sample: Callable[[Draws, tuple[int, ...]], Tensor]
    _: KW_ONLY
    tex: str
    matrix: Callable[[Parts, Tensor], Tensor] | None = None
    factor: str = ""
    letter: str = ""
    of: str = ""
    optional: bool = False
    neutral: float = 0.0
    decays: bool = False
    expands: bool = False
    rounded: bool = False
    readout: bool = False
    projections: tuple[Any, Any] | None = None
    ndim: int = field(init=False)  # axes of the whole part
    factored: bool = field(init=False)  # whether the part may have a factor axis n
    per_query_head: bool = field(init=False)  # whether the part has an entry per query head, not per key head
    per_key_head: bool = field(init=False)

    def __post_init__(self) -> None:
        axes = self.shapes[0].split(", ")
        object.__setattr__(self, "ndim", len(axes))
        object.__setattr__(self, "factored", ", n" in self.shapes[-1])
        object.__setattr__(self, "per_query_head", any(axis.split(" or ")[0] == "H" for axis in axes))
        object.__setattr__(self, "per_key_head", axes[2:3] == ["G"])

    @property
    def carries(self) -> bool:
        """Whether the part changes keys: it is a factor of R_t or belongs to one. The scalar decay does not."""
        return bool(self.matrix or self.of)

    @property
    def shown(self) -> str:
        """The accepted shapes in print."""
        if self.factored:
            return f"[{self.shapes[-1].replace(', n', '[, n]')}]"
        return " or ".join(f"[{shape}]" for shape in self.shapes)


def _refuse_logs(x: Tensor, gate: Parts) -> str:
    if bool((x <= 0).all()):
        return ""
    return f"expected natural logs <= 0, got {'nan' if bool(x.isnan().any()) else f'{x.max().item():.6g}'}"


def _refuse_angle(x: Tensor, gate: Parts) -> str:
    return "" if bool(x.isfinite().all()) else "expected finite radians, got inf or nan"


def _refuse_beta(x: Tensor, gate: Parts) -> str:
    if bool(((x >= 0) & (x <= 2)).all()):
        return ""
    return f"expected values in [0, 2], got {x.min().item():.6g} to {x.max().item():.6g}"


def _refuse_levels(x: Tensor, gate: Parts) -> str:
    return "" if bool(((x >= 0) & x.isfinite()).all()) else f"expected finite weights of 0 or more, got {x.min():.6g}"


def _refuse_w(x: Tensor, gate: Parts) -> str:
    tolerance = 2e-2 if x.dtype in (torch.float16, torch.bfloat16) else 1e-3
    length = x.double().norm(dim=-1)
    if gate.beta is not None:
        length = length.masked_fill(gate.beta == 0, 0)
    return "" if bool((length <= 1 + tolerance).all()) else f"expected lengths of at most 1, got {length.max():.5g}"


def _sample_logs(draws: Draws, shape: tuple[int, ...]) -> Tensor:
    shift = {"open": 5.0, "closing": -5.0}.get(draws.regime, 1.0)
    g, draw = F.logsigmoid(2 * draws.normal(shape) + shift), draws.uniform(shape)
    if draws.regime == "zero":
        return torch.zeros_like(g)
    if draws.regime == "closed":
        return g.masked_fill(draw < 0.25, -torch.inf)
    if draws.regime == "mixed":
        return g.masked_fill(draw < 0.05, -torch.inf).masked_fill(draw > 0.9, 0.0)
    return g


def _sample_angle(draws: Draws, shape: tuple[int, ...]) -> Tensor:
    return draws.normal(shape) * (draws.regime != "zero")


def _sample_w(draws: Draws, shape: tuple[int, ...]) -> Tensor:
    return F.normalize(draws.normal(shape), dim=-1)


def _refuse_u(x: Tensor, gate: Parts) -> str:
    return "" if bool(x.isfinite().all()) else "expected finite numbers, got inf or nan"


def _sample_u(draws: Draws, shape: tuple[int, ...]) -> Tensor:
    return _sample_w(draws, shape) / 2  # products of longer ones grow beyond every tolerance


def _sample_beta(draws: Draws, shape: tuple[int, ...]) -> Tensor:
    beta, draw = 2 * draws.uniform(shape), draws.uniform(shape)
    if draws.regime == "zero":
        return torch.zeros_like(beta)
    if draws.regime in ("closed", "mixed"):
        rare = 0.5 if draws.regime == "closed" else 0.1
        return beta.masked_fill(draw < rare, 0.0).masked_fill(draw > 1 - rare, 2.0)
    return beta


def _decay_matrix(gate: Parts, q: Tensor) -> Tensor:
    return torch.diag_embed(cast(Tensor, gate.log_diag).exp())


def _rotation_matrix(gate: Parts, q: Tensor) -> Tensor:
    angle = cast(Tensor, gate.angle)
    cos, sin = angle.cos().repeat_interleave(2, -1), angle.sin()
    off_diagonal = torch.stack([sin, torch.zeros_like(sin)], -1).flatten(-2)[..., :-1]
    return torch.diag_embed(cos) - torch.diag_embed(off_diagonal, 1) + torch.diag_embed(off_diagonal, -1)


def _householder_matrix(gate: Parts, q: Tensor) -> Tensor:
    w, beta = gate.w, gate.beta
    eye = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device)
    if beta is None:
        return eye
    factors: Tensor = eye - beta[..., None, None] * w[..., :, None] * w[..., None, :]
    return factors if gate.factors is None else reduce(torch.matmul, factors.unbind(3))


def _oblique_matrix(gate: Parts, q: Tensor) -> Tensor:
    eye = torch.eye(gate.w.shape[-1], dtype=gate.w.dtype, device=gate.w.device)
    found: Tensor = eye - gate.beta[..., None, None] * gate.u[..., :, None] * gate.w[..., None, :]
    return found


PARTS: dict[str, GatePart] = {
    "log_decay": GatePart(
        "gₜ", ("B, T, H", "H"), "natural log ≤ 0 (−1e4 closes)", _refuse_logs, _sample_logs, tex="g", decays=True,
        projections=("softplus", "forget"),
    ),
    "log_diag": GatePart(
        "aₜ", ("B, T, H, K",), "natural log per channel, ≤ 0", _refuse_logs, _sample_logs, tex="a", decays=True,
        matrix=_decay_matrix, factor="Diag(exp(a_t))", letter="D", projections=("low_rank", "full_rank"),
    ),
    "angle": GatePart(
        "θₜ", ("B, T, H or 1, K/2", "K/2"), "radians per token", _refuse_angle, _sample_angle, tex=r"\theta",
        matrix=_rotation_matrix, factor="Rot(theta_t)", letter="P", projections=("selective", "selective"),
    ),
    "w": GatePart(
        "wₜ", ("B, T, G, K", "B, T, G, n, K"), "unit vectors, or shorter", _refuse_w, _sample_w, tex="w", rounded=True,
        matrix=_householder_matrix, factor="I - beta_t w_t w_t^T", letter="H", projections=("delta", "path"),
    ),
    "beta": GatePart(
        "βₜ", ("B, T, G", "B, T, G, n"), "in [0, 2]", _refuse_beta, _sample_beta, tex=r"\beta", of="w", rounded=True,
    ),
    "u": GatePart(
        "uₜ", ("B, T, G, K",), "finite", _refuse_u, _sample_u, tex="u", of="w", optional=True, expands=True,
        rounded=True, matrix=_oblique_matrix, factor="I - beta_t u_t w_t^T", letter="O",
    ),
    "levels": GatePart(
        "μₜ", ("B, T, H, L",), "weights ≥ 0", _refuse_levels, lambda draws, shape: 2 * draws.uniform(shape),
        tex=r"\mu", neutral=1.0, readout=True, projections=("levels", "levels"),
    ),
    "log_decay_back": GatePart(
        "hₜ", ("B, T, H",), "natural log ≤ 0 (−1e4 closes)", _refuse_logs, _sample_logs, tex="h", readout=True,
        projections=("forget_back", "forget_back"),
    ),
}  # fmt: skip


def groups(parts: Collection[str] | None = None) -> tuple[tuple[str, ...], ...]:
    """The sets of ``parts`` (None: all) that belong together: each factor's part with those that only modify it (w with
    beta). What readouts alone read is in none."""
    chosen = [name for name in PARTS if parts is None or name in parts]
    own = [name for name in chosen if not PARTS[name].of and not PARTS[name].readout]
    return tuple((name, *(other for other in chosen if PARTS[other].of == name)) for name in own)


def factors_in(parts: Collection[str]) -> list[str]:
    """The parts whose matrices are multiplied to R_t of a gate with ``parts``, in their order."""
    instead = {PARTS[name].of: name for name in PARTS if name in parts and PARTS[name].of and PARTS[name].matrix}
    own = [name for name in PARTS if name in parts and PARTS[name].matrix and not PARTS[name].of]
    return [instead.get(name, name) for name in own]


def in_product(factors: Iterable[str]) -> str:
    """Factors of R_t in symbols, as their product."""
    given = list(factors)
    return given[0] if len(given) == 1 else " ".join(f"({f})" if "-" in f else f for f in given) or "I"
