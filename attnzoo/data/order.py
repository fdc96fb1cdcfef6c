"""Orders that need no table: what comes at an index is computed from the index alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction
from math import isqrt

ROUNDS = 6


def drawn(key: str) -> int:
    """64 random bits that depend on a text alone, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")


def permuted(index: int, size: int, key: str) -> int:
    """Where a permutation of `0 ... size - 1`, another one for every key, takes an index.

    A Feistel network on a grid a x b that is hardly larger than `size`, walked along until it meets a number below
    `size` (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002, sections 4 and 5).
    """
    a = isqrt(size - 1) + 1
    b = -(-size // a)
    while True:
        left, right = index % a, index // a
        for turn in range(ROUNDS):
            left, right = right, (left + drawn(f"{key} {turn} {right}")) % (b if turn % 2 else a)
        index = a * right + left
        if index < size:
            return index


def shares_of(weights: Sequence[float]) -> list[Fraction]:
    """For :func:`turn`: each weight's share of itself and those behind it."""
    exact = [Fraction(weight) for weight in weights]
    return [weight / sum(exact[number:]) for number, weight in enumerate(exact)]


def turn(index: int, shares: Sequence[Fraction]) -> tuple[int, int]:
    """Whose turn it is at an index, and how many turns it has had before.

    The turns are spread evenly: of those that the sources before it leave, a source with the share p has had
    `floor(n p + 1/2)` of the first n.

    Args:
        index: at least 0.
        shares: from :func:`shares_of`.
    """
    for number, share in enumerate(shares[:-1]):
        top, bottom = share.as_integer_ratio()
        had, next_ = ((2 * n * top + bottom) // (2 * bottom) for n in (index, index + 1))
        if next_ > had:
            return number, had
        index -= had
    return len(shares) - 1, index
