"""The needle in a haystack test, by the needle's depth and the length of the row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

from attnzoo.data.tasks import Examples, Task, build_task
from attnzoo.data.tasks.haystack import MODES
from attnzoo.data.tasks.task import Row, asked_last, check_between, check_room
from attnzoo.data.windows import Joined, Tokens
from attnzoo.errors import unknown
from attnzoo.evaluation.answers import Answers, measure_answers
from attnzoo.evaluation.losses import Array

FOUND = "The secret number is"
ASKED = "What is the secret number? Answer: The secret number is"


@dataclass(frozen=True)
class NeedlePicture:
    """The share of needles whose number was answered, by depth and length.

    Args:
        mode: easy (the question stands in the needle) or standard.
        context: tokens per row in training; None where unknown.
        depths: of the needle, from 0 (the row's beginning) to 1 (right before the question), one per row.
        lengths: tokens of the row with its question and all answers but the last, one per column.
        answers: what was answered at each depth, per length. `whole` is the share of rows in which the likeliest tokens
            were all those of the number.
    """

    mode: str
    context: int | None
    depths: tuple[float, ...]
    lengths: tuple[int, ...]
    answers: tuple[tuple[Answers, ...], ...]

    @property
    def whole(self) -> Array:
        """The share of rows with the whole number answered, ``[depths, lengths]``, in [0, 1]."""
        return np.array([[found.whole for found in row] for row in self.answers], dtype=np.float64)


def measure_needle(
    model: nn.Module, task: Callable[[float], Task], mode: str, lengths: Sequence[int], depths: Sequence[float],
    rows: int, seed: int = 0, context: int | None = None,
) -> NeedlePicture:  # fmt: skip
    """The share of needles found, as in Lin et al., "Forgetting Transformer" (2025), section 4.3 and appendix B.3.

    In the paper a language model grades the answer. Here the needle holds a random number, each token of which is asked
    at the token before, so that correct answers can be counted.

    Args:
        model: as :func:`attnzoo.evaluation.scores.score_targets` takes it.
        task: a function from a depth to the task: the result of :func:`synthetic_needle` or :func:`text_needle`.
        mode: the mode of that task.
        lengths: tokens per row.
        depths: from 0 to 1.
        rows: per length and depth.
        seed: of the rows.
        context: tokens per row in training.

    Raises:
        ValueError: no rows, an unknown mode, a depth out of range, or a length without room.
    """
    if mode not in MODES:
        raise unknown("mode", mode, MODES)
    found = []
    for depth in depths:
        built = task(depth)
        found.append(
            tuple(measure_answers(model, Examples(built, length, seed, held_out=True), rows) for length in lengths)
        )
    return NeedlePicture(mode, context, tuple(depths), tuple(lengths), tuple(found))


def synthetic_needle(mode: str, digits: int = 4) -> Callable[[float], Task]:
    """A function from a depth to the synthetic task `needle`; see :func:`attnzoo.data.tasks.haystack.needle`."""
    return lambda depth: build_task("needle", {"mode": mode, "digits": digits, "depth": depth})


def text_needle(
    hay: Tokens | Joined, encode: Callable[[str], Sequence[int]], mode: str, digits: int = 4
) -> Callable[[float], Task]:
    """A function from a depth to a needle task in natural text, for models of texts.

    A random stretch of the text, and in it a sentence with a random number. In the standard mode it is `The secret
    number is 1234.`, and the row ends in a question for it, `What is the secret number? Answer: The secret number is`;
    in the easy mode the question stands before the sentence in the hay, too.

    Args:
        hay: tokens of a text, 1-D, longer than any row.
        encode: a text's tokens.
        mode: easy or standard.
        digits: of the number, the first of which is not 0.

    Raises:
        ValueError: an unknown mode, or no digits.
    """
    if mode not in MODES:
        raise unknown("mode", mode, MODES)
    check_between("digits", digits, 1, 18)
    begin = len(encode(""))  # special tokens before every text

    def inner(text: str) -> list[int]:
        return list(encode(text))[begin:]

    before, question = inner(f" {ASKED if mode == 'easy' else FOUND}"), inner(f" {ASKED}")

    def at(depth: float) -> Task:
        check_between("depth", depth, 0, 1)

        def draw(random: np.random.Generator, T: int) -> Row:
            number = inner(f" {random.integers(10 ** (digits - 1), 10**digits)}")
            inside = np.array([*before, *number, *inner(".")], dtype=np.int64)
            behind = np.array(question, dtype=np.int64)
            words = T - len(inside) - len(behind) - len(number) + 1
            check_room(T, T - words, "the needle, the question and the number")
            if len(hay) < words:
                raise ValueError(f"hay: expected at least {words} tokens of text for rows of {T}, got {len(hay)}")
            first = int(random.integers(len(hay) - words + 1))
            text = np.asarray(hay[first : first + words], dtype=np.int64)
            cut = round(depth * words)
            return asked_last(np.concatenate([text[:cut], inside, text[cut:], behind]), np.array(number))

        return Task((), draw, 512)

    return at
