"""Errors that list the valid choices and the nearest one, and checks of fields."""

import difflib
import math
import re
import traceback
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

WIDEST = 2**20  # channels or heads, of which no layer has so many: a number beyond is a mistake
MANY = 12  # options that a message lists before it names the nearest
FLOAT32 = (1.2e-38, 3.4e38)  # least and largest normal numbers of float32
KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {  # annotation -> its name in words, and a test of a value
    "bool": ("True or False", lambda x: isinstance(x, bool)),
    "int": ("a whole number below 2^31", lambda x: isinstance(x, int) and not isinstance(x, bool) and abs(x) < 2**31),
    "float": (
        "a number that float32 holds",
        lambda x: _is_number(x) and (x == 0 or FLOAT32[0] <= abs(x) <= FLOAT32[1]),
    ),
    "str": ("a name", lambda x: isinstance(x, str)),
}


def _is_number(x: object) -> bool:
    whole = isinstance(x, int) and not isinstance(x, bool) and abs(x) <= 2**53  # torch takes no larger integers
    return whole or isinstance(x, float)


def check_kinds(
    values: Mapping[str, Any], annotations: Mapping[str, Any], choices: Mapping[str, Iterable[Any]] | None = None
) -> None:
    """Raise ValueError unless each value is one of its choices, or else of the kind that its annotation says.

    Args:
        values: options by name.
        annotations: of fields or parameters, by name; `bool`, `int`, `float` and `str`, perhaps with `| None`, as types
            or as text. What has another annotation or none is not looked at.
        choices: the valid values, by name.
    """
    for name, value in values.items():
        if choices and name in choices:
            if value not in choices[name]:
                raise unknown(name, value, [choice for choice in choices[name] if choice])
            continue
        annotation = annotations.get(name, "")
        kind, _, empty = str(getattr(annotation, "__name__", annotation)).partition(" | ")
        if kind not in KINDS or (empty == "None" and value is None):
            continue
        expected, fits = KINDS[kind]
        if not fits(value):
            raise ValueError(f"{name}: expected {expected}{' or None' if empty == 'None' else ''}, got {value!r}")


class UnavailableError(RuntimeError):
    """A form, device or plugin that was asked for by name is not available here."""


class NotFiniteError(FloatingPointError):
    """The logits after the prompts of some sequences are infinite or no numbers.

    Args:
        sequences: their numbers.
    """

    def __init__(self, sequences: Sequence[int]):
        these = ", ".join(map(str, sequences))
        super().__init__(
            f"logits: expected finite numbers after the prompt, got inf or nan in sequence {these}: a weight is one of "
            "them, or too large for its dtype"
        )
        self.sequences = sequences


class UnknownKeyError(ValueError, KeyError):
    """An unknown key of a mapping: a ValueError, like every unknown name, and a KeyError."""

    __str__ = ValueError.__str__  # a KeyError would quote the message


