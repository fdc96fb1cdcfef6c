"""Measures on the page of a pair: decays, weights, state, eigenvalues, reductions, and the speed of its forms."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attnzoo.algebra import oracle
from attnzoo.algebra.gate import Gate
from attnzoo.algebra.parts import PARTS, Regime
from attnzoo.evaluation import Array
from attnzoo.forms.protocol import Call
from attnzoo.registry import get, pairs
from attnzoo.registry.pair import Pair
from attnzoo.registry.variant import Variant
from attnzoo.samples import random_inputs
from attnzoo.testing.compare import relative_error

Complex = npt.NDArray[np.complex128]
T, K = 48, 16  # tokens and channels of one head, of all pictures
REGIMES: tuple[Regime, ...] = ("open", "mixed", "closing")
PRODUCTS = (1, 4, 16)  # transitions in a row whose eigenvalues are shown
STARTS = 12  # products of each length
LENGTHS = (64, 256, 1024)  # tokens of the timed calls
TIMED = (1, 2, 32)  # B, H and K of them
PATIENCE = 0.25  # seconds of a call after which longer ones are not timed


def drawn(name: str, regime: Regime, seed: int, alike: bool = False) -> tuple[Tensor, Tensor, Gate]:
    """Queries and keys ``[1, T, 1, K]`` of one head, and its gate; ``alike``: every query and key is the vector of
    ones, so that weights are the gate's doing alone."""
    q, k, _, gate = random_inputs(name, 1, T, 1, 1, K, 1, regime=regime, seed=seed)
    return (torch.ones_like(q), torch.ones_like(k), gate) if alike else (q, k, gate)


def weights(variant: Variant, seed: int, alike: bool) -> Array:
    """The weight of the value of token j (column) in the output of token t (row), ``[T, T]``, by the oracle."""
    q, k, gate = drawn(variant.name, "open", seed, alike)
    unit = torch.eye(T, dtype=q.dtype)[None, :, None]  # as values: the outputs are the weights
    return _numpy(variant.oracle(q, k, unit, gate)[0, :, 0])


def by_distance(matrix: Array) -> Array:
    """The mean size of a weight over the pairs of one distance, ``[T]``."""
    return np.array([np.abs(np.diagonal(matrix, -n)).mean() for n in range(len(matrix))])


def steps(variant: Variant, regime: Regime, seed: int) -> Tensor:
    """The whole transition ``A_t = exp(g_t) R_t`` of each token, ``[T, K, K]``."""
    q, _, gate = drawn(variant.name, regime, seed)
    g, R = oracle.matrices(q, gate, variant.transition)
    return (g.exp()[..., None, None] * R)[0, :, 0]


def products(A: Tensor, length: int) -> Iterator[Tensor]:
    """For n = 0 to ``length`` the products ``A_{j+1} ... A_{j+n}`` of all j, ``[T - n, K, K]``."""
    found = torch.eye(A.shape[-1], dtype=A.dtype).expand(len(A) + 1, -1, -1)
    yield found
    for n in range(1, length + 1):
        found = found[:-1] @ A[n - 1 :]
        yield found


def left_over(variant: Variant, regime: Regime, seed: int) -> tuple[Array, Array]:
    """The length that n tokens leave of a key of length 1, ``[T]`` each: on average over all keys, and at most."""
    found = list(products(steps(variant, regime, seed), T - 1))
    average = [float((P.square().sum((-2, -1)) / K).sqrt().mean()) for P in found]
    return np.array(average), np.array([float(torch.linalg.matrix_norm(P, 2).max()) for P in found])


