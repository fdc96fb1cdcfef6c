"""Which files a folder of texts has, and which of them are held out."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Collection
from pathlib import Path

# Tests and their data, generated tables, installed packages, and what differs between builds of one Python.
STDLIB_EXCLUDED = frozenset(
    [
        "__pycache__",
        "dist-packages",
        "encodings",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    ]
)


def stdlib_files() -> dict[str, Path]:
    """The source of Python's standard library, by name, in order.

    Raises:
        ValueError: this Python keeps none.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = [file.relative_to(root).as_posix() for file in root.rglob("*.py")]
    kept = sorted(name for name in names if not _excluded_from_stdlib(name))
    if not kept:
        raise ValueError(f"no data in 'stdlib': this Python keeps no source files in {str(root)!r}")
    return {name: root / name for name in kept}


def _excluded_from_stdlib(name: str) -> bool:
    return not STDLIB_EXCLUDED.isdisjoint(name.split("/")) or name.startswith("_sysconfigdata")


def text_files(folder: Path, pattern: str = "*") -> dict[str, Path]:
    """Files that are not empty at any depth, by their names relative to `folder`, in order; hidden ones are left out.

    Raises:
        PermissionError: a folder in it cannot be read.
        ValueError: there is none.
    """
    check_readable(folder)
    files = [file for file in folder.rglob(pattern) if file.is_file() and file.stat().st_size]
    names = {whole_name(file.relative_to(folder).as_posix()): file for file in files}
    shown = {name: names[name] for name in sorted(names) if not is_hidden(name)}
    if not shown:
        raise ValueError(
            f"no data in {str(folder)!r}: the folder has no file that is not empty and matches {pattern!r}"
        )
    return shown


def whole_name(name: str) -> str:
    """A file's name in characters alone: bytes in it that are not UTF-8 become escapes."""
    return name.encode("utf-8", "backslashreplace").decode()


def is_hidden(name: str) -> bool:
    """Whether a file or a folder of a relative path begins with a dot."""
    return any(part.startswith(".") for part in name.split("/"))


def held_out_names(names: Collection[str], fraction: float) -> set[str]:
    """Which of several files are held out: by a hash of the name, so that a file keeps its side when others come."""
    ranked = sorted(names, key=_hash)
    count = sum(_hash(name) < fraction for name in ranked)
    return set(ranked[: min(max(count, 1), len(ranked) - 1)])


def check_readable(folder: Path) -> None:
    """Refuse a folder of which some part may not be read: a search for files passes over it without a word.

    Raises:
        OSError: as the system has it, with the folder's name.
    """

    def refuse(error: OSError) -> None:
        raise type(error)(error.errno, "this folder of the data cannot be read", error.filename) from error

    for _, inside, _ in os.walk(folder, onerror=refuse):
        inside[:] = [name for name in inside if not name.startswith(".")]


def _hash(name: str) -> float:
    """Of [0, 1), the same on every machine."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "big") / 2**48
