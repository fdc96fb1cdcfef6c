"""Inputs and outputs of Wall's ops, each declared once."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from attnzoo.kernels.common.options import OpOptions
from attnzoo.kernels.common.rows import Attended

Some = Tensor | None


class WallOperands(NamedTuple):
    """Operands: q and log_diag [B, T, H, K], k [B, T, G, K], v [B, T, G, V], log_decay [B, T, H], sink [H]."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_diag: Tensor
    log_decay: Some
    sink: Some
    options: OpOptions


class WallForward(NamedTuple):
    """Inputs of the forward op.

    Args:
        needs_grad: whether gradients will be asked for that depend on what the rounding of o drops: all but v's.
    """

    given: WallOperands
    needs_grad: bool
    deterministic: bool
    return_lse: bool


class WallWanted(NamedTuple):
    """Which gradients a backward pass is asked for."""

    q: bool
    k: bool
    v: bool
    log_diag: bool
    log_decay: bool
    sink: bool


class WallBackward(NamedTuple):
    """Inputs of the backward op, do [B, T, H, V] and dlse [B, T, H] or None among them."""

    do: Tensor
    dlse: Some
    given: WallOperands
    made: Attended
    deterministic: bool
    unrounded: bool
    wanted: WallWanted


class WallGradients(NamedTuple):
    """Gradients that the backward op gives, contiguous; None where they are not wanted."""

    q: Some
    k: Some
    v: Some
    log_diag: Some
    log_decay: Some
    sink: Some
