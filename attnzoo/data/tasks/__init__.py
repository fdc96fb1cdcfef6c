"""Synthetic tasks, drawn as they are asked for: rows of any length, with answers at some of their tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from attnzoo.data.tasks.haystack import common_words, frequent_words, needle, several_keys, variable_tracking
from attnzoo.data.tasks.recall import forgetting_mqar, induction, mqar, nth_last_value, selective_copying
from attnzoo.data.tasks.states import flip_flop, parity, word_problem
from attnzoo.data.tasks.task import UNASKED, Examples, Task
from attnzoo.errors import check_kinds, unknown

__all__ = ["TASKS", "UNASKED", "Examples", "Task", "build_task", "options_of", "summary_of"]

TASKS: dict[str, Callable[..., Task]] = {
    task.__name__: task
    for task in (
        flip_flop, parity, word_problem, mqar, forgetting_mqar, nth_last_value, selective_copying, induction, needle,
        several_keys, variable_tracking, common_words, frequent_words,
    )
}  # fmt: skip


def build_task(name: str, options: Mapping[str, Any] | None = None) -> Task:
    """A task by its name.

    Args:
        name: one of `TASKS`.
        options: of its function there, by name.

    Raises:
        ValueError: an unknown task or option, or one of the wrong kind or out of range.
    """
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    options = options or {}
    known = inspect.signature(TASKS[name]).parameters
    for option in options:
        if option not in known:
            raise unknown(f"option of the task {name!r}:", option, known)
    check_kinds(options, {option: parameter.annotation for option, parameter in known.items()})
    return TASKS[name](**options)


def options_of(name: str) -> dict[str, Any]:
    """The options of a task with their defaults."""
    return {option: parameter.default for option, parameter in inspect.signature(TASKS[name]).parameters.items()}


def summary_of(name: str) -> str:
    """What a task is, in the first sentence of its description."""
    first, _, _ = (inspect.getdoc(TASKS[name]) or "").partition("\n\n")
    return " ".join(first.split())
