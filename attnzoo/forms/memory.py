"""What a cache may still take of the memory of its device."""

from __future__ import annotations

import torch
from torch import Tensor

GIB = 1024**3


def available(device: torch.device) -> int | None:
    """Bytes that can still be allocated; None where nobody knows."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    if device.type == "cpu":
        try:
            with open("/proc/meminfo") as lines:
                return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        except (OSError, StopIteration, ValueError):
            return None
    return None


def check_room(needed: int, device: torch.device, what: str) -> None:
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
