"""The gate: the transition ``A_t = exp(g_t) R_t`` of every variant, in parts that are declared here alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import reduce
from typing import Any, Literal, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.errors import unknown

Regime = Literal["mixed", "open", "closing", "zero", "closed"]

CLOSED = -1.0e4


def is_closed(log: Tensor) -> Tensor:
    """A mask of the closed log gates: those of at most ``CLOSED`` = -1e4, which are treated exactly as -inf.

    Large negative numbers are common as masks. Their exp is 0 in every dtype, but added to a running sum they would
    round away every gate after them.
    """
    return log <= -1.0e4  # CLOSED as a literal: torch.compile(dynamic=True) makes symbols of global floats


@dataclass(frozen=True, eq=False)
class GateParts:
    """The parts that a gate may have, in any layout; see :class:`Gate` for what they mean."""

    log_decay: Tensor | None = None
    log_diag: Tensor | None = None
    angle: Tensor | None = None
    w: Tensor | None = None
    beta: Tensor | None = None
    u: Tensor | None = None
    levels: Tensor | None = None
    log_decay_back: Tensor | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts that are given."""
        return tuple([name for name in type(self).__match_args__ if getattr(self, name) is not None])

    def map(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """Apply ``fn`` to every part that is given."""
        return type(self)(**{name: fn(getattr(self, name)) for name in self.parts})


@dataclass(frozen=True, eq=False)
class Gate(GateParts):
    r"""The transition of each token, as the parts a variant needs.

    The scalar part is :math:`g_t` = ``log_decay``. The matrix part is the product, in this order,

    .. math:: R_t = \mathrm{Diag}(e^{a_t})\; \mathrm{Rot}(\theta_t)\; (I - \beta_t u_t w_t^\top)

    of the parts that are given (a missing part is the identity, a missing u is w). ``Rot`` turns the coordinate
    pairs (2i, 2i+1) by the angle ``theta[i]``, as RoPE does (Su et al., 2021, eq. 15).

    w and beta may have one more axis, of n factors per token, :math:`(I - \beta_{t1} w_{t1} w_{t1}^\top) \cdots
    (I - \beta_{tn} w_{tn} w_{tn}^\top)` in place of the one: a state passes the first of them first (DeltaProduct,
    Siems et al., 2025). The axis stands behind the heads, so that time and heads keep their places in every part.

    Args:
        log_decay: g, natural log, <= 0, ``[B, T, H]``, or ``[H]`` (every token). At most -1e4 it is closed, as by -inf.
        log_diag: a, natural log per channel, <= 0, closed as above, ``[B, T, H, K]``.
        angle: theta in radians per token, ``[K/2]`` (every token, every head), ``[B, T, 1, K/2]`` (every head) or
            ``[B, T, H, K/2]``.
        w: vectors of length 1 or less of the Householder-like factor, ``[B, T, G, K]``, or of n: ``[B, T, G, n, K]``.
        beta: its strength in [0, 2], ``[B, T, G]`` or ``[B, T, G, n]``, as w.
        u: the vectors that are read where w is erased, ``[B, T, G, K]``, beside one w per token; with them the factor
            may make vectors longer (RWKV-7, Peng et al., 2025).
        levels: weights >= 0 of L levels of the past, ``[B, T, H, L]``, which a readout reads (log-linear attention).
        log_decay_back: the log decay towards later tokens, as log_decay, ``[B, T, H]``, of readouts that see those.
    """

    @property
    def per_query_head(self) -> bool:
        """Whether the matrix part may differ among the query heads of a key head, so that each needs its own carried
        keys."""
        return any(PARTS[name].carries and PARTS[name].per_query_head for name in self.parts)

    @property
    def expands(self) -> bool:
        """Whether the matrix part may make a vector longer."""
        return any(PARTS[name].expands for name in self.parts)

    @property
    def factors(self) -> int | None:
        """The number n of Householder-like factors per token; None where w and beta have no factor axis or are
        missing."""
        x, axes = (self.beta, 3) if self.w is None else (self.w, 4)
        return x.shape[3] if x is not None and x.ndim > axes else None

    def slice(self, start: int, stop: int) -> Gate:
        """The gate of tokens ``start`` to ``stop`` (a part that holds for every token stays as it is)."""
        return self.map(lambda part: part if part.ndim == 1 else part[:, start:stop])

    def at(self, t: int) -> Gate:
        """The gate of one token, in parts without the axis of time (one that holds for every token stays as it is)."""
        return self.map(lambda part: part if part.ndim == 1 else part[:, t])

    def neutral_where(self, absent: Tensor) -> Gate:
        """The gate with an identity transition at the tokens where ``absent`` ``[B, T]`` is true."""
        gate = self._expanded(*absent.shape)
        masked = {
            name: getattr(gate, name).masked_fill(_unsqueeze_to(absent, getattr(gate, name).ndim), PARTS[name].neutral)
            for name in gate.parts
        }
        return replace(gate, **masked)

    def per_token(self, q: Tensor) -> Gate:
        """Parts that hold for every token expanded to ``[B, T, ...]``, with q ``[B, T, H, K]``.

        An angle ``[K/2]`` becomes ``[B, T, 1, K/2]``.
        """
        return self._expanded(*q.shape[:2])

    def _expanded(self, B: int, T: int) -> Gate:
        shared = {name: getattr(self, name) for name in self.parts if getattr(self, name).ndim == 1}
        if not shared:
            return self
        return replace(self, **{name: x.expand(B, T, *(1,) * (PARTS[name].ndim - 3), -1) for name, x in shared.items()})

    def dense(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """The gate as explicit float64 matrices: the product of its parts' factors in the order of :data:`PARTS`.

        Args:
            q: queries ``[B, T, H, K]``; only their shape and device are used.

        Returns:
            g ``[B, T, H]`` and R ``[B, T, H, K, K]``, float64.
        """
        B, T, H, K = q.shape
        gate = self.per_token(q).map(Tensor.double)
        matrices = [cast(Callable[..., Tensor], PARTS[name].matrix)(gate, q) for name in factors_in(gate.parts)]
        eye = torch.eye(K, dtype=torch.float64, device=q.device)
        return self.decay(q), reduce(torch.matmul, matrices, eye).expand(B, T, H, K, K)

    def decay(self, q: Tensor) -> Tensor:
        """g of every token in float64, ``[B, T, H]``, with q ``[B, T, H, K]``: 0 without one, -inf where it closes."""
        if self.log_decay is None:
            return q.new_zeros(q.shape[:3], dtype=torch.float64)
        return self.log_decay.double().masked_fill(is_closed(self.log_decay), -torch.inf).expand(q.shape[:3])


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
        matrix: the factor of R_t, ``[B, T, H, K, K]``, from a float64 gate per token and q, of which only the shape and
            the device count; factors are multiplied in the order of :data:`PARTS`. None where the part is not a factor
            of its own.
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
    refuse: Callable[[Tensor, GateParts], str]
    sample: Callable[[Draws, tuple[int, ...]], Tensor]
    _: KW_ONLY
    tex: str
    matrix: Callable[[Gate, Tensor], Tensor] | None = None
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

    def __post_init__(self) -> None:
        axes = self.shapes[0].split(", ")
        object.__setattr__(self, "ndim", len(axes))
        object.__setattr__(self, "factored", ", n" in self.shapes[-1])
        object.__setattr__(self, "per_query_head", any(axis.split(" or ")[0] == "H" for axis in axes))

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


def _refuse_logs(x: Tensor, gate: GateParts) -> str:
    if bool((x <= 0).all()):
        return ""
    return f"expected natural logs <= 0, got {'nan' if bool(x.isnan().any()) else f'{x.max().item():.6g}'}"


def _refuse_angle(x: Tensor, gate: GateParts) -> str:
    return "" if bool(x.isfinite().all()) else "expected finite radians, got inf or nan"


def _refuse_beta(x: Tensor, gate: GateParts) -> str:
    if bool(((x >= 0) & (x <= 2)).all()):
        return ""
    return f"expected values in [0, 2], got {x.min().item():.6g} to {x.max().item():.6g}"


def _refuse_levels(x: Tensor, gate: GateParts) -> str:
    return "" if bool(((x >= 0) & x.isfinite()).all()) else f"expected finite weights of 0 or more, got {x.min():.6g}"


def _refuse_w(x: Tensor, gate: GateParts) -> str:
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


def _refuse_u(x: Tensor, gate: GateParts) -> str:
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


def _decay_matrix(gate: Gate, q: Tensor) -> Tensor:
    return torch.diag_embed(cast(Tensor, gate.log_diag).exp())


def _rotation_matrix(gate: Gate, q: Tensor) -> Tensor:
    angle = cast(Tensor, gate.angle)
    cos, sin = angle.cos().repeat_interleave(2, -1), angle.sin()
    off_diagonal = torch.stack([sin, torch.zeros_like(sin)], -1).flatten(-2)[..., :-1]
    return torch.diag_embed(cos) - torch.diag_embed(off_diagonal, 1) + torch.diag_embed(off_diagonal, -1)


def _householder_matrix(gate: Gate, q: Tensor) -> Tensor:
    heads = q.shape[2]
    w = expand_heads(cast(Tensor, gate.w), heads)
    eye = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device)
    if gate.beta is None:
        return eye
    factors = eye - expand_heads(gate.beta, heads)[..., None, None] * w[..., :, None] * w[..., None, :]
    return factors if gate.factors is None else reduce(torch.matmul, factors.unbind(3))


def _oblique_matrix(gate: Gate, q: Tensor) -> Tensor:
    w, u, beta = (expand_heads(cast(Tensor, x), q.shape[2]) for x in (gate.w, gate.u, gate.beta))
    eye = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device)
    return eye - beta[..., None, None] * u[..., :, None] * w[..., None, :]


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


