"""Keys and values in 8 bits: e4m3 numbers, times a power of two for each token and head. No Triton here.

A vector x whose largest entry is in ``[2^p, 2^(p + 1))`` is ``2^e y`` with ``e = p - 7``, so that the entries of y are
below 256, and each is rounded to the nearest of e4m3, the even one of two (``float8_e4m3fn``; 448 is the largest).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnzoo.kernels.decode.state import KeyPages

E4M3 = torch.float8_e4m3fn
LOWEST, HIGHEST = -120, 120  # exponents


def rounding(channels: int) -> float:
    """A bound of ``|x' - x| / |x|`` for vectors of so many channels that are stored as x'; |x| at least 2^-113.

    Entries of y from 2^-6 on are rounded by at most 2^-4 of themselves, smaller ones by at most 2^-10, which is 2^-17
    of the largest; 2^-23 is for keys that were rounded to float32 before.
    """
    return 2**-4 + math.sqrt(channels) * 2**-17 + 2**-23


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """The bits ``[..., D]`` uint8 and the exponents ``[...]`` int8 of vectors ``x [..., D]``."""
    x = x.float()
    largest = x.abs().amax(-1, keepdim=True)
    exponent = ((largest.view(torch.int32) >> 23) - 134).clamp(LOWEST, HIGHEST)
    bits = (x * _power(-exponent)).to(E4M3).view(torch.uint8)
    return bits, exponent[..., 0].to(torch.int8)


def restored(bits: Tensor, exponents: Tensor) -> Tensor:
    """The vectors ``[..., D]`` float32 that :func:`quantised` has stored."""
    return bits.view(E4M3).float() * _power(exponents[..., None].int())


def longer(channels: int) -> float:
    """The factor by which a vector of so many channels may become longer."""
    return 1 + rounding(channels)


def written(pages: KeyPages, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and values of the pages ``ids``, ``[..., PAGE, dim]``, as numbers."""
    keys, values = pages.keys[ids], pages.values[ids]
    if pages.exponents is None:
        return keys, values
    exponents = pages.exponents[ids]
    return restored(keys, exponents[..., 0]), restored(values, exponents[..., 1])


def write(pages: KeyPages, to: tuple[Tensor, Tensor], k: Tensor, v: Tensor) -> Tensor:
    """The keys ``k [n, K]`` as they stand in their pages, to whose entries ``to`` they and their values were written.

    Args:
        to: page and place in it of each, ``[n]``.
    """
    keys, values, _, exponents = pages
    if exponents is None:
        keys[to], values[to] = k.to(keys.dtype), v.to(values.dtype)
        return keys[to]
    (keys[to], of_keys), (values[to], of_values) = quantised(k), quantised(v)
    exponents[to] = torch.stack([of_keys, of_values], -1)
    return restored(keys[to], of_keys)


def _power(exponent: Tensor) -> Tensor:
    """2 to an int32, exactly."""
    return (exponent + 127 << 23).view(torch.float32)
