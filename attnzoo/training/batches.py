"""Rows of tokens as the model takes them: side by side, or packed with the borders of their documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attnzoo.data.windows import Starts
from attnzoo.models.loss import IGNORED


@dataclass(frozen=True)
class TokenBatch:
    """What a model is given.

    Args:
        inputs: [B, T], or [1, B T] where documents are packed.
        targets: of the same shape, -100 where nothing is asked.
        cu_seqlens: borders of the pieces of documents, [N + 1] int32; None where rows stand side by side.
        counted: targets that count. Where it is 0 the targets are those of other rows: a model takes none that ask
            nothing.
        lengths: of the sequences, [N].
    """

    inputs: Tensor
    targets: Tensor
    cu_seqlens: Tensor | None
    counted: int
    lengths: Starts

    def pairs(self, window: int | None = None) -> int:
        """How many pairs there are of a token and one that it may see, itself among them."""
        seen = self.lengths if window is None else self.lengths.clip(max=window)
        return int((seen * (seen + 1) // 2 + (self.lengths - seen) * seen).sum())

    def to(self, device: torch.device) -> TokenBatch:
        """The same there."""
        borders = None if self.cu_seqlens is None else moved(self.cu_seqlens, device)
        return TokenBatch(moved(self.inputs, device), moved(self.targets, device), borders, self.counted, self.lengths)


def moved(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU there; a copy to a GPU is waited for by what reads it, not here."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def rows_of(windows: npt.NDArray[np.int64], begins: Sequence[Starts] | None, given: int | None = None) -> TokenBatch:
    """Windows [B, T + 1] as inputs and targets.

    Args:
        windows: of consecutive tokens.
        begins: where documents begin in each window behind its first token, each of 1 ... T: they become sequences of
            their own, as do the rows, and the last token of each is asked for nothing. None: a row is one sequence.
        given: how many of the first windows count; None for all.
    """
    B, T = windows.shape[0], windows.shape[1] - 1
    counts = np.arange(B)[:, None].repeat(T, 1) < (B if given is None else given)
    inputs, targets, lengths = windows[:, :-1], windows[:, 1:], np.full(B, T)
    cu_seqlens = None
    if begins is not None:
        for row, inside in enumerate(begins):
            counts[row, inside - 1] = False
        borders = [np.concatenate([[0], inside[inside < T]]) + row * T for row, inside in enumerate(begins)]
        starts = np.concatenate([*borders, [B * T]])
        cu_seqlens, lengths = torch.from_numpy(starts).int(), np.diff(starts)
        inputs, targets, counts = inputs.reshape(1, -1), targets.reshape(1, -1), counts.reshape(1, -1)
    return _rows(inputs, targets, counts, cu_seqlens, lengths)


def rows_of_answers(
    tokens: npt.NDArray[np.int64], targets: npt.NDArray[np.int64], given: int | None = None
) -> TokenBatch:
    """Rows of a task, each a sequence.

    Args:
        tokens: [B, T].
        targets: what is asked at each token, [B, T], -100 for nothing.
        given: how many of the first rows count; None for all.
    """
    B, T = tokens.shape
    counts = (targets != IGNORED) & (np.arange(B)[:, None] < (B if given is None else given))
    return _rows(tokens, targets, counts, None, np.full(B, T))


def _rows(
    inputs: npt.NDArray[np.int64],
    targets: npt.NDArray[np.int64],
    counts: npt.NDArray[np.bool_],
    cu_seqlens: Tensor | None,
    lengths: Starts,
) -> TokenBatch:
    if counts.any():
        targets = np.where(counts, targets, IGNORED)
    return TokenBatch(
        torch.from_numpy(inputs.copy()), torch.from_numpy(targets.copy()), cu_seqlens, int(counts.sum()), lengths
    )
