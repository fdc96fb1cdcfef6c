"""The memory of a device that a cache may still take."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

GIB = 1024**3


def available(device: torch.device) -> int | None:
    """Bytes that can still be allocated; None where nobody knows."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    if device.type == "cpu":
        found = [left for left in (_of_machine(), _of_container()) if left is not None]
        return min(found, default=None)
    return None


def _of_machine() -> int | None:
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None


def _of_container(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that a limit of Linux's control groups (version 2) leaves; file caches that it may drop count as free."""
    try:
        limit, used = (int((folder / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):  # without a limit it is the word "max"
        return None


def check_memory(needed: int, device: torch.device, what: str) -> None:
    """Refuse what would fill the memory, before it does.

    Args:
        needed: bytes that are about to be allocated.
        device: where.
        what: names what they are for.

    Raises:
        MemoryError: there are fewer.
    """
    there = None if torch.compiler.is_compiling() else available(device)
    if there is not None and needed > there:
        raise MemoryError(f"{what}: expected room for {needed / GIB:.2f} GiB on {device}, got {there / GIB:.2f} GiB")


def size_of(x: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return x.numel() * x.element_size()
