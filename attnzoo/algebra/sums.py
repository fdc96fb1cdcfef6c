"""Running sums that also work in PyTorch's deterministic mode, and powers of 2."""

from __future__ import annotations

import torch
from torch import Tensor


def power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n. Triton's own function takes microseconds per call."""
    return 1 << max(0, int(n) - 1).bit_length()  # int(n): under torch.jit.trace a size is a tensor


def running_sum(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """``x.cumsum(dim, dtype=dtype)``, also under ``torch.use_deterministic_algorithms(True)``.

    In that mode PyTorch refuses cumsum of floats on a GPU; :func:`sum_by_doubling` replaces it there. Otherwise a GPU
    sums along the last dim, as along another one a thread goes over a whole row by itself.
    """
    if not x.is_cuda:
        return x.cumsum(dim, dtype=dtype)
    if torch.are_deterministic_algorithms_enabled():
        return sum_by_doubling(x if dtype is None else x.to(dtype), dim)
    return x.movedim(dim, -1).cumsum(-1, dtype=dtype).movedim(-1, dim)


def sum_to_the_end(x: Tensor, dim: int) -> Tensor:
    """The reversed running sum: at each index the sum of the entries from that index to the end."""
    return running_sum(x.flip(dim), dim).flip(dim)


def sum_by_doubling(x: Tensor, dim: int) -> Tensor:
    """The running sum by about log2(n) additions of whole tensors (Hillis and Steele, 1986), in a fixed order."""
    n, step = x.shape[dim], 1
    while step < n:
        first, later = x.split([step, n - step], dim)
        x = torch.cat([first, later + x.narrow(dim, 0, n - step)], dim)
        step *= 2
    return x
