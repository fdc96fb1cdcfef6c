"""Checks of single arguments, which all public functions of the kernels share. No Triton here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from attnzoo.algebra import validation
from attnzoo.algebra.gate import GateParts
from attnzoo.algebra.parts import PARTS
from attnzoo.algebra.validation import check_dense
from attnzoo.algebra.values import reads_values
from attnzoo.kernels.common.options import AttentionOptions

MOST = 2**31 - 1  # positions are int32


def check_tensors(given: Mapping[str, object], needed: Sequence[str] = ()) -> None:
    """Raise unless each argument is a dense tensor on the device of ``q``, or None and not among ``needed``."""
    first = given.get("q")
    for name, x in given.items():
        if not isinstance(x, Tensor):
            if x is not None or name in needed:
                wanted = "a tensor" if name in needed else "a tensor or None"
                raise TypeError(f"{name}: expected {wanted}, got {type(x).__name__}")
        elif isinstance(first, Tensor) and x.device != first.device:
            raise ValueError(f"{name}: expected the device of q ({first.device}), got {x.device}")
        else:
            check_dense(name, x)


def check_numbers(options: AttentionOptions) -> None:
    """Options that are numbers: as for every form, and a window that is an int32."""
    window = options.window
    validation.check_scale(options.scale)
    validation.check_window(window)
    validation.check_scale(options.softcap, "softcap")
    if window is not None and window > MOST:
        raise ValueError(f"window: expected at most {MOST}, or None for all keys, got {window}")


def check_log_diag(q: Tensor, log_diag: Tensor) -> None:
    """A log gate for each channel of q [B, T, H, K]: shape and dtype."""
    if log_diag.shape != q.shape:
        B, T, H, K = q.shape
        raise ValueError(f"log_diag: expected [B={B}, T={T}, H={H}, K={K}] as q, got {tuple(log_diag.shape)}")
    check_log_dtype("log_diag", log_diag, q)


def check_log_dtype(name: str, log_gate: Tensor, q: Tensor) -> None:
    """A log gate beside q, of whatever shape."""
    if log_gate.dtype not in ((torch.float32,) if q.dtype != torch.float64 else (torch.float32, torch.float64)):
        why = "sums of 16-bit log gates are useless" if log_gate.itemsize < 4 else f"q has {q.dtype}"
        raise ValueError(f"{name}: expected float32 ({why}), got {log_gate.dtype}")


def check_values(
    q: Tensor, *, log_decay: Tensor | None = None, log_diag: Tensor | None = None, w: Tensor | None = None,
    beta: Tensor | None = None, sink: Tensor | None = None, logit_bound: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> None:  # fmt: skip
    """Values that no kernel can serve; read on a CPU, on a GPU only with ATTNZOO_VALIDATE=1, as it must wait for them.

    Args:
        q: [B, T, H, K], for its device and T.
    """
    if not reads_values(q):
        return
    with torch.no_grad():
        gate = GateParts(log_decay=log_decay, log_diag=log_diag, w=w, beta=beta)
        for name in gate.parts:
            wrong = PARTS[name].refuse(getattr(gate, name), gate)
            if wrong:
                raise ValueError(f"{name}: {wrong}")
        if sink is not None and not bool((sink < math.inf).all()):
            raise ValueError(f"sink: expected logits that are finite or -inf, got {sink.tolist()}")
        if logit_bound is not None and not bool((logit_bound >= 0).all()):
            raise ValueError(f"logit_bound: expected bounds >= 0 without NaN, got {logit_bound.tolist()}")
        if cu_seqlens is not None:
            validation.check_rising(cu_seqlens, q.shape[1])


def check_shapes(
    wanted: Mapping[str, tuple[Tensor | None, tuple[int, ...], torch.dtype | None]], strided: tuple[str, ...] = ()
) -> None:
    """Shapes and dtypes (None: any floating one); contiguous but for those that may be ``strided``."""
    for name, (x, shape, dtype) in wanted.items():
        if x is None:
            continue
        if x.shape != shape or (x.dtype != dtype if dtype is not None else not x.is_floating_point()):
            got = f"{x.dtype} {tuple(x.shape)}"
            raise ValueError(f"{name}: expected {dtype or 'a floating dtype'} {tuple(shape)}, got {got}")
        if name not in strided and not x.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got strides {x.stride()}")
