"""Tasks that keep a state: the last bit written, a parity, a product of permutations."""

from __future__ import annotations

from itertools import permutations

import numpy as np

from attnzoo.data.tasks.task import Array, Row, Task, asked, check_between, check_room
from attnzoo.errors import unknown

WRITE, IGNORE, READ, BIT = range(4)  # BIT: the first of two tokens
GROUPS = ("S3", "S4", "S5", "A4", "A5")


def flip_flop(p_ignore: float = 0.8) -> Task:
    """Flip-flop language modelling: the bit last written is asked at every read.

    FFL(p_ignore) of Liu et al., "Exposing Attention Glitches with Flip-Flop Language Modeling" (2023), section 3. A row
    is T / 2 instructions, each followed by a bit. The first writes and the last reads; each between them is ignored
    with probability `p_ignore`, and else writes or reads, equally likely. A bit that is written or ignored is random; a
    read gives the bit last written. What follows each read is asked. The paper trains on p_ignore = 0.8 with T = 512
    and tests on 0.98 (sparse) and 0.1 (dense), too.

    Args:
        p_ignore: of each instruction between the first and the last.

    Raises:
        ValueError: a number that is no probability; of a row, an odd length, or one below 4.
    """
    check_between("p_ignore", p_ignore, 0, 1)

    def draw(random: np.random.Generator, T: int) -> Row:
        check_room(T, 4, "a bit that is written and read")
        if T % 2:
            raise ValueError(f"length: expected an even number of tokens, for each instruction has a bit, got {T}")
        n = T // 2
        drawn, bits = random.random(n), random.integers(2, size=n)
        kinds = np.where(drawn < p_ignore, IGNORE, np.where(drawn < (1 + p_ignore) / 2, WRITE, READ))
        kinds[0], kinds[-1] = WRITE, READ
        written = np.maximum.accumulate(np.where(kinds == WRITE, np.arange(n), 0))
        bits = np.where(kinds == READ, bits[written], bits)
        reads = np.flatnonzero(kinds == READ)
        return asked(np.stack([kinds, BIT + bits], 1).reshape(-1), 2 * reads, BIT + bits[reads])

    return Task(("w", "i", "r", "0", "1"), draw, 512)


def parity(last_only: bool = False) -> Task:
    """Whether the ones so far are odd in number, asked at every token.

    It is the word problem of the group of two elements (Merrill, Petty and Sabharwal, "The Illusion of State in
    State-Space Models", 2024).

    Args:
        last_only: ask at the last token alone, as in Delétang et al., "Neural Networks and the Chomsky Hierarchy"
            (2023).
    """

    def draw(random: np.random.Generator, T: int) -> Row:
        check_room(T, 1, "a bit")
        bits = random.integers(2, size=T)
        places = slice(-1, None) if last_only else slice(None)
        return asked(bits, places, (bits.cumsum() % 2)[places])

    return Task(("0", "1"), draw, 128)


def word_problem(group: str = "S5", tokens: int | None = None) -> Task:
    """The word problem of a group of permutations: the product of all so far is asked at every token.

    After Merrill, Petty and Sabharwal, "The Illusion of State in State-Space Models" (2024). Each token is a random
    element of the group; at every token the product of all so far is asked, which takes i to where the newest element
    takes what those before it made of i. S3 and S4 are solvable groups, A5 and S5 are not, whose word problem is
    complete for NC1. Usual: train on T = 128, test to 512. An element is called by where it takes 0, 1, 2, ...: 021
    leaves 0 and swaps 1 and 2.

    Args:
        group: S3, S4, S5 (all permutations), A4 or A5 (the even ones).
        tokens: of so many elements, drawn once for all rows, the rows are made, as some of those of Grazzi et al.,
            "Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues" (2025); their products are all
            elements. None for all.

    Raises:
        ValueError: no such group, or one element or more than it has.
    """
    if group not in GROUPS:
        raise unknown("group", group, GROUPS)
    elements = [p for p in permutations(range(int(group[1]))) if group[0] == "S" or _even(p)]
    number = {element: index for index, element in enumerate(elements)}
    after = [[number[tuple(new[i] for i in old)] for new in elements] for old in elements]
    used = np.arange(len(elements)) if tokens is None else _generators(after, tokens)

    def draw(random: np.random.Generator, T: int) -> Row:
        check_room(T, 1, "an element")
        row = used[random.integers(len(used), size=T)]
        product, products = 0, []  # element 0 is the identity
        for token in row.tolist():
            product = after[product][token]
            products.append(product)
        answers: Array = np.array(products, dtype=np.int64)
        return asked(row, slice(None), answers)

    return Task(["".join(map(str, element)) for element in elements], draw, 128)


def _generators(after: list[list[int]], count: int) -> Array:
    """``count`` elements that generate the group; `after[a][b]` is the product b after a."""
    check_between("tokens", count, 2, len(after))
    random = np.random.default_rng(count)
    while True:
        chosen = random.choice(len(after), count, replace=False)
        reached = new = {0}
        while new:
            new = {after[element][token] for element in new for token in chosen} - reached
            reached = reached | new
        if len(reached) == len(after):
            return chosen.astype(np.int64)


def _even(permutation: tuple[int, ...]) -> bool:
    n = len(permutation)
    return sum(permutation[i] > permutation[j] for i in range(n) for j in range(i + 1, n)) % 2 == 0


TASKS = (flip_flop, parity, word_problem)
