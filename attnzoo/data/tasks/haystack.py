"""Tasks that look for a little in much: needles in a haystack, variables, words by how often they come.

Those of RULER (Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?", 2024,
section 3 and appendix) are on a vocabulary of their own here, so that a small model can be trained on them: a word is
a token, a number is a few digits. The answers stand in the row behind the question, each asked at the token before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from attnzoo.data.tasks.task import Array, Row, Task, asked_last, check_between, check_room
from attnzoo.errors import unknown

FACT, QUESTION, ANSWER, DIGIT = range(4)  # DIGIT: the first of ten tokens
FIRST = DIGIT + 10  # the first word
SIGNS = ("fact", "question", "answer", *map(str, range(10)))
WORDS = 128  # number of words of the hay
MODES = ("easy", "standard")
MANY = 2**16


def needle(mode: str = "standard", digits: int = 4, depth: float | None = None) -> Task:
    """A needle in a haystack: a number that stands somewhere among random words.

    It has the two modes of Lin et al., "Forgetting Transformer" (2025), section 4.3. Random words, among them a needle
    with a number; the row ends in a question for the number. In the standard mode the needle is `fact`, the number, and
    the question `question answer`; in the easy mode the question stands in the needle, `question answer`, the number,
    so that what follows the same words has to be copied.

    Args:
        mode: easy or standard.
        digits: of the number.
        depth: where the needle is, from 0 (the row's beginning) to 1 (right before the question); random if None.

    Raises:
        ValueError: an unknown mode, or a number out of range; of a row, a length without room for the needle.
    """
    if mode not in MODES:
        raise unknown("mode", mode, MODES)
    check_between("digits", digits, 1, MANY)
    if depth is not None:
        check_between("depth", depth, 0, 1)
    before = [QUESTION, ANSWER] if mode == "easy" else [FACT]

    def draw(random: np.random.Generator, T: int) -> Row:
        number = DIGIT + random.integers(10, size=digits)
        inside = np.concatenate([before, number])
        hay = _hay(random, T - digits - 1, [inside], depth)
        return asked_last(np.concatenate([hay, [QUESTION, ANSWER]]), number)

    return Task([*SIGNS, *_names("w", WORDS)], draw, 512)


def several_keys(needles: int = 4, digits: int = 4, keys: int = 1024) -> Task:
    """Several needles, each with a key and a number, of which one key's number is asked (RULER's multi-key needles).

    A needle is `fact`, its key, its number; the row ends in `question` and a key.

    Args:
        needles: in a row, with different keys.
        digits: of each number.
        keys: that there are.
    """
    check_between("keys", keys, 1, MANY)
    check_between("needles", needles, 1, keys)
    check_between("digits", digits, 1, MANY)
    first = FIRST + WORDS

    def draw(random: np.random.Generator, T: int) -> Row:
        check_room(T, (needles + 1) * (digits + 2) - 1, f"{needles} needles of {digits + 2} tokens and a question")
        chosen = first + random.choice(keys, needles, replace=False)
        numbers = DIGIT + random.integers(10, size=(needles, digits))
        inside = [np.concatenate([[FACT, key], number]) for key, number in zip(chosen, numbers, strict=True)]
        hay = _hay(random, T - digits - 1, inside)
        which = int(random.integers(needles))
        return asked_last(np.concatenate([hay, [QUESTION, chosen[which]]]), numbers[which])

    return Task([*SIGNS, *_names("w", WORDS), *_names("k", keys)], draw, 512)


def variable_tracking(chains: int = 1, hops: int = 4, names: int = 256, values: int = 256) -> Task:
    """Which variables have a value (RULER's variable tracking).

    In each chain a variable is set to a value, the next one to that variable, and so on: `fact`, a variable, a value or
    a variable. Statements stand among random words, a chain's in their order. The row ends in `question` and one
    chain's value; its variables are asked in the order in which they were set.

    Args:
        chains: with different values.
        hops: from variable to variable; a chain has one variable more.
        names: variables that there are.
        values: that there are.
    """
    check_between("values", values, 1, MANY)
    check_between("names", names, 1, MANY)
    check_between("chains", chains, 1, min(values, names))
    check_between("hops", hops, 0, names // chains - 1)
    name, value = FIRST + WORDS, FIRST + WORDS + names

    def draw(random: np.random.Generator, T: int) -> Row:
        variables = name + random.choice(names, (chains, hops + 1), replace=False)
        given = value + random.choice(values, chains, replace=False)
        done, inside = [0] * chains, []
        for chain in random.permutation(np.arange(chains).repeat(hops + 1)).tolist():
            hop = done[chain]
            source = variables[chain, hop - 1] if hop else given[chain]
            inside.append(np.array([FACT, variables[chain, hop], source]))
            done[chain] += 1
        hay = _hay(random, T - hops - 2, inside)
        which = int(random.integers(chains))
        return asked_last(np.concatenate([hay, [QUESTION, given[which]]]), variables[which])

    return Task([*SIGNS, *_names("w", WORDS), *_names("x", names), *_names("v", values)], draw, 512)


def common_words(words: int = 2048, common: int = 10, often: int = 30, seldom: int = 3) -> Task:
    """The words that come often among those that come seldom (RULER's common words).

    `common` words come `often` times each, as many others as fit `seldom` times each (the last of them perhaps less),
    all in a random order. Then `question` and `answer` follow, and the common words are asked in the order in which
    each came first.

    Args:
        words: that there are.
        common: words to find.
        often: times that each of them comes.
        seldom: times that each other comes, fewer.

    Raises:
        ValueError: a number out of range; of a row, too short for the common words, or longer than `words` can fill.
    """
    check_between("words", words, 1, MANY)
    check_between("common", common, 1, words)
    check_between("often", often, 2, MANY)
    check_between("seldom", seldom, 1, often - 1)

    def draw(random: np.random.Generator, T: int) -> Row:
        room = T - common - 1  # tokens without question and all answers but one
        check_room(room, common * often, f"{common} words that come {often} times, beside the answers")
        others = -(-(room - common * often) // seldom)
        if others > words - common:
            raise ValueError(f"words: expected at least {common + others} for rows of {T} tokens, got {words}")
        chosen = FIRST + random.choice(words, common + others, replace=False)
        all_of_them = np.concatenate([chosen[:common].repeat(often), chosen[common:].repeat(seldom)])[:room]
        hay = random.permutation(all_of_them)
        answers = np.array(sorted(chosen[:common], key=lambda word: int(np.argmax(hay == word))))
        return asked_last(np.concatenate([hay, [QUESTION, ANSWER]]), answers)

    return Task([*SIGNS, *_names("w", words)], draw, 512)


def frequent_words(words: int = 2048, alpha: float = 2.0, count: int = 3) -> Task:
    """The most frequent words where frequencies fall as a power (RULER's frequent words).

    The word of rank k = 2, 3, ... comes in proportion to k^-alpha, rounded down; `w0` stands in place of rank 1 and
    fills the row, and is noise. All come in a random order; then `question` and `answer` follow, and the words most
    frequent but for the noise are asked, the most frequent first.

    Args:
        words: that there are.
        alpha: how fast frequencies fall.
        count: words to find.

    Raises:
        ValueError: a number out of range; of a row, one so short that two of the words asked come equally often.
    """
    check_between("words", words, 3, MANY)
    check_between("alpha", alpha, 1, 10)
    check_between("count", count, 1, words - 2)
    shares = np.arange(1, words + 1) ** -float(alpha)
    shares /= shares.sum()

    def draw(random: np.random.Generator, T: int) -> Row:
        room = T - count - 1
        times = (max(room, 0) * shares[1:]).astype(np.int64)
        if (np.diff(times[: count + 1]) >= 0).any():
            raise ValueError(
                f"length: expected more tokens, so that no two of the {count + 1} most frequent words come equally "
                f"often, got {T}"
            )
        chosen = FIRST + 1 + random.permutation(words - 1)
        hay = np.full(room, FIRST, dtype=np.int64)
        hay[: times.sum()] = chosen.repeat(times)
        return asked_last(np.concatenate([random.permutation(hay), [QUESTION, ANSWER]]), chosen[:count])

    return Task([*SIGNS, *_names("w", words)], draw, 512)


def _names(letter: str, count: int) -> list[str]:
    return [f"{letter}{number}" for number in range(count)]


def _hay(random: np.random.Generator, room: int, inside: Sequence[Array], depth: float | None = None) -> Array:
    """Random words with the pieces `inside` inserted in their order, `room` tokens in all."""
    words = room - sum(map(len, inside))
    check_room(room, room - words, "what stands in the hay, beside the question and the answers")
    hay = FIRST + random.integers(WORDS, size=words)
    places = np.sort(random.integers(words + 1, size=len(inside))) if depth is None else [round(depth * words)]
    cuts = np.split(hay, places)
    return np.concatenate([cuts[0], *(part for pair in zip(inside, cuts[1:], strict=True) for part in pair)])


TASKS = (needle, several_keys, variable_tracking, common_words, frequent_words)
