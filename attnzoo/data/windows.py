"""Training windows cut from token streams, in an order that is a function of a seed and an index."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from attnzoo.data.order import drawn, permuted, shares_of, turn

Tokens = npt.NDArray[np.integer]
Starts = npt.NDArray[np.int64]


class Windows(ABC):
    """Windows of `context_length + 1` tokens by index: inputs and their next-token targets."""

    context_length: int

    @abstractmethod
    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Window `index >= 0`, int64 [context_length + 1]."""

    @abstractmethod
    def begins(self, index: int) -> Starts:
        """The places, 1 ... context_length, at which documents begin in window `index`, int64 [n]."""

    def batch(self, indices: Sequence[int]) -> npt.NDArray[np.int64]:
        """Several windows, int64 [len(indices), context_length + 1]."""
        rows = np.empty((len(indices), self.context_length + 1), dtype=np.int64)
        for row, index in zip(rows, indices, strict=True):
            row[:] = self[index]
        return rows


class TokenWindows(Windows):
    """Windows of `context_length + 1` tokens over one or more shards (inputs and their next-token targets).

    Window `i` depends on the seed and `i` only, never on the number of workers or processes. An epoch visits
    each window once, in an order of its own, and shifts the cuts so that windows start elsewhere than in the
    epoch before. A window does not cross shards; shards too short for one window are left out.

    Args:
        shards: 1-D integer arrays; memory maps are read window by window.
        context_length: tokens that a window predicts.
        vocab_size: tokens at or above it are refused when they are met.
        seed: seed of the order.
        name: name of the data, for messages.
        starts: starts of the documents of each shard, rising; None where unknown.
        table: whether to shuffle a table of an epoch's windows; False computes each window's place, in another order.

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
        *,
        starts: Sequence[Starts] | None = None,
        table: bool = True,
    ):
        for shard in shards:
            if shard.ndim != 1 or not np.issubdtype(shard.dtype, np.integer):
                raise ValueError(f"{name}: expected 1-D integer arrays, got {shard.dtype} of shape {shard.shape}")
        kept = [number for number, shard in enumerate(shards) if len(shard) > context_length]
        if not kept:
            longest = max((len(shard) for shard in shards), default=0)
            raise ValueError(
                f"{name} has {longest} tokens at most in a piece: "
                f"data.context_length={context_length} needs at least {context_length + 1}"
            )
        self.shards = [shards[number] for number in kept]
        self.starts = None if starts is None else [starts[number] for number in kept]
        self.context_length = context_length
        self.vocab_size = vocab_size
        self.seed = seed
        self.name = name
        # One window fewer than would fit leaves room to shift the cuts by a whole window.
        self._counts = np.array([max(1, (len(shard) - 1) // context_length - 1) for shard in self.shards])
        self._ends = np.cumsum(self._counts)
        self._spare = np.array([len(shard) for shard in self.shards]) - 1 - self._counts * context_length
        self._table = table
        self._epoch = -1
        self._order: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._shifts: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        """The number of windows in an epoch; larger indices are of later epochs."""
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Window `index >= 0`, int64 [context_length + 1]."""
        shard, start = self._place(index)
        tokens = np.asarray(self.shards[shard][start : start + self.context_length + 1], dtype=np.int64)
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            raise ValueError(
                f"{self.name}: tokens from {tokens.min()} to {tokens.max()} near position {start} "
                f"of shard {shard}, outside the vocabulary of {self.vocab_size}"
            )
        return tokens

    def begins(self, index: int) -> Starts:
        """The places, 1 ... context_length, at which documents begin in window `index`, int64 [n].

        Raises:
            ValueError: the starts of documents are unknown.
        """
        if self.starts is None:
            raise ValueError(f"{self.name}: expected starts of documents, got none")
        shard, start = self._place(index)
        return begins_within(self.starts[shard], start, self.context_length)

    def _place(self, index: int) -> tuple[int, int]:
        """The shard of a window, and the window's start in it."""
        if index < 0:
            raise IndexError(f"window index must be at least 0, got {index}")
        epoch, position = divmod(index, len(self))
        if self._table and epoch != self._epoch:
            self._start_epoch(epoch)
        key = f"{self.seed} {epoch}"
        window = int(self._order[position]) if self._table else permuted(position, len(self), key)
        shard = int(np.searchsorted(self._ends, window, side="right"))
        first = window - int(self._ends[shard] - self._counts[shard])
        shift = self._shifts[shard] if self._table else drawn(f"{key} shift {shard}") % int(self._spare[shard] + 1)
        return shard, first * self.context_length + int(shift)

    def _start_epoch(self, epoch: int) -> None:
        random = np.random.default_rng([self.seed, epoch])
        self._order = random.permutation(len(self))
        self._shifts = random.integers(0, self._spare + 1)
        self._epoch = epoch


