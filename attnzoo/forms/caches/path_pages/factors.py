"""Products of the factors of groups of pages, which carry queries back from group to group."""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.forms.caches.pages.page_table import PAGE
from attnzoo.precision import wide_dtype


def open_group(
    B: int, G: int, K: int, dtype: torch.dtype, device: torch.device | str, group: int
) -> dict[str, Tensor]:  # fmt: skip
    """The fields of a :class:`CarriedPool` in which no group of ``group`` pages has begun."""
    return {
        "open_keys": torch.zeros(B, G, group * PAGE, K, dtype=wide_dtype(dtype), device=device),
        "open_factor": torch.eye(K, dtype=wide_dtype(dtype), device=device).repeat(B, G, 1, 1),
        "base": torch.zeros(B, dtype=torch.int32, device=device),
    }


def eye_like(x: Tensor) -> Tensor:
    """The identity ``[K, K]`` beside ``x [..., K, K]``."""
    return torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)


def later_factors(factor: Tensor) -> Tensor:
    """Products ``[..., n, K, K]`` that take rows from the end of the last group to that of each group.

    Args:
        factor: that of each group, which takes rows from its end to that of the group before, ``[..., n, K, K]``.
    """
    product = torch.cat([factor[..., 1:, :, :], eye_like(factor).expand_as(factor[..., :1, :, :])], -3)
    reach = 1
    while reach < product.shape[-3]:  # each is that over the next ``reach`` groups
        further = product[..., reach:, :, :] @ product[..., :-reach, :, :]
        product = torch.cat([further, product[..., -reach:, :, :]], -3)
        reach *= 2
    return product
