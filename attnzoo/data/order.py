"""Orders without a table: permutations and turns computed from the index alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction
from math import isqrt

ROUNDS = 6


def drawn(key: str) -> int:
    """64 random bits as a function of a text, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")


def permuted(index: int, size: int, key: str) -> int:
    """The image of an index under a permutation of `0 ... size - 1` that depends on the key.

    It is a Feistel network on a grid a x b slightly larger than `size`, applied until the result is below `size` (Black
    and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002, sections 4 and 5).
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
    """Each weight divided by the sum of itself and all later weights, for :func:`turn`."""
    exact = [Fraction(weight) for weight in weights]
    return [weight / sum(exact[number:]) for number, weight in enumerate(exact)]


def turn(index: int, shares: Sequence[Fraction]) -> tuple[int, int]:
    """The number of the source whose turn it is at an index, and the number of its earlier turns.

    The turns are spread evenly: among the first n turns that earlier sources leave, a source with the share p has
    `floor(n p + 1/2)`.

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
