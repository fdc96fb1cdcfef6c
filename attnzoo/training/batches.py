"""Batches of tokens for a model: separate rows, or rows packed with the borders of their documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attnzoo.data.windows import Starts
from attnzoo.models.loss import IGNORED
from attnzoo.parallel import Fragments


@dataclass(frozen=True)
class TokenBatch:
    """The inputs and targets of one call of a model.

    Args:
        inputs: [B, T], or [1, B T] where documents are packed.
        targets: [B, T] or [1, B T], -100 where they do not count.
        cu_seqlens: borders of the pieces of documents, [N + 1] int32; None for separate rows.
        counted: number of targets that count. Where it is 0, the targets are copied from other rows, as a model refuses
            a batch without any.
        lengths: lengths of the sequences, [N].
        fragments: where several processes share the rows, those of each; inputs and targets are this process's.
    """

    inputs: Tensor
    targets: Tensor
    cu_seqlens: Tensor | None
    counted: int
    lengths: Starts
    fragments: Fragments | None = None

    def pairs(self, window: int | None = None) -> int:
        """The number of (query, key) pairs that causality and a window allow, a token with itself included."""
        seen = self.lengths if window is None else self.lengths.clip(max=window)
        return int((seen * (seen + 1) // 2 + (self.lengths - seen) * seen).sum())

    def to(self, device: torch.device) -> TokenBatch:
        """A copy on the device."""
        borders = None if self.cu_seqlens is None else moved(self.cu_seqlens, device)
        inputs, targets = moved(self.inputs, device), moved(self.targets, device)
        return replace(self, inputs=inputs, targets=targets, cu_seqlens=borders)


def moved(x: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor copied to the device, to a GPU without waiting for the copy."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def rows_of(windows: npt.NDArray[np.int64], begins: Sequence[Starts] | None, given: int | None = None) -> TokenBatch:
    """The inputs and targets of windows [B, T + 1].

    Args:
        windows: consecutive tokens.
        begins: per window the indices, 1 ... T, at which documents begin. Each piece of a document becomes a packed
            sequence, whose last token has no target. None: a row is one sequence.
        given: the number of first windows that count; None for all.
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
    """The inputs and targets of a task's rows, each a sequence.

    Args:
        tokens: [B, T].
        targets: the answer at each token, [B, T], -100 where none is asked for.
        given: the number of first rows that count; None for all.
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
