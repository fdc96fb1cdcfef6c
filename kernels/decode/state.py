"""Keys and values of a batch of sequences in pages of a pool, and what is kept of their gates, under one name each."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class KeyPages(NamedTuple):
    """The pages of a pool.

    Args:
        keys: [P, PAGE, K], values: [P, PAGE, V], contiguous; PAGE is a power of 2 from 16 on.
        k_norm: [B, G, N] float32, at least the length of each page's longest key; None where nothing reads it: in
            attention without pruning.
        exponents: [P, PAGE, 2] int8, of keys and of values in 8 bits (``eight_bits.py``), which are uint8 then; None
            for those in the dtype of the queries.
    """

    keys: Tensor
    values: Tensor
    k_norm: Tensor | None = None
    exponents: Tensor | None = None


class PageTable(NamedTuple):
    """The pages of each sequence's tokens. Key j with key head g is ``keys[table[b, g, j // PAGE], j % PAGE]``.

    Args:
        table: [B, G, N] int32, the page of each PAGE tokens, -1 where there is none.
        first: [B, G] int32, the first page that still counts.
        length: [B] int32, the tokens of each sequence.
    """

    table: Tensor
    first: Tensor
    length: Tensor


class GateState(NamedTuple):
    """Sums of log decays so far, for R = H / G query heads a key head. A closed gate (at most -1e4) adds nothing.

    Args:
        decay: [P, PAGE, R] float32, sum of the log decays within the page, up to and with each token.
        page_sum: [B, H, N] float64, the sum of those of all tokens before the page.
        total: [B, H] float64, the sum of all log decays.
        since: [B, H] int32, the last token with a closed gate, 0 if there is none.
        n_log: [B, H, N] float64, ``log sum_l exp(-c_l)`` over the tokens up to the end of each page.
        closed: [B, H, N] int64, in bit i whether the page's token i has a closed gate; pages have at most 64 tokens.
    """

    decay: Tensor
    page_sum: Tensor
    total: Tensor
    since: Tensor
    n_log: Tensor
    closed: Tensor


class PagedState(NamedTuple):
    """All that is kept of a batch of sequences; ``gates`` is None where nothing decays with the input."""

    pages: KeyPages
    table: PageTable
    gates: GateState | None = None
