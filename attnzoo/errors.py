"""Errors that name what exists and what was probably meant."""

import difflib
from collections.abc import Iterable


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
