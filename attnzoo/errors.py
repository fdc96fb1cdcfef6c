"""Errors that name what exists and what was probably meant."""

import difflib
from collections.abc import Iterable
from typing import Any


class UnavailableError(RuntimeError):
    """What was asked for by name cannot serve here: a device, a kernel or a plugin is not as it needs."""


def nearest(name: object, options: Iterable[str]) -> str | None:
    """The option closest in spelling to `name` (case does not count), or None when none is close."""
    by_fold = {option.casefold(): option for option in options}
    close = difflib.get_close_matches(str(name).casefold(), by_fold, n=1, cutoff=0.5)
    return by_fold[close[0]] if close else None


def unknown(kind: str, name: object, options: Iterable[str]) -> ValueError:
    """The error for a `name` that is not among `options`; the caller raises it.

    `unknown("variant", "foks", ["fox", "nope"])` reads
    "unknown variant 'foks': expected one of fox, nope; did you mean 'fox'?".
    """
    listed = list(options)
    if not listed:
        return ValueError(f"unknown {kind} {name!r}: none is expected")
    message = f"unknown {kind} {name!r}: expected one of {', '.join(listed)}"
    close = nearest(name, listed)
    return ValueError(f"{message}; did you mean {close!r}?" if close else message)


def at_least(config: Any, minimum: float, *names: str) -> None:
    """Raise ValueError if a field of ``config`` in ``names`` is below ``minimum``."""
    for name in names:
        if not getattr(config, name) >= minimum:
            raise ValueError(f"{name} must be at least {minimum}, got {getattr(config, name)}")


def above(config: Any, minimum: float, *names: str) -> None:
    """Raise ValueError if a field of ``config`` in ``names`` is not above ``minimum``."""
    for name in names:
        if not getattr(config, name) > minimum:
            raise ValueError(f"{name} must be above {minimum:g}, got {getattr(config, name)}")


def one_of(config: Any, name: str, options: list[str]) -> None:
    """Raise ValueError if the field ``name`` of ``config`` is none of ``options``."""
    if getattr(config, name) not in options:
        raise unknown(name, getattr(config, name), options)
