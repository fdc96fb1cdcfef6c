"""Digests of a checkpoint's files, by which damage is found before a run continues from it, and of a variant's file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from attnzoo.files import digest, parse_json, write_whole

DIGESTS = "digests.json"
WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.bin"
PARTS, OPTIMIZER_PARTS = "model", "optimizer"  # the folders of a sharded checkpoint
MODEL = (WEIGHTS, PARTS, "progress.json", "config.yaml")  # the files that determine a model and its description


def digest_of_own(attention: Any) -> str:
    """A digest of the Python files that registered the variants among `model.attention`; empty where none did."""
    from attnzoo.registry import digest_of

    entries = attention if isinstance(attention, list | tuple) else [attention]
    names = [entry.get("name") if isinstance(entry, Mapping) else entry for entry in entries]
    found = sorted({digest_of(name) for name in names if isinstance(name, str)} - {""})
    return hashlib.sha256("".join(found).encode()).hexdigest() if found else ""


def write_digests(checkpoint: Path) -> None:
    """Write the size and the digest of every file that a checkpoint holds so far."""
    found = {
        path.relative_to(checkpoint).as_posix(): {"bytes": path.stat().st_size, "sha256": digest(path)}
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file()
    }
    write_whole(checkpoint / DIGESTS, json.dumps(found, indent=1) + "\n")


def read_digests(checkpoint: Path) -> dict[str, tuple[int, str]] | None:
    """The size and digest of each file by name; None for a checkpoint of an earlier version without digests.

    Raises:
        ValueError: the file is not what was written.
    """
    path = checkpoint / DIGESTS
    if not path.exists():
        return None
    try:
        rows = parse_json(path.read_bytes())
        found = {name: (int(row["bytes"]), str(row["sha256"])) for name, row in rows.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not weights_in(found):
        raise ValueError(f"{path} is damaged: {WEIGHTS} is not in it")
    return found


def weights_in(digests: Mapping[str, tuple[int, str]]) -> list[str]:
    """The digests of the files that hold the weights."""
    return [sha for name, (_, sha) in digests.items() if name.partition("/")[0] in (WEIGHTS, PARTS)]


def damage(checkpoint: Path, names: Collection[str] = ()) -> str | None:
    """A description of the damage to a checkpoint's files, which names the file; None where none is found.

    Args:
        checkpoint: the checkpoint's folder.
        names: names of files and folders to read; without any, all are read.
    """
    try:
        digests = read_digests(checkpoint)
    except ValueError as error:
        return str(error)
    if digests is None:
        for path in (checkpoint / WEIGHTS, checkpoint / OPTIMIZER):
            if not path.is_file():
                return f"{path} is missing"
            if not path.stat().st_size:
                return f"{path} is empty"
        return None
    for name, (size, expected) in digests.items():
        path = checkpoint / name
        if names and name.partition("/")[0] not in names:
            continue
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != size:
            return f"{path} has {path.stat().st_size} bytes where {size} were written"
        if digest(path) != expected:
            return f"{path} is damaged: its content is not what was written"
    return None
