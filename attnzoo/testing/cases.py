"""What the tests draw: shapes, gate regimes and seeds, never every float; and what they compare with."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import get_args
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import Tensor

import attnzoo.algebra.diagonal
import attnzoo.forms.linear
import attnzoo.forms.rowblocks
import attnzoo.forms.softmax
from attnzoo import Gate, Variant, get, oracle
from attnzoo.algebra.gate import expand_heads
from attnzoo.samples import Regime, random_inputs

LIMIT = 1e-10  # float64: relative to the largest entry of what is expected
CPU_FORMS = ("recurrent", "parallel", "chunk")
Inputs = tuple[Tensor, Tensor, Tensor, Gate]
Form = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """Inputs of one variant, from few numbers; ``block`` is the size that all block sizes are set to."""

    name: str
    B: int = 2
    T: int = 24
    H: int = 4
    G: int = 2
    K: int = 8
    V: int = 6
    regime: Regime = "mixed"
    seed: int = 0
    scale: float | None = None
    block: int | None = None
    shared_angle: bool = False

    @property
    def variant(self) -> Variant:
        return get(self.name)

    def inputs(self, dtype: torch.dtype = torch.float64) -> Inputs:
        sizes = (self.B, self.T, self.H, self.G, self.K, self.V)
        q, k, v, gate = random_inputs(self.name, *sizes, dtype=dtype, regime=self.regime, seed=self.seed)
        if self.shared_angle and gate.angle is not None:
            gate = replace(gate, angle=gate.angle[0, 0, 0].clone())
        return q, k, v, gate

    def blocks(self) -> contextlib.AbstractContextManager[None]:
        return block_sizes(self.block)


@contextlib.contextmanager
def block_sizes(size: int | None) -> Iterator[None]:
    """Chunks and row blocks of ``size`` tokens (None: the real sizes), so that few tokens already make many blocks."""
    if size is None:
        yield
        return
    with (
        mock.patch.object(attnzoo.forms.linear, "CHUNK", size),
        mock.patch.object(attnzoo.forms.linear, "SEGMENT", 2 * size),
        mock.patch.object(attnzoo.forms.softmax, "ROWS", size),
        mock.patch.object(attnzoo.forms.rowblocks, "SIZES", (2 * size, size)),
        mock.patch.object(attnzoo.forms.rowblocks, "PLAIN", 1 if size % 2 else size // 2),  # divides the others
        mock.patch.object(attnzoo.algebra.diagonal, "LEAF", min(2, size)),
    ):
        yield


@st.composite
def cases(draw: st.DrawFn, name: str, min_t: int = 1, max_t: int = 40) -> Case:
    """Mostly small blocks and few tokens; sometimes the real block sizes."""
    block = draw(st.sampled_from((4, 8, 16, 5, None)), label="block")
    G = draw(st.sampled_from((1, 2, 3)), label="G")
    return Case(
        name,
        B=draw(st.integers(1, 2), label="B"),
        T=draw(st.integers(min_t, max_t), label="T"),
        H=G * draw(st.sampled_from((1, 2, 3)), label="H/G"),
        G=G,
        K=draw(st.sampled_from((2, 4, 6, 10)), label="K"),
        V=draw(st.sampled_from((1, 3, 5, 8, 11)), label="V"),
        regime=draw(st.sampled_from(get_args(Regime)), label="regime"),
        seed=draw(st.integers(0, 2**16), label="seed"),
        scale=draw(st.sampled_from((None, 1.0, 0.3)), label="scale"),
        block=block,
        shared_angle=draw(st.booleans(), label="shared angle") if "angle" in get(name).requires else False,
    )


def leaves_of(inputs: Inputs) -> dict[str, Tensor]:
    """q, k, v and each gate part by name."""
    q, k, v, gate = inputs
    return {"q": q, "k": k, "v": v, **{part: getattr(gate, part) for part in gate.parts}}


def value_and_gradients(form: Callable[[Tensor, Tensor, Tensor, Gate], Tensor], inputs: Inputs) -> dict[str, Tensor]:
    """The output under ``"o"`` and the gradient of every input and gate part, for one fixed cotangent."""
    q, k, v = (x.detach().clone().requires_grad_() for x in inputs[:3])
    gate = inputs[3].map(lambda part: part.detach().clone().requires_grad_())
    leaves = leaves_of((q, k, v, gate))
    o = form(q, k, v, gate)
    cotangent = torch.randn(o.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(o)
    grads = torch.autograd.grad(o, tuple(leaves.values()), cotangent, allow_unused=True)
    filled = {
        name: x.new_zeros(x.shape) if g is None else g for (name, x), g in zip(leaves.items(), grads, strict=True)
    }
    return {"o": o.detach(), **filled}


def relative_error(got: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Largest difference over the largest entry of ``expected`` (or ``floor``); infinite unless ``got`` is finite."""
    if not got.isfinite().all():
        return float("inf")
    size = max(float(expected.abs().max()), floor)
    return float((got.double() - expected.double()).abs().max()) / (size or 1.0)


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], limit: float = LIMIT, what: str = "") -> None:
    """Every entry of ``got`` within ``limit`` of ``expected``, with all that are off in the message.

    A gradient that should be zero comes out as the rounding of terms that cancel: it is measured against the others,
    and one that all tokens share against as many of them.
    """
    assert got.keys() == expected.keys()
    for name, x in got.items():
        assert x.shape == expected[name].shape, f"{what} {name}: shape {tuple(x.shape)}"
    floor = 1e-4 * max(float(x.abs().max()) for x in expected.values())
    tokens = expected["q"][..., 0, 0].numel() if "q" in expected else 1
    off = {name: relative_error(x, expected[name], floor * (tokens if x.ndim == 1 else 1)) for name, x in got.items()}
    wrong = {name: f"{error:.2e}" for name, error in off.items() if not error <= limit}
    assert not wrong, f"{what}: relative errors over {limit:g}: {wrong}"


