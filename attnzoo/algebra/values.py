"""When Python may look at the numbers in a tensor, when a gradient is recorded, and what runs without autocast."""

from __future__ import annotations

import contextlib
import os

import torch
from torch import Tensor
from torch._C import _functorch
from torch.nn import Parameter

SETTINGS = ("", "0", "1")  # of ATTNZOO_VALIDATE
OPAQUE = "torch.func (grad, vmap, jvp) cannot see through a kernel: expected plain autograd, or impl='reference'"


def reads_values(x: Tensor) -> bool:
    """Whether the values of ``x`` and what comes with it are checked.

    On a CPU they are, on a GPU only with ``ATTNZOO_VALIDATE=1``, since Python has to wait for them;
    ``ATTNZOO_VALIDATE=0`` switches the checks off on both. Never where there are no numbers (:func:`has_values`).

    Raises:
        ValueError: another value of ``ATTNZOO_VALIDATE``.
    """
    if not has_values(x):
        return False
    setting = os.environ.get("ATTNZOO_VALIDATE", "")
    if setting not in SETTINGS:
        raise ValueError(f"ATTNZOO_VALIDATE: expected 0 (never), 1 (always) or unset (on a CPU), got {setting!r}")
    return setting != "0" and (x.is_cpu or setting == "1")


def readable(x: Tensor) -> bool:
    """Whether values may be looked at to save work: on a GPU they would have to be waited for."""
    return x.is_cpu and has_values(x)


def has_values(x: Tensor) -> bool:
    """Whether ``x`` holds numbers: no tensor that is traced, of a shape alone (meta, fake), or many at once (vmap)."""
    if torch.compiler.is_compiling() or x.is_meta:
        return False
    plain = type(x) is Tensor or type(x) is Parameter  # a subclass may hold anything
    return plain and not in_transform("Vmap")


def records(*tensors: Tensor | None) -> bool:
    """Whether a gradient is expected of any of them."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def in_transform(kind: str = "") -> bool:
    """Whether a transform of ``torch.func`` runs; some of them cannot do all that plain autograd can.

    Args:
        kind: asks for one alone, by its name in ``torch._C._functorch.TransformType``.
    """
    if torch.compiler.is_compiling() or _functorch.peek_interpreter_stack() is None:
        return False
    levels = _functorch.get_interpreter_stack() if kind else []
    return not kind or any(level.key() == getattr(_functorch.TransformType, kind) for level in levels)


def as_given(q: Tensor) -> contextlib.AbstractContextManager[object]:
    """A context without autocast on q's device: gates and states stay in float32. It costs nothing without autocast."""
    on = not q.is_meta and torch.is_autocast_enabled(q.device.type)
    return torch.autocast(q.device.type, enabled=False) if on else contextlib.nullcontext()