def nearest(name: object, options: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The option closest in spelling to `name` (case does not count), or None when none is close.

    `cutoff` is the least share of letters that both have in common, in order (`difflib`). Of options that are equally
    close it is the first.
    """
    matcher = difflib.SequenceMatcher(b=str(name).casefold())
    best, found = cutoff, None
    for option in options:
        matcher.set_seq1(option.casefold())
        if matcher.ratio() >= best and (found is None or matcher.ratio() > best):
            best, found = matcher.ratio(), option
    return found


def did_you_mean(name: object, options: Iterable[str]) -> str:
    """The end of a message about a `name`, which offers the nearest option; empty where none is close."""
    close = nearest(name, options)
    return f"; did you mean {close!r}?" if close else ""


def did_you_mean_path(path: str | Path, names: Iterable[str] = (), folders: bool = False) -> str:
    """The end of a message about a `path` where nothing is, which offers the nearest of `names` and of what lies beside
    it, or of the `folders` there alone; empty where none is close. Names of files are compared without their suffix."""
    beside = {
        found.stem: str(found)
        for found in sorted(Path(path).parent.glob("*"))
        if found != Path(path) and (found.is_dir() or not folders)
    }
    options = {name: name for name in names} | beside
    close = nearest(Path(path).stem, options, 0.6)
    return f"; did you mean {options[close]!r}?" if close else ""


def no_run(folder: str | Path, file: str) -> FileNotFoundError:
    """The error for a folder that holds no run, as its ``file`` is missing."""
    return FileNotFoundError(f"no run in {str(folder)!r}: there is no {file}{did_you_mean_path(folder, folders=True)}")


def no_data(path: str | Path) -> FileNotFoundError:
    """The error for texts at a path where nothing is."""
    return FileNotFoundError(f"no data: there is no file or folder {str(path)!r}{did_you_mean_path(path)}")


def unknown(
    kind: str, name: object, options: Iterable[str], other: str = "", of: str = "", see: str = ""
) -> ValueError:
    """The error for a `name` that is not among `options`; the caller raises it.

    `unknown("variant", "foks", ["fox", "nope"])` reads "unknown variant 'foks': expected one of fox, nope; did you mean
    'fox'?". Of many options the nearest stands first. `other` describes further valid values; `of` names the owner of
    the options: "unknown form 'chnk' of 'gla': ..."; `see` is a command that prints them where they are many.
    """
    listed = list(options)
    said = f"unknown {kind} {name!r}{f' of {of}' if of else ''}"
    if not listed:
        return ValueError(f"{said}: none is expected")
    shown = ", ".join(repr(option) if ", " in option else option for option in listed)
    if see and len(listed) > MANY:
        shown = f"the {len(listed)} that `{see}` shows"
    expected = f"expected one of {shown}{f', or {other}' if other else ''}"
    if len(listed) <= MANY:
        return ValueError(f"{said}: {expected}{did_you_mean(name, listed)}")
    close = nearest(name, listed)
    hint = f" (did you mean {close!r}?)" if close else ""
    return ValueError(f"{said}{hint}: {expected}")


def in_section(said: str, section: str, names: Container[str]) -> str:
    """A message with its section, such as "data.", before the field that it begins with, if that is in ``names``."""
    start = len("unknown ") if said.startswith("unknown ") else 0
    begins = re.split(r"\W", said[start:], maxsplit=1)[0] in names
    return f"{said[:start]}{section}{said[start:]}" if begins else said


def check_least(least: float, **numbers: float | None) -> None:
    """Raise ValueError if an argument, by its name, is below ``least``; None may be given where it has no meaning."""
    for name, number in numbers.items():
        if number is not None and not number >= least:
            raise ValueError(f"{name}: expected at least {least}, got {number}")


def at_least(config: Any, minimum: float, *names: str, below: float | None = None) -> None:
    """Raise ValueError if a field of ``config`` in ``names`` is below ``minimum``, or ``below`` or more."""
    for name in names:
        check_least(minimum, **{name: getattr(config, name)})
        if below is not None and getattr(config, name) >= below:
            raise ValueError(f"{name}: expected a number below {below}, got {getattr(config, name)}")


def above(config: Any, minimum: float, *names: str) -> None:
    """Raise ValueError if a field of ``config`` in ``names`` is not above ``minimum``."""
    for name in names:
        if not getattr(config, name) > minimum:
            raise ValueError(f"{name}: expected a number above {minimum:g}, got {getattr(config, name)}")


def finite(config: Any, *names: str) -> None:
    """Raise ValueError if a field of ``config`` in ``names`` is infinite or not a number."""
    for name in names:
        if not math.isfinite(getattr(config, name)):
            raise ValueError(f"{name}: expected a finite number, got {getattr(config, name)}")


def several(config: Any, *names: str, of: str = "") -> None:
    """Raise ValueError unless the fields of ``config`` in ``names`` are tuples or lists, as a comma is easily
    forgotten.

    ``of`` describes ``config`` in the message.
    """
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, tuple | list):
            said = f"{name} of {of}" if of else name
            raise ValueError(f"{said}: expected a tuple, as (a, b) or (a,), got {value!r}")


def one_of(config: Any, name: str, options: list[str]) -> None:
    """Raise ValueError if the field ``name`` of ``config`` is none of ``options``."""
    if getattr(config, name) not in options:
        raise unknown(name, getattr(config, name), options)


def message(error: BaseException) -> str:
    """An error's message, or its type and the line that raised it where it has none."""
    return str(error) or reason(error)


def reason(error: BaseException) -> str:
    """An error's type and message, or its type and the line that raised it where it has no message."""
    if str(error):
        return repr(error)
    *_, frame = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} in {Path(frame.filename).name}, line {frame.lineno}: {frame.line}"
