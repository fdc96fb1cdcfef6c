"""Random damage to files, from a seeded generator."""

from __future__ import annotations

import random
import shutil
from pathlib import Path


def damage(path: Path, rng: random.Random) -> str:
    """Damage one file in a random way, and say how."""
    content = bytearray(path.read_bytes())
    at = rng.randrange(len(content)) if content else 0
    kind = rng.choice(["flip", "flip", "cut", "empty", "remove", "append", "zeros", "noise", "folder", "twice"])
    if kind == "flip" and content:
        content[at] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del content[at:]
    elif kind == "empty":
        content.clear()
    elif kind == "append":
        content += rng.randbytes(rng.randrange(1, 30))
    elif kind == "zeros":
        content[at : at + 64] = bytes(len(content[at : at + 64]))
    elif kind == "noise":
        content[at : at + 16] = rng.randbytes(len(content[at : at + 16]))
    elif kind == "twice":
        content += bytes(content)
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind != "remove":
        path.write_bytes(content)
    return f"{kind} {path.name} at {at}"


def damage_folder(folder: Path, rng: random.Random) -> str:
    """Damage one or two things below a folder."""
    told = []
    for _ in range(rng.choice([1, 1, 2])):
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
        path = rng.choice(files)
        kind = rng.random()
        if kind < 0.1:
            other = rng.choice(files)
            mine, theirs = path.read_bytes(), other.read_bytes()
            path.write_bytes(theirs)
            other.write_bytes(mine)
            told.append(f"exchanged {path.relative_to(folder)} and {other.relative_to(folder)}")
        elif kind < 0.15 and path.parent != folder:
            shutil.rmtree(path.parent)
            told.append(f"removed {path.parent.relative_to(folder)}")
        elif kind < 0.2 and path.parent.name.startswith("step-"):
            target = path.parent.with_name(f"step-{rng.randrange(10):08d}")
            if not target.exists():
                path.parent.rename(target)
                told.append(f"{path.parent.name} became {target.name}")
        else:
            told.append(f"{path.parent.name}: {damage(path, rng)}")
    return "; ".join(told)