_narrow: dict[str, list[tuple[type, dict[str, Any]]]] = {}  # the classes of gates before a part was declared
_MADE = ("__init__", "__match_args__", "__dataclass_fields__")  # by dataclass, of the parts


def declare(name: str, part: GatePart) -> None:
    """Give every gate a part of that name, which :data:`PARTS` declares from now on.

    Raises:
        TypeError: not a :class:`GatePart`.
        ValueError: a name that is taken or no identifier, or a part of one that there is not.
    """
    if not isinstance(part, GatePart):
        raise TypeError(f"part: expected attnzoo.algebra.gate.GatePart, got {type(part).__name__}")
    if not name.isidentifier() or hasattr(Gate, name):
        raise ValueError(f"name: expected a new name that a keyword may have, got {name!r}")
    if part.of and part.of not in PARTS:
        raise unknown("gate part", part.of, PARTS, of=f"{name}.of")
    _narrow[name] = []
    owners: list[type] = [GateParts, *GateParts.__subclasses__()]
    for owner in owners:
        _narrow[name].append((owner, {made: getattr(owner, made) for made in _MADE}))
        wider = type(owner.__name__, (owner,), {"__annotations__": {name: "Tensor | None"}, name: None})
        wider = dataclass(frozen=True, eq=False)(wider)
        for made in _MADE:
            setattr(owner, made, getattr(wider, made))
        setattr(owner, name, None)
    PARTS[name] = part


def undeclare(name: str) -> None:
    """Take a part out again, the last that was declared.

    Raises:
        ValueError: it is not that.
    """
    if name != next(reversed(_narrow), None):
        raise ValueError(f"name: expected the part declared last ({next(reversed(_narrow), 'none')}), got {name!r}")
    for owner, made in _narrow.pop(name):
        delattr(owner, name)
        for attribute, was in made.items():
            setattr(owner, attribute, was)
    del PARTS[name]


def in_product(factors: Iterable[str]) -> str:
    """Factors of R_t in symbols, as their product."""
    given = list(factors)
    return given[0] if len(given) == 1 else " ".join(f"({f})" if "-" in f else f for f in given) or "I"


def expand_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat the heads of ``[B, T, G, ...]`` up to ``heads``, if there are fewer."""
    return x if x.shape[2] >= heads else x.repeat_interleave(heads // x.shape[2], 2)


def _unsqueeze_to(mask: Tensor, ndim: int) -> Tensor:
    return mask.reshape(*mask.shape, *(1,) * (ndim - mask.ndim))
