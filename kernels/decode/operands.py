"""Inputs and outputs of the ops of steps over pages, each declared once."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from attnzoo.kernels.common.options import OpOptions
from attnzoo.kernels.decode.state import PagedState

Some = Tensor | None


class PagedInference(NamedTuple):
    """Inputs of attention over pages, as ``paged_attention`` takes them; rows q [B, T, H, K]."""

    q: Tensor
    state: PagedState
    first_visible: Some
    log_decay: Some
    sink: Some
    options: OpOptions


class PagedOutput(NamedTuple):
    """Output of attention over pages, [B, T, H, V]."""

    o: Tensor


class PageWrite(NamedTuple):
    """Inputs of an append, as ``paged_append`` takes them; ``counts`` is its count."""

    k: Tensor
    v: Tensor
    log_decay: Some
    counts: Some
    state: PagedState


class PagesWritten(NamedTuple):
    """The first key that each new row may see, [B, H, T] int32; None without gates."""

    first_visible: Some
