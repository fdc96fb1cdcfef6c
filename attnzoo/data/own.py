"""Files and folders that attnzoo has written, told by their content: no text to train on, and free to be replaced."""

from __future__ import annotations

import os
import re
from pathlib import Path

from attnzoo.data.shards import INDEX
from attnzoo.files import MARK, check_folder

# How they begin.
PAGE = b'<meta name="generator" content="attnzoo">'
RESULT = re.compile(rb'\{\n "(evaluation": .*\n "options|experiment": .*\n "size|machine": \{\n  "gpu)": ')
HEAD = 1000  # bytes looked at


def kind_of_folder(folder: Path, names: set[str]) -> str:
    """The kind of a folder that attnzoo has written, in words; "" for any other.

    Args:
        folder: that is there.
        names: of what lies in it.
    """
    if "config.yaml" in names and not names.isdisjoint({".lock", "checkpoints"}):
        return "a run"
    if {INDEX, "train-00000.bin"} <= names:
        return "tokens"
    if {"config.json", "model.safetensors"} <= names and b'"attnzoo"' in (folder / "config.json").read_bytes():
        return "a model"
    return ""


def kind_of_file(file: Path) -> str:
    """The kind of a file that attnzoo has written, in words; "" for any other. The result beside a table or picture
    names it."""
    if file.name == MARK:
        return "a mark"
    if file.suffix == ".html" and PAGE in _head(file):
        return "a page"
    if file.suffix in (".json", ".md", ".svg") and RESULT.match(_head(file.with_suffix(".json"))):
        return "a result"
    return ""


def check_replaceable(file: Path, name: str) -> None:
    """Refuse to write over what attnzoo has not written. An empty file holds nothing to lose.

    Args:
        file: to be written; it need not be there.
        name: of the setting or option.

    Raises:
        FileExistsError: a file of somebody else is there.
        ValueError: a folder, a device or the like is.
    """
    if os.path.lexists(file) and not file.is_file():
        raise ValueError(f"{name}: expected a file, got {'the folder ' if file.is_dir() else ''}{str(file)!r}")
    if file.is_file() and file.stat().st_size and not kind_of_file(file):
        raise FileExistsError(
            f"{name}: expected no {str(file)!r}, or one that attnzoo has written; this one is somebody else's and stays"
        )


def check_page(file: Path, name: str) -> None:
    """Refuse a file to which no page can be written.

    Raises:
        FileExistsError, ValueError: as :func:`check_replaceable`; or its name does not end in .html.
        OSError: as :func:`attnzoo.files.check_folder`, for its folder.
    """
    check_folder(file.parent, name)
    check_replaceable(file, name)
    if file.suffix != ".html":
        raise ValueError(f"{name}: expected a name that ends in .html, as a page is all it writes, got {str(file)!r}")


def _head(file: Path) -> bytes:
    """The first bytes of a file; none where it does not exist."""
    if not file.is_file():
        return b""
    with open(file, "rb") as content:
        return content.read(HEAD)
