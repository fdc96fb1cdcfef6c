"""Rotations of q, k and w by the rotation kernel, where it can serve them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from attnzoo.kernels.rotation import Turned


def turn(
    angle: Tensor, q: Tensor, k: Tensor, w: Tensor | None = None, *, dtype: torch.dtype, received: bool = False,
    balanced: bool = False,
) -> Turned | None:  # fmt: skip
    """The rotated vectors of ``attnzoo.kernels.rotation.rotate``, or None where its kernels cannot run."""
    from attnzoo.kernels.rotation import rotate, triton_unavailable

    if triton_unavailable(angle, q, k, w):
        return None
    return rotate(angle, q, k, w, dtype=dtype, received=received, balanced=balanced)


def turn_for_cache(
    angle: Tensor, q: Tensor, k: Tensor, w: Tensor | None = None, *, dtype: torch.dtype
) -> Turned | None:  # fmt: skip
    """The rotated vectors with the last phase for a cache; None where the phase has a gradient, and for one token."""
    if q.shape[1] == 1 or (angle.requires_grad and torch.is_grad_enabled()):
        return None
    return turn(angle, q, k, w, dtype=dtype)
