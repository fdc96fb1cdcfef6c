"""The rule of every fuzzer: a right answer, or an error of these kinds that names what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

REFUSALS = (ValueError, TypeError, RuntimeError, OSError)
MISTAKES = (NotImplementedError, RecursionError, UnicodeError)  # kinds of these that nobody raises on purpose


def answer(work: Callable[[], Any], names: Iterable[str], story: object) -> Any:
    """What `work` returns, or None when it refuses by one of `names`; else a failure that tells the case's `story`."""
    try:
        return work()
    except Exception as error:
        refused = isinstance(error, REFUSALS) and not isinstance(error, MISTAKES)
        if refused and any(name in str(error) for name in names):
            return None
        raise AssertionError(f"{story}: {error!r}") from error
