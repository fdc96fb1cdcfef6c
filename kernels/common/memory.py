"""Memory of runs that are replayed: how it is taken, and which tensors share it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

SMALL = 1 << 23  # bytes of a tensor up to which it shares memory with others whenever it may
ALIGNED = 512  # bytes, as torch's allocator aligns


def allocator(device: torch.device) -> Callable[..., Tensor]:
    """Of a size, strides and dtype (size and strides tuples), new memory on a device that is the current one."""
    direct = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)  # as compiled code does
    return direct or partial(_empty_strided, device)


def _empty_strided(device: torch.device, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def occupied(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes that a tensor takes, with those up to the next one."""
    stop = dtype.itemsize * (1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)))
    return -(-stop // ALIGNED) * ALIGNED


def joined(may: Sequence[int], sizes: Mapping[int, int], events: Sequence[int]) -> list[int]:
    """Which tensors share memory that is held for all of a run: the small ones, and others as long as the run never
    holds more than it would with the small ones alone.

    Args:
        may: numbers of those that may.
        sizes: bytes of each tensor.
        events: in the run's order, the number of a tensor that begins, or -number of one that ends.
    """

    def most(together: set[int]) -> int:
        found = held = sum(sizes[number] for number in together)
        for event in events:
            if abs(event) not in together:
                held += sizes[event] if event > 0 else -sizes[-event]
                found = max(found, held)
        return found

    found = {number for number in may if sizes[number] <= SMALL}
    limit = most(found)
    for number in sorted(may, key=sizes.__getitem__):
        if most(found | {number}) <= limit:
            found.add(number)
    return [number for number in may if number in found]
