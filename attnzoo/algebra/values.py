"""Tests whether tensor values may be read and whether a gradient is recorded, and a context without autocast."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad
from torch.nn import Parameter

SETTINGS = ("", "0", "1")  # of ATTNZOO_VALIDATE
_unchecked = ContextVar("unchecked", default=False)
OPAQUE = "torch.func (grad, vmap, jvp) cannot see through a kernel: expected plain autograd, or impl='reference'"


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """A context, or decorator, in which values are not checked on a CPU either: those of a model that looks for numbers
    that are none in its logits, sequence by sequence."""
    before = _unchecked.set(True)
    try:
        yield
    finally:
        _unchecked.reset(before)


def reads_values(x: Tensor) -> bool:
    """Whether the values of a call with input ``x`` are checked.

    On a CPU values are checked, but not within :func:`unchecked`; with ``ATTNZOO_VALIDATE=1`` everywhere, though Python
    has to wait for a GPU. ``ATTNZOO_VALIDATE=0`` switches the checks off everywhere. Tensors without values
    (:func:`has_values`) are never checked.

    Raises:
        ValueError: another value of ``ATTNZOO_VALIDATE``.
    """
    if not has_values(x):
        return False
    setting = os.environ.get("ATTNZOO_VALIDATE", "")
    if setting not in SETTINGS:
        raise ValueError(f"ATTNZOO_VALIDATE: expected 0 (never), 1 (always) or unset (on a CPU), got {setting!r}")
    return setting == "1" or (not setting and x.is_cpu and not _unchecked.get())


def readable(x: Tensor) -> bool:
    """Whether values may be read to save work: on a CPU, where reading them does not wait for a device."""
    return x.is_cpu and has_values(x)


def has_values(x: Tensor) -> bool:
    """Whether ``x`` holds one set of numbers: it is not traced, a meta or fake tensor, or batched by vmap."""
    if torch.compiler.is_compiling() or x.is_meta:
        return False
    plain = type(x) is Tensor or type(x) is Parameter  # a subclass may hold anything
    return plain and not in_transform("Vmap")


def counted(size: int | torch.Size) -> str:
    """``", got ..."`` with a number or a shape; "" where a call is compiled, as not every size is a number there."""
    if torch.compiler.is_compiling():
        return ""
    return f", got shape {tuple(size)}" if isinstance(size, torch.Size) else f", got {size}"


def records(*tensors: Tensor | None) -> bool:
    """Whether autograd records operations on any of the tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def in_transform(kind: str = "") -> bool:
    """Whether a transform of ``torch.func`` is active, or forward-mode differentiation without one.

    Args:
        kind: the name in ``torch._C._functorch.TransformType`` of the only transform to look for; None for any.
    """
    if torch.compiler.is_compiling():
        return False
    if kind in ("", "Jvp") and forward_ad._current_level >= 0:
        return True
    if _functorch.peek_interpreter_stack() is None:
        return False
    levels = _functorch.get_interpreter_stack() if kind else []
    return not kind or any(level.key() == getattr(_functorch.TransformType, kind) for level in levels)


def as_given(q: Tensor) -> contextlib.AbstractContextManager[object]:
    """A context without autocast on q's device: gates and states stay in float32. It costs nothing without autocast."""
    on = not q.is_meta and torch.is_autocast_enabled(q.device.type)
    return torch.autocast(q.device.type, enabled=False) if on else contextlib.nullcontext()