class Mixture(Windows):
    """Windows of several sources, in turns by their weights.

    The turns are spread evenly: among any first n windows each source has its share of them to within half a window
    for every source before it and itself. Within a source, windows come as they do without the others.

    Args:
        sources: windows of one context length.
        weights: the sources' relative frequencies, above 0.
    """

    def __init__(self, sources: Sequence[Windows], weights: Sequence[float]):
        self.sources = list(sources)
        self.context_length = sources[0].context_length
        self._shares = shares_of(weights)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Window `index >= 0`, int64 [context_length + 1]."""
        source, own = self._turn(index)
        return source[own]

    def begins(self, index: int) -> Starts:
        """The places, 1 ... context_length, at which documents begin in window `index`, int64 [n]."""
        source, own = self._turn(index)
        return source.begins(own)

    def _turn(self, index: int) -> tuple[Windows, int]:
        if index < 0:
            raise IndexError(f"window index must be at least 0, got {index}")
        number, own = turn(index, self._shares)
        return self.sources[number], own


class Joined:
    """A concatenation of 1-D arrays, of which only slices are read.

    Args:
        parts: the arrays, such as memory maps.
    """

    def __init__(self, parts: Sequence[Tokens]):
        self.parts = list(parts)
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, where: slice) -> Tokens:
        """The tokens of a slice with a step of 1, read into memory."""
        start, stop, _ = where.indices(len(self))
        found = []
        for part, end in zip(self.parts, self._ends.tolist(), strict=True):
            first = end - len(part)
            if start < end and first < stop:
                found.append(part[max(start - first, 0) : stop - first])
        return np.concatenate(found) if found else self.parts[0][:0]


def begins_within(starts: Starts, first: int, length: int) -> Starts:
    """The starts of documents within the `length` tokens after token `first`, relative to it, int64 [n]."""
    low, high = np.searchsorted(starts, [first + 1, first + length + 1])
    return np.asarray(starts[low:high], dtype=np.int64) - first


def heldout_starts(tokens: int, length: int, max_tokens: int, name: str = "the held-out split") -> Starts:
    """The start of each of the :func:`heldout_windows` in ``tokens`` held-out tokens, int64 [n].

    Raises:
        ValueError: the held-out tokens are too few for one window.
    """
    if tokens <= length:
        raise ValueError(f"{name} has {tokens} tokens: a length of {length} needs at least {length + 1}")
    available = (tokens - 1) // length
    count = max(1, min(available, max_tokens // length))
    return np.arange(count) * available // count * length


def heldout_windows(
    heldout: Tokens | Joined, length: int, max_tokens: int, name: str = "the held-out split"
) -> npt.NDArray[np.int64]:
    """Windows of `length + 1` tokens spread evenly over the held-out tokens, int64 [n, length + 1].

    They do not overlap in their inputs, and `n * length <= max(max_tokens, length)`.

    Args:
        heldout: 1-D tokens.
        length: tokens that each window predicts.
        max_tokens: the most tokens of all windows; one window is always returned.
        name: of the tokens, for messages.

    Raises:
        ValueError: the held-out tokens are too few for one window.
    """
    starts = heldout_starts(len(heldout), length, max_tokens, name).tolist()
    return np.stack([np.asarray(heldout[start : start + length + 1], dtype=np.int64) for start in starts])
