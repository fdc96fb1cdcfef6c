"""The interface of a task: random rows of tokens, with targets at some of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

UNASKED = -100  # target of a token without an answer
Array = npt.NDArray[np.int64]
Row = tuple[Array, Array]


@dataclass(frozen=True)
class Task:
    """A task with its options.

    Args:
        words: the name of each token of the vocabulary.
        draw: a function of a generator and T that returns a row's tokens and targets, int64 [T] each, -100 where
            nothing is asked; at least one answer is asked. It raises ValueError where T does not suit the task.
        length: a usual T.
    """

    words: Sequence[str]
    draw: Callable[[np.random.Generator, int], Row]
    length: int


class Examples:
    """Rows of a task by index; a row is a function of the seed, its index, the split and the length.

    Args:
        task: the task.
        length: tokens in a row.
        seed: seed of the rows, at least 0.
        held_out: whether rows are of the held-out split, with other random numbers.
    """

    def __init__(self, task: Task, length: int, seed: int = 0, *, held_out: bool = False):
        self.task, self.length, self.seed, self.held_out = task, length, seed, held_out

    def __getitem__(self, index: int) -> Row:
        """The tokens and targets of row `index >= 0`, int64 [T] each, -100 where nothing is asked."""
        if index < 0:
            raise IndexError(f"row index must be at least 0, got {index}")
        return self.task.draw(np.random.default_rng([self.seed, int(self.held_out), index]), self.length)

    def batch(self, indices: Sequence[int]) -> Row:
        """Several rows: tokens and targets, int64 [len(indices), T] each."""
        rows = [self[index] for index in indices]
        return np.stack([tokens for tokens, _ in rows]), np.stack([targets for _, targets in rows])


def checked(name: str, task: Task) -> Callable[[np.random.Generator, int], Row]:
    """A function that draws rows of a user's task and raises, with the task's name, for invalid ones."""

    def draw(random: np.random.Generator, T: int) -> Row:
        row = task.draw(random, T)
        if len(row) != 2 or any(np.shape(side) != (T,) or np.asarray(side).dtype != np.int64 for side in row):
            got = ", ".join(f"{np.asarray(side).dtype} {list(np.shape(side))}" for side in row)
            raise ValueError(f"{name}: expected tokens and targets, int64 [{T}] each, got {got}")
        for side, given in (("tokens", row[0]), ("answers", row[1][row[1] != UNASKED])):
            if not len(given) or given.min() < 0 or given.max() >= len(task.words):
                got = f"{given.min()} to {given.max()}" if len(given) else "none"
                raise ValueError(f"{name}: expected {side} from 0 to {len(task.words) - 1}, got {got}")
        return row

    return draw


def asked(tokens: Array, places: Array | slice, answers: Array) -> Row:
    """A row of ``tokens`` whose targets are ``answers`` at ``places`` and -100 elsewhere."""
    targets = np.full_like(tokens, UNASKED)
    targets[places] = answers
    return tokens, targets


def asked_last(before: Array, answers: Array) -> Row:
    """A row of ``before`` and all ``answers`` but the last; each answer is the target of the token before it."""
    tokens = np.concatenate([before, answers[:-1]])
    return asked(tokens, slice(len(before) - 1, None), answers)


class RoomError(ValueError):
    """A row is too short for a task."""


def check_room(length: int, needed: int, why: str) -> None:
    """Raise RoomError if a row is too short for a task."""
    if length < needed:
        raise RoomError(f"length: expected at least {needed} tokens for {why}, got {length}")


def check_between(name: str, value: float, low: float, high: float) -> None:
    """Raise ValueError unless an option is within bounds."""
    if not low <= value <= high:
        raise ValueError(f"{name}: expected {low} to {high}, got {value}")
