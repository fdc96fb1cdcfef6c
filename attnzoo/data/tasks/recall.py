"""Tasks that recall what stood elsewhere in the row: values of keys, tokens among noise, what followed a token."""

from __future__ import annotations

import numpy as np

from attnzoo.data.tasks.task import Array, Row, Task, asked, check_between, check_room

LARGEST = 2**20  # largest vocabulary


def mqar(vocab_size: int = 8192, pairs: int = 4, power: float = 0.01) -> Task:
    """Multi-query associative recall: the values of keys that came before.

    As in the code of Arora et al., "Zoology: Measuring and Improving Recall in Efficient Language Models" (2023):
    different keys with different values come first; then each key comes once more, at every second token at most, and
    its value is asked there. All other tokens are random. Keys are the tokens 1 to V / 2 - 1, values V / 2 to V - 1.
    The authors train on rows of 64 tokens with 4 pairs, and longer ones, and test to 1024 tokens with 256 pairs.

    With a small vocabulary the random tokens may give a key another value by chance, before it is asked. Rows of 4
    tokens per pair (and 2 per update of `forgetting_mqar`) have no room for that.

    Args:
        vocab_size: V.
        pairs: of a key and its value.
        power: place n = 1, 2, ... behind the pairs is drawn in proportion to n^(power - 1); 1 makes all alike.
    """
    return forgetting_mqar(vocab_size, pairs, 0, power)


def forgetting_mqar(vocab_size: int = 8192, pairs: int = 8, updates: int = 4, power: float = 0.01) -> Task:
    """Multi-query associative recall where some keys get another value, and the last value is asked.

    As `forgetting_mqar` in the code of the authors of `mqar` (HazyResearch/zoology): the other values come behind all
    pairs; the rest is as there. Here each is different from the key's own first value; there, from that of some key.

    Args:
        vocab_size: as of `mqar`.
        pairs: as of `mqar`.
        updates: keys that get another value.
        power: as of `mqar`.
    """
    half = _halves(vocab_size, "pairs", pairs, power)
    check_between("updates", updates, 0, pairs)
    values = vocab_size - half

    def draw(random: np.random.Generator, T: int) -> Row:
        keys, given = 1 + random.choice(half - 1, pairs, replace=False), random.choice(values, pairs, replace=False)
        again = random.choice(pairs, updates, replace=False)
        last = given.copy()
        last[again] = (given[again] + random.integers(1, values, size=updates)) % values
        written = np.concatenate([keys, keys[again]]), half + np.concatenate([given, last[again]])
        return _ask_keys(random, T, np.stack(written, 1).reshape(-1), keys, half + last, power, vocab_size)

    return Task(_halved_words(vocab_size), draw, 64)


def nth_last_value(vocab_size: int = 8192, keys: int = 4, values: int = 3, n: int = 2, power: float = 0.01) -> Task:
    """Recall of the value that a key had n - 1 values ago.

    Yang et al., "PaTH Attention" (2025), ask for the N-th last value of a key among their synthetic tasks; the rows are
    this library's. Every key gets several values, which are random; the writings of all keys come in a random order.
    Then each key comes once more, and its n-th last value is asked, in rows that are otherwise those of `mqar`.

    Args:
        vocab_size: as of `mqar`.
        keys: different ones.
        values: of each key.
        n: 1 asks for the last value.
        power: as of `mqar`.
    """
    half = _halves(vocab_size, "keys", keys, power)
    check_between("values", values, 1, LARGEST)
    check_between("n", n, 1, values)

    def draw(random: np.random.Generator, T: int) -> Row:
        check_room(T, 2 * keys * (values + 1), f"{values} values of {keys} keys each and {keys} questions")
        names = 1 + random.choice(half - 1, keys, replace=False)
        order = random.permutation(np.arange(keys).repeat(values))
        given = half + random.integers(vocab_size - half, size=keys * values)
        answers = np.array([given[order == key][-n] for key in range(keys)])
        written = np.stack([names[order], given], 1).reshape(-1)
        return _ask_keys(random, T, written, names, answers, power, vocab_size)

    return Task(_halved_words(vocab_size), draw, 64)


