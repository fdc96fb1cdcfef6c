"""Synthetic tasks: rows of any length drawn on demand, with answers at some of their tokens.

A task of your own is a Python file that ends in ``TASK``, a function of options as those of `TASKS` are; its name is
the file's path. One of the package is named in the ``TASKS`` at the end of its file, and nowhere else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from attnzoo.data.tasks import haystack, recall, states
from attnzoo.data.tasks.task import UNASKED, Examples, Task, asked, checked
from attnzoo.errors import check_kinds, unknown
from attnzoo.files import given_by, python_file

__all__ = ["TASKS", "UNASKED", "Examples", "Task", "asked", "build_task", "is_task", "options_of", "summary_of"]

TASKS: dict[str, Callable[..., Task]] = {
    task.__name__: task for file in (states, recall, haystack) for task in file.TASKS
}


def is_task(name: str) -> bool:
    """Whether a name is one of `TASKS`, or the path of a Python file."""
    return name in TASKS or Path(name).suffix == ".py"


def build_task(name: str, options: Mapping[str, Any] | None = None) -> Task:
    """A task by its name.

    Args:
        name: one of `TASKS`, or the path of a Python file that ends in ``TASK``.
        options: options of the task's function, by name.

    Raises:
        ValueError: an unknown task or option, one of the wrong kind or out of range, or a file that fails; when rows
            are drawn, an invalid row.
        TypeError: a file whose TASK is no function that gives a Task.
    """
    function, options = _function(name), options or {}
    known = inspect.signature(function).parameters
    for option in options:
        if option not in known:
            raise unknown("option", option, known, of=f"the task {name!r}")
    check_kinds(options, {option: parameter.annotation for option, parameter in known.items()})
    task = function(**options)
    if name in TASKS:
        return task
    if not isinstance(task, Task):
        raise TypeError(f"{name}: expected TASK to give a Task, got {task!r}")
    return replace(task, draw=checked(name, task))


def _function(name: str) -> Callable[..., Task]:
    if name in TASKS:
        return TASKS[name]
    if not is_task(name) or not Path(name).is_file():
        raise unknown("task", name, TASKS, python_file(name), see="attnzoo data list")
    function = given_by(Path(name), "TASK")
    if not callable(function):
        raise TypeError(f"{name}: expected a function as TASK, got {function!r}")
    return function  # type: ignore[no-any-return]


def options_of(name: str) -> dict[str, Any]:
    """The options of a task with their defaults."""
    return {option: parameter.default for option, parameter in inspect.signature(TASKS[name]).parameters.items()}


def summary_of(name: str) -> str:
    """The first sentence of a task's description."""
    first, _, _ = (inspect.getdoc(TASKS[name]) or "").partition("\n\n")
    return " ".join(first.split())