def eigenvalues(variant: Variant, seed: int) -> dict[int, Complex]:
    """The eigenvalues of products of n transitions in a row, complex, by n."""
    every = list(products(steps(variant, "open", seed), max(PRODUCTS)))
    chosen = {n: every[n][:: max(1, len(every[n]) // STARTS)] for n in PRODUCTS}
    return {n: torch.linalg.eigvals(P).flatten().numpy() for n, P in chosen.items()}


def states(variant: Variant, seed: int) -> dict[int, Array]:
    """The state after half of the tokens and after all, ``[K, T]``: column j is what is left of the key of token j,
    which was the unit vector of channel j mod K."""
    q, _, gate = drawn(variant.name, "open", seed)
    keys = torch.eye(K, dtype=q.dtype)[torch.arange(T) % K][None, :, None]
    unit = torch.eye(T, dtype=q.dtype)[None, :, None]
    found = {}
    for t in (T // 2, T):
        cut = (q[:, :t], keys[:, :t], unit[:, :t], gate.slice(0, t))
        found[t] = _numpy(oracle.recurrence(*cut, transition=variant.transition)[1][0, 0])
    return found


def grows(variant: Variant) -> bool | None:
    """Whether what a call hands to the next gets longer with the tokens; None where there are no steps."""
    if not variant.causal:
        return None
    q, k, gate = drawn(variant.name, "open", 0)
    return bool(variant.extend(q, k, k, gate)[1].grows)


@dataclass(frozen=True)
class Reduction:
    """The pair that a pair becomes where parts of its gate are neutral.

    Args:
        whole: names of the sides with all parts.
        part: names of the sides with some of them.
        where: the neutral values, in symbols; "" where both take the same parts.
        error: the largest difference of their outputs, relative.
    """

    whole: tuple[str, ...]
    part: tuple[str, ...]
    where: str
    error: float


def reductions(pair: Pair, seed: int) -> list[Reduction]:
    """Every registered pair whose parts are some of this pair's or the other way round, measured by the oracles."""
    found = []
    for other in pairs():
        mine, theirs = set(pair.requires), set(other.requires)
        if other == pair or not (mine <= theirs or theirs <= mine):
            continue
        whole, part = (other, pair) if mine < theirs else (pair, other)
        found.append(_reduction(whole, part, seed))
    return found


def _reduction(whole: Pair, part: Pair, seed: int) -> Reduction:
    q, k, v, gate = random_inputs(whole.linear, 1, 24, 2, 1, 8, 6, regime="open", seed=seed)
    missing = [name for name in gate.parts if name not in part.requires]
    of = {name: PARTS[name].of for name in missing if PARTS[name].optional}  # whose place it takes
    still = {name: torch.full_like(getattr(gate, name), PARTS[name].neutral) for name in missing}
    still |= {name: getattr(gate, other) for name, other in of.items() if other in part.requires}
    fewer = Gate(**{name: getattr(gate, name) for name in part.requires})
    sides = [(whole.linear, part.linear), (whole.softmax, part.softmax)]
    off = [
        relative_error(get(a).oracle(q, k, v, replace(gate, **still)), get(b).oracle(q, k, v, fewer)) for a, b in sides
    ]
    values = {name: f"{PARTS[name].neutral:g}" for name in missing}
    values |= {name: PARTS[other].symbol for name, other in of.items() if other in part.requires}
    where = ", ".join(f"{PARTS[name].symbol} = {value}" for name, value in values.items())
    return Reduction((whole.linear, whole.softmax), (part.linear, part.softmax), where, max(off))


@dataclass(frozen=True)
class Timed:
    """The speed of one form.

    Args:
        variant: its name.
        form: name of the form.
        seconds: of the fastest of three calls, by tokens; without those that would take too long.
        refused: why it does not run here, or "".
    """

    variant: str
    form: str
    seconds: dict[int, float]
    refused: str = ""


@torch.no_grad()
def timed(variant: Variant, form: str) -> Timed:
    """The speed of a form in float32, forward."""
    B, H, width = TIMED
    seconds: dict[int, float] = {}
    for length in LENGTHS:
        inputs = random_inputs(variant.name, B, length, H, H, width, width, regime="open", dtype=torch.float32)
        reason = variant.refuses(form, Call(*inputs))
        if reason:
            return Timed(variant.name, form, seconds, "" if seconds else reason)
        seconds[length] = _fastest(partial(variant.forms[form], *inputs))
        if seconds[length] > PATIENCE:
            break
    return Timed(variant.name, form, seconds)


def _fastest(run: Callable[[], object]) -> float:
    ticks = [time.perf_counter()]
    for _ in range(4):
        run()
        ticks.append(time.perf_counter())
        if ticks[-1] - ticks[-2] > PATIENCE:
            break
    return min(b - a for a, b in pairwise(ticks))


def _numpy(x: Tensor) -> Array:
    return np.asarray(x.double().numpy(), dtype=np.float64)