def selective_copying(vocab_size: int = 16, count: int = 16) -> Task:
    """Tokens among noise, to be said in their order.

    After Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (2023), section 4.1.1. `count`
    random tokens stand at random places among noise; then as many blanks follow, at each of which the next of them is
    asked. The paper has 16 tokens, a vocabulary of 16 and 4096 tokens before the blanks.

    Args:
        vocab_size: noise and blank are the first two.
        count: tokens to copy.
    """
    check_between("vocab_size", vocab_size, 3, LARGEST)
    check_between("count", count, 1, LARGEST)

    def draw(random: np.random.Generator, T: int) -> Row:
        check_room(T, 2 * count, f"{count} tokens and as many blanks")
        copied = random.integers(2, vocab_size, size=count)
        tokens = np.zeros(T, dtype=np.int64)
        tokens[np.sort(random.choice(T - count, count, replace=False))] = copied
        tokens[-count:] = 1
        return asked(tokens, slice(-count, None), copied)

    return Task([".", "?", *(str(token) for token in range(2, vocab_size))], draw, 256)


def induction(vocab_size: int = 16, questions: int = 1) -> Task:
    """Recall of the token that followed a special token when that came before.

    After Fu et al., "Hungry Hungry Hippos: Towards Language Modeling with State Space Models" (2023), section 3. Random
    tokens, among them one special token at a random place; the row ends in the special token, and what followed it
    before is asked. Gu and Dao, "Mamba" (2023), section 4.1.2, train on T = 256 with a vocabulary of 16, and test on
    rows that are far longer.

    One answer in a row teaches little: Gu and Dao train on 200,000 rows. With more questions a row has 1 to so many,
    equally likely: the special token comes more often, and each time but the first it is asked what followed it the
    last time.

    Args:
        vocab_size: the special token is the first.
        questions: answers in a row, at most.
    """
    check_between("vocab_size", vocab_size, 2, LARGEST)
    check_between("questions", questions, 1, LARGEST)

    def draw(random: np.random.Generator, T: int) -> Row:
        check_room(T, 2 * questions + 1, f"the special token {questions + 1} times and what follows it")
        tokens, count = random.integers(1, vocab_size, size=T), int(random.integers(1, questions + 1))
        apart = np.arange(count)  # special tokens are never neighbours
        first = np.sort(random.choice(T - 1 - count, count, replace=False)) + apart
        places = np.append(first, T - 1)
        tokens[places] = 0
        return asked(tokens, places[1:], tokens[first + 1])

    return Task(["!", *(str(token) for token in range(1, vocab_size))], draw, 256)


def _halves(vocab_size: int, name: str, keys: int, power: float) -> int:
    """The first token of the values; raises for an unfit vocabulary."""
    check_between("vocab_size", vocab_size, 4, LARGEST)
    half = vocab_size // 2
    check_between(name, keys, 1, half - 1)
    check_between("power", power, 0, 1)
    return half


def _halved_words(vocab_size: int) -> list[str]:
    half = vocab_size // 2
    return ["0", *(f"k{n}" for n in range(1, half)), *(f"v{n}" for n in range(vocab_size - half))]


def _ask_keys(
    random: np.random.Generator, T: int, written: Array, keys: Array, answers: Array, power: float, vocab_size: int
) -> Row:
    check_room(T, len(written) + 2 * len(keys), f"{len(written)} tokens of keys and values and {len(keys)} questions")
    weights = np.arange(1, (T - len(written)) // 2 + 1) ** (power - 1.0)
    chosen = draw_different(random, len(keys), weights / weights.sum())
    tokens = random.integers(vocab_size, size=T)
    tokens[: len(written)] = written
    tokens[len(written) + 2 * chosen] = keys
    return asked(tokens, len(written) + 2 * chosen, answers)


def draw_different(random: np.random.Generator, count: int, p: Array) -> Array:
    """Different places drawn with probabilities p, int64 [count], in the order of drawing.

    The result equals ``random.choice(len(p), count, replace=False, p=p)``, which is slow where almost all places are
    drawn and the last ones are improbable: it sorts in each of many rounds.

    Args:
        random: the random generator.
        count: the number of places, at most those with a probability above 0.
        p: [N] float64, with the sum 1.
    """
    left = p.copy()
    places: dict[int, None] = {}
    while len(places) < count:
        x = random.random(count - len(places))
        below = left.cumsum()
        found = (below / below[-1]).searchsorted(x, side="right")
        left[found] = 0
        places |= dict.fromkeys(found.tolist())
    return np.array(list(places), dtype=np.int64)


TASKS = (mqar, forgetting_mqar, nth_last_value, selective_copying, induction)
