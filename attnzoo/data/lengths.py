"""The lengths of the documents in a folder of tokens."""

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
        documents: number of documents.
        tokens: tokens of all documents.
        median: the median length.
        upper: the 90th percentile of the lengths.
        longest: the largest length.
        in_longer: for each length in `MARKS`, the share of tokens in documents of at least that length.
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
