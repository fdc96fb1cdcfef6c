"""The files of a folder of texts, and the choice of held-out files."""

from __future__ import annotations

import hashlib
import logging
import os
import sysconfig
from codecs import BOM_UTF8
from collections.abc import Collection
from pathlib import Path

from attnzoo.data.own import kind_of_file, kind_of_folder

logger = logging.getLogger(__name__)

# Tests and their data, generated tables, installed packages, and files that differ between builds of Python.
STDLIB_EXCLUDED = frozenset([
    "__pycache__", "dist-packages", "encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests",
    "turtledemo",
])  # fmt: skip


def stdlib_files() -> dict[str, Path]:
    """The source files of Python's standard library by name, in order.

    Raises:
        ValueError: this Python has no source files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    kept: list[str] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in STDLIB_EXCLUDED]
        below = Path(folder).relative_to(root)
        sources = [name for name in files if name.endswith(".py") and not name.startswith("_sysconfigdata")]
        kept += [(below / name).as_posix() for name in sources]
    kept.sort()
    if not kept:
        raise ValueError(f"no data in 'stdlib': this Python keeps no source files in {str(root)!r}")
    return {name: root / name for name in kept}


def text_files(folder: Path, pattern: str = "*") -> dict[str, Path]:
    """The files in a folder at any depth that are not empty, by their names relative to `folder`, in order.

    Hidden files are left out, and those that attnzoo has written, which are logged.

    Raises:
        PermissionError: a folder in it cannot be read.
        ValueError: no such file.
    """
    files = [file for file in files_in(folder, pattern) if file.stat().st_size]
    names = {whole_name(file.relative_to(folder).as_posix()): file for file in files}
    shown = {name: names[name] for name in sorted(names) if not is_hidden(name)}
    if not shown:
        raise ValueError(
            f"no data in {str(folder)!r}: the folder has no file that is not empty and matches {pattern!r}"
        )
    return shown


def text_of(content: bytes | bytearray) -> str:
    """The text of UTF-8 content, without a byte order mark.

    Raises:
        UnicodeDecodeError: it is not UTF-8.
    """
    return content.removeprefix(BOM_UTF8).decode("utf-8")


def whole_name(name: str) -> str:
    """A file's name with bytes that are not UTF-8 escaped."""
    return name.encode("utf-8", "backslashreplace").decode()


def is_hidden(name: str) -> bool:
    """Whether a file or a folder of a relative path begins with a dot."""
    return any(part.startswith(".") for part in name.split("/"))


def held_out_names(names: Collection[str], fraction: float) -> set[str]:
    """The held-out files, by a hash of the name, so that adding files does not change the split of others."""
    ranked = sorted(names, key=_hash)
    count = sum(is_held_out(name, fraction) for name in ranked)
    return set(ranked[: min(max(count, 1), len(ranked) - 1)])


def is_held_out(name: str, fraction: float) -> bool:
    """Whether a document of that name is held out."""
    return _hash(name) < fraction


def files_in(folder: Path, pattern: str = "*") -> list[Path]:
    """The files in a folder at any depth without those that attnzoo has written (runs, tokens, models, pages, results).

    The latter are logged: a run may lie in the folder of its own data. So are links to folders, which are not followed,
    and to nothing.

    Raises:
        PermissionError: a folder in it cannot be read.
    """
    paths, own = _walked(folder)
    matching = paths if pattern == "*" else folder.rglob(pattern)
    files = [path for path in matching if path.is_file() and own.keys().isdisjoint(path.parents)]
    written = {file: kind for file in files if (kind := kind_of_file(file))}
    if own or written:
        found = [f"{str(path.relative_to(folder))!r} ({kind})" for path, kind in sorted({**own, **written}.items())]
        logger.warning("left out of the texts in %r, as attnzoo has written it: %s", str(folder), _first_of(found))
    links = sorted(path for path in paths if path.name[0] != "." and path.is_symlink() and not path.is_file())
    if links:
        found = [repr(str(path.relative_to(folder))) for path in links]
        text = "left out of the texts in %r, as links to folders or to nothing are not followed: %s"
        logger.warning(text, str(folder), _first_of(found))
    return [file for file in files if file not in written]


def _first_of(found: list[str]) -> str:
    return ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")


def _walked(folder: Path) -> tuple[list[Path], dict[Path, str]]:
    """What lies in ``folder`` at any depth, and the folders among it that attnzoo has written, each with its kind.

    Raises:
        OSError: a folder cannot be read, which is neither hidden nor in one of the latter; the error has its name.
    """

    def counts(place: Path) -> bool:
        hidden = any(part.startswith(".") for part in place.relative_to(folder).parts)
        return not hidden and own.keys().isdisjoint(place.parents)

    def refuse(error: OSError) -> None:
        if counts(Path(error.filename)):
            raise type(error)(error.errno, "this folder of the data cannot be read", error.filename) from error

    paths, own = list[Path](), dict[Path, str]()
    for place, inside, files in os.walk(folder, onerror=refuse):
        at = Path(place)
        paths += [at / name for name in (*inside, *files)]
        if at != folder and counts(at) and (kind := kind_of_folder(at, {*inside, *files})):
            own[at] = kind
    return paths, own


def _hash(name: str) -> float:
    """A hash of a name in [0, 1), the same on every machine."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "big") / 2**48
