"""Inputs and outputs of attention over levels for a group of heads, handed on whole."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.kernels.common.constants import GATE_FULL, GATE_NONE
from attnzoo.kernels.common.options import OpOptions
from attnzoo.kernels.common.rows import RowGates
from attnzoo.kernels.levels.head_groups import HeadGroup
from attnzoo.kernels.levels.layout import Leaves, Levels, Wanted

Some = Tensor | None


class LevelRows(NamedTuple):
    """Rows of a group of heads: the forward fills o, lse and o_rest from the others, the backward reads all.

    Attributes:
        block: the blocks' scores and carried operands; ``m`` is not read.
        v: [B, T, G, V]; o, o_rest: [B, T, H, V]; lse: [B, H, T] float32.
    """

    block: Leaves
    levels: Levels
    v: Tensor
    o: Tensor
    lse: Tensor
    rows: RowGates
    o_rest: Some
    sink: Some
    options: OpOptions

    @property
    def gate(self) -> int:
        """GATE of a launch."""
        return GATE_NONE if self.rows.c is None else GATE_FULL


class LevelGradients(NamedTuple):
    """Gradients of the rows' outputs, and what the backward fills besides those of the blocks and levels.

    Attributes:
        do: [B, T, H, V]; dlse: [B, H, T] float32, contiguous: gradient of the rows' log-sum-exp, or None.
        dv: [B, T, G, V], filled.
        sums: [B, H, T], filled with the sums of dS over rows; None where they are 0: without a sink, and without a gate
            and dlse.
        columns: [B, H, T], contiguous, filled with the sums of dS over each key's column, for the gradient of
            log_decay; None where that is not wanted.
        unrounded: whether gradients of the carried queries are wanted in float32.
        tiled: whether those of the levels' queries may stay in tiles, undefined in the levels (one pass alone).
        scores: dtype of the gradients of the scores within blocks.
    """

    do: Tensor
    dlse: Some
    dv: Tensor
    sums: Some
    columns: Some
    wanted: Wanted
    unrounded: bool = False
    tiled: bool = False
    scores: torch.dtype = torch.float32

    def like(self, block: Leaves, levels: Levels) -> tuple[Leaves, Levels]:
        """Memory for the gradients of the blocks (without m) and of the levels."""
        of_q = torch.float32 if self.unrounded else None
        d_q, d_k = torch.empty_like(block.q, dtype=of_q), torch.empty_like(block.k)
        d_block = Leaves(torch.empty_like(block.diag, dtype=self.scores), d_q, d_k, block.m)
        return d_block, Levels(torch.empty_like(levels.q, dtype=of_q), torch.empty_like(levels.k))


def gates_of(group: HeadGroup, rows: RowGates) -> RowGates:
    """The gate sums and first keys of a group of heads."""
    return RowGates(*(group.rows(x) for x in rows))


def rows_of(
    group: HeadGroup, block: Leaves, levels: Levels, v: Tensor, made: tuple[Tensor, Tensor, RowGates, Some],
    sink: Some, options: OpOptions,
) -> LevelRows:  # fmt: skip
    """The rows of a group of heads.

    Args:
        block, levels, v: of the group alone.
        made: o, lse, the gate sums and first keys, and o_rest, of all heads, as is the sink.
    """
    o, lse, rows, o_rest = made
    rest = None if o_rest is None else group.queries(o_rest)
    own = group.queries(o), lse[group.b, group.h], gates_of(group, rows)
    return LevelRows(block, levels, v, *own, rest, group.heads(sink), options)
