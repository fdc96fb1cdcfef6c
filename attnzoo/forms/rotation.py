"""Rotations before kernels that know none, by a kernel of their own where it can serve them."""

from __future__ import annotations

import torch
from torch import Tensor


def turn(
    angle: Tensor, q: Tensor, k: Tensor, w: Tensor | None = None, *, dtype: torch.dtype, whole: bool = False,
    state: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor] | None:  # fmt: skip
    """What ``attnzoo.kernels.rotation.rotate`` gives, or None where its kernels cannot run.

    Args:
        state: whether the last phase is kept, which must then need no gradient.
    """
    from attnzoo.kernels.rotation import rotate, triton_unavailable

    if q.shape[1] == 1 or (state and angle.requires_grad and torch.is_grad_enabled()):
        return None  # of one token there is too little to do
    if triton_unavailable(angle, q, k, w):
        return None
    return rotate(angle, q, k, w, dtype=dtype, whole=whole)
