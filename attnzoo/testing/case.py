"""Inputs of one variant, from few numbers, and the small blocks in which few tokens already are many."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from unittest import mock

import torch
from torch import Tensor

import attnzoo.algebra.diagonal
import attnzoo.forms.linear
import attnzoo.forms.rowblocks
import attnzoo.forms.softmax
from attnzoo.algebra.gate import Gate
from attnzoo.registry import get
from attnzoo.registry.variant import Variant
from attnzoo.samples import Regime, random_inputs

Inputs = tuple[Tensor, Tensor, Tensor, Gate]


@dataclass(frozen=True, repr=False)
class Case:
    """The sizes and the seed from which the inputs of one example of a law are drawn; printed without defaults.

    Args:
        name: of the variant.
        B, T, H, G, K, V, regime, seed: as :func:`attnzoo.samples.random_inputs` takes them.
        scale: of the scores; None for ``1 / sqrt(K)``.
        block: tokens that all blocks are set to; None for the real sizes.
        shared_angle: whether all tokens and heads share one angle.
        cuts: where the sequence is cut, between 0 and T.
        absent: tokens that do not exist, where a law has such.
    """

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
    cuts: tuple[int, ...] = ()
    absent: tuple[int, ...] = ()

    def __repr__(self) -> str:
        given = [f"{f.name}={x!r}" for f in fields(self)[1:] if (x := getattr(self, f.name)) != f.default]
        return f"Case({', '.join([repr(self.name), *given])})"

    @property
    def variant(self) -> Variant:
        return get(self.name)

    @property
    def edges(self) -> list[int]:
        """The cuts with both ends, ``[0, ..., T]``."""
        return [0, *self.cuts, self.T]

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


def take(inputs: Inputs, rows: slice = slice(None), tokens: slice | Tensor = slice(None)) -> Inputs:
    """Some rows and tokens of the inputs."""
    q, k, v, gate = inputs
    cut = gate.map(lambda part: part if part.ndim == 1 else part[rows, tokens])
    return q[rows, tokens], k[rows, tokens], v[rows, tokens], cut


def in_float64(inputs: Inputs) -> Inputs:
    """The same numbers, for what is exact beside them."""
    q, k, v, gate = inputs
    return q.double(), k.double(), v.double(), gate.map(Tensor.double)
