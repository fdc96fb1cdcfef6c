"""Cutting token streams into training windows, in an order that depends on a seed and an index alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.integer]


class TokenWindows:
    """Windows of `context_length + 1` tokens over one or more shards (inputs and their next-token targets).

    Window `i` depends on the seed and `i` only, never on the number of workers or processes. An epoch visits
    each window once, in an order of its own, and shifts the cuts so that windows start elsewhere than in the
    epoch before. A window does not cross shards; shards too short for one window are left out.

    Args:
        shards: 1-D integer arrays; memory maps are read window by window.
        vocab_size: tokens at or above it are refused when they are met.

    Raises:
        ValueError: a shard is not a 1-D integer array, or none is long enough.
    """

    def __init__(
        self,
        shards: Sequence[Tokens],
        context_length: int,
        vocab_size: int,
        seed: int = 0,
        name: str = "the data",
    ):
        for shard in shards:
            if shard.ndim != 1 or not np.issubdtype(shard.dtype, np.integer):
                raise ValueError(f"{name}: expected 1-D integer arrays, got {shard.dtype} of shape {shard.shape}")
        self.shards = [shard for shard in shards if len(shard) > context_length]
        if not self.shards:
            longest = max((len(shard) for shard in shards), default=0)
            raise ValueError(
                f"{name} has {longest} tokens at most in a piece: "
                f"a context of {context_length} needs at least {context_length + 1}"
            )
        self.context_length = context_length
        self.vocab_size = vocab_size
        self.seed = seed
        self.name = name
        # One window fewer than would fit leaves room to shift the cuts by a whole window.
        self._counts = np.array([max(1, (len(shard) - 1) // context_length - 1) for shard in self.shards])
        self._ends = np.cumsum(self._counts)
        self._epoch = -1
        self._order: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._shifts: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        """Windows in an epoch; indices go on beyond it."""
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Window `index >= 0`, int64 [context_length + 1]."""
        if index < 0:
            raise IndexError(f"window index must be at least 0, got {index}")
        epoch, position = divmod(index, len(self))
        if epoch != self._epoch:
            self._start_epoch(epoch)
        window = int(self._order[position])
        shard = int(np.searchsorted(self._ends, window, side="right"))
        first = window - int(self._ends[shard] - self._counts[shard])
        start = first * self.context_length + int(self._shifts[shard])
        tokens = np.asarray(self.shards[shard][start : start + self.context_length + 1], dtype=np.int64)
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            raise ValueError(
                f"{self.name}: tokens from {tokens.min()} to {tokens.max()} near position {start} "
                f"of shard {shard}, outside the vocabulary of {self.vocab_size}"
            )
        return tokens

    def batch(self, indices: Sequence[int]) -> npt.NDArray[np.int64]:
        """Several windows, int64 [len(indices), context_length + 1]."""
        rows = np.empty((len(indices), self.context_length + 1), dtype=np.int64)
        for row, index in zip(rows, indices, strict=True):
            row[:] = self[index]
        return rows

    def _start_epoch(self, epoch: int) -> None:
        random = np.random.default_rng([self.seed, epoch])
        spare = np.array([len(shard) for shard in self.shards]) - 1 - self._counts * self.context_length
        self._order = random.permutation(len(self))
        self._shifts = random.integers(0, spare + 1)
        self._epoch = epoch


def heldout_windows(heldout: Tokens, length: int, max_tokens: int) -> npt.NDArray[np.int64]:
    """Windows of `length + 1` tokens spread evenly over the held-out tokens, int64 [n, length + 1].

    Args:
        heldout: 1-D tokens.
        length: tokens that each window predicts.
        max_tokens: in all windows together, at most.

    They do not overlap in their inputs, and `n * length <= max(max_tokens, length)`.

    Raises:
        ValueError: the held-out tokens are too few for one window.
    """
    if len(heldout) <= length:
        raise ValueError(
            f"the held-out split has {len(heldout)} tokens: a length of {length} needs at least {length + 1}"
        )
    available = (len(heldout) - 1) // length
    count = max(1, min(available, max_tokens // length))
    starts = np.arange(count) * available // count * length
    return np.stack([np.asarray(heldout[start : start + length + 1], dtype=np.int64) for start in starts])