def straightforward(variant: Variant, dtype: torch.dtype) -> Form:
    """What one would write in a line or two and run in ``dtype``: the yardstick of the low-precision tests."""

    def form(q: Tensor, k: Tensor, v: Tensor, gate: Gate, *, scale: float | None = None) -> Tensor:
        T, H, K = q.shape[1:]
        g, R = oracle.matrices(q, gate, variant.transition)
        g, R = g.to(dtype), R.to(dtype)
        q = q * (K**-0.5 if scale is None else scale)
        k, v = (expand_heads(x, H).to(dtype) for x in (k, v))
        keys, past = k[:, :0], g[:, :0]
        outputs = []
        for t in range(T):
            keys = torch.cat([torch.einsum("bhkl,bjhk->bjhl", R[:, t], keys), k[:, t : t + 1]], 1)
            past = torch.cat([past + g[:, t : t + 1], torch.zeros_like(g[:, :1])], 1)
            s, d = torch.einsum("bjhk,bhk->bhj", keys, q[:, t].to(dtype)), past.transpose(1, 2)
            weight = s * d.exp() if variant.side == "linear" else (s + d).softmax(-1)
            outputs.append(torch.einsum("bhj,bjhv->bhv", weight, v[:, : t + 1]))
        return torch.stack(outputs, 1)

    return form


def cut_points(T: int) -> st.SearchStrategy[list[int]]:
    """Cuts of T tokens into segments, ``[0, ..., T]``."""
    return st.sets(st.integers(0, T)).map(lambda inner: sorted(inner | {0, T}))


def extend_in_segments(
    variant: Variant, inputs: Inputs, cuts: list[int], scale: float | None = None, valid: Tensor | None = None
) -> tuple[Tensor, object]:
    """The output over all segments and the last state."""
    q, k, v, gate = inputs
    state, outputs = None, []
    for start, stop in itertools.pairwise(cuts):
        now = slice(start, stop)
        options = {"scale": scale} if valid is None else {"scale": scale, "valid": valid[:, now]}
        o, state = variant.extend(q[:, now], k[:, now], v[:, now], gate.slice(start, stop), state, **options)
        outputs.append(o)
    return torch.cat(outputs, 1), state
