"""The rule of every fuzzer: a right answer, or an error of these kinds that names what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hypothesis import settings

REFUSALS = (ValueError, TypeError, RuntimeError, OSError)


def examples() -> range:
    """Seeds to try: a dozen, or as many as the profile says (`--hypothesis-profile=long`)."""
    return range(settings().max_examples)


def answer(work: Callable[[], Any], names: Iterable[str], story: object) -> Any:
    """What `work` returns, or None when it refuses by one of `names`; anything else fails, with the `story` of the case.

    No kind of refusal has a subclass of its own among the errors that a mistake in the code raises.
    """
    try:
        return work()
    except REFUSALS as error:
        assert not isinstance(error, NotImplementedError | RecursionError | UnicodeError), (story, repr(error))
        assert any(name in str(error) for name in names), (story, repr(error))
        return None
    except Exception as error:
        raise AssertionError(f"{story}: {error!r}") from error
