"""Running sums in whatever mode PyTorch is in, and how often a size doubles."""

from __future__ import annotations

import torch
from torch import Tensor


def power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n. Triton's own function of that kind takes microseconds a call."""
    return 1 << max(0, int(n) - 1).bit_length()  # torch.jit.trace makes tensors of sizes


def running_sum(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """``x.cumsum(dim, dtype=dtype)``, also under ``torch.use_deterministic_algorithms(True)``.

    There PyTorch refuses the sums of floating-point numbers on a GPU, whose order varies; these are made by doubling.
    """
    if x.is_cuda and torch.are_deterministic_algorithms_enabled():
        return sum_by_doubling(x if dtype is None else x.to(dtype), dim)
    return x.cumsum(dim, dtype=dtype)


def sum_to_the_end(x: Tensor, dim: int) -> Tensor:
    """The sum from each place on, its own number included."""
    return running_sum(x.flip(dim), dim).flip(dim)


def sum_by_doubling(x: Tensor, dim: int) -> Tensor:
    """The running sum by about log2(n) additions of whole tensors (Hillis and Steele, 1986), in a fixed order."""
    n, step = x.shape[dim], 1
    while step < n:
        first, later = x.split([step, n - step], dim)
        x = torch.cat([first, later + x.narrow(dim, 0, n - step)], dim)
        step *= 2
    return x
