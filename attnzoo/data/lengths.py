"""How long the documents of a folder of tokens are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attnzoo.data.shards import Shard

MARKS = (1024, 4096, 16384, 65536)


@dataclass(frozen=True)
class Lengths:
    """The lengths of some documents, in tokens.

    Args:
        documents: how many.
        tokens: of all documents.
        median: half of the documents are no longer.
        upper: nine of ten are no longer.
        longest: of them all.
        in_longer: for each of `MARKS`, the share of the tokens that stand in documents of at least that length, which
            fill a context of it.
    """

    documents: int
    tokens: int
    median: int
    upper: int
    longest: int
    in_longer: tuple[float, ...]


def document_lengths(shards: Sequence[Shard]) -> Lengths:
    """The lengths of all documents of some files of tokens; no tokens are read.

    Raises:
        ValueError: no files.
    """
    if not shards:
        raise ValueError("shards: expected at least one file of tokens, got none")
    lengths = np.concatenate([np.diff(shard.starts) for shard in shards])
    total = int(lengths.sum())
    median, upper, longest = (int(x) for x in np.quantile(lengths, (0.5, 0.9, 1.0), method="inverted_cdf"))
    in_longer = tuple(float(lengths[lengths >= mark].sum() / total) for mark in MARKS)
    return Lengths(len(lengths), total, median, upper, longest, in_longer)
