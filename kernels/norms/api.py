"""The norms as a function of tensors. No Triton here before it runs."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from attnzoo.algebra.validation import check_flag
from attnzoo.errors import unknown
from attnzoo.kernels.common.argument_checks import check_shapes, check_tensors
from attnzoo.kernels.common.call_checks import KERNEL_DTYPES, kernels_unavailable
from attnzoo.kernels.norms.parts import Gated, Skip

MOST_CHANNELS = 16384  # that are normed together: a program holds them
Kind = Literal["rms", "group", "l2"]


def head_norm(
    x: Tensor, weight: Tensor | None = None, *, kind: Kind = "rms", eps: float = 1e-6, groups: int | None = None,
    gate: Gated | None = None, skip: Skip | None = None,
) -> Tensor:  # fmt: skip
    """x normed over each head's channels, times its weight and its gate.

    One launch, and the gradients in one more with its sums. All is computed in float32 and rounded once; nothing is
    kept for the backward but the inputs. The gradients of weight and skip are added up in a fixed order.

    Args:
        x: [B, T, H, V] bfloat16, float16 or float32.
        weight: [H, V], or [V] for all heads; None for 1.
        kind: ``rms``: by the root mean square; ``group``: the mean taken away first; ``l2``: by the length.
        eps: added to the mean square, or for ``l2`` to the square of the length.
        groups: norm H / groups heads together; None for each by itself.
        gate: a factor before or after.
        skip: what is added to x first.

    Returns:
        [B, T, H, V] in the dtype of x.

    Raises:
        ValueError: a shape, dtype, device or option is wrong, or the kernels cannot run here.
        TypeError: something that is no tensor.
        RuntimeError: a gradient of a gradient, which the kernels do not have.
    """
    _check(x, weight, kind, groups, gate, skip)
    why = triton_unavailable(x, groups)
    if why:
        raise ValueError(f"x: {why}")
    from .op import NormInputs, forward_op

    return forward_op(NormInputs(x, weight, gate, skip, kind, float(eps), groups or x.shape[2])).y


def unit_vectors(q: Tensor, k: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """:func:`head_norm` of queries and keys by their length, as one op.

    Args:
        q, k: [B, T, H, K] each, H and K may differ; bfloat16, float16 or float32.
        eps: added to the square of the length.

    Raises:
        ValueError: a shape, dtype or device is wrong, or the kernels cannot run here.
        TypeError: something that is no tensor.
        RuntimeError: a gradient of a gradient, which the kernels do not have.
    """
    rows = {"q": q, "k": k}
    check_tensors(rows, needed=("q", "k"))
    for name, x in rows.items():
        if x.ndim != 4 or 0 in x.shape:
            raise ValueError(f"{name}: expected [B, T, H, K], a token at least, got {tuple(x.shape)}")
        if x.device != q.device or x.dtype not in KERNEL_DTYPES:
            got = f"{x.dtype} on {x.device}"
            raise ValueError(f"{name}: expected bfloat16, float16 or float32 on {q.device}, got {got}")
        why = triton_unavailable(x)
        if why:
            raise ValueError(f"{name}: {why}")
    from .op import UnitInputs, units_op

    made = units_op(UnitInputs(q, k, float(eps)))
    return made.q, made.k


def triton_unavailable(x: Tensor, groups: int | None = None) -> str:
    """Why the kernels cannot take x, or ""."""
    channels = x.shape[-1] if groups is None else x.shape[2] // groups * x.shape[3]
    if channels > MOST_CHANNELS:
        return f"expected at most {MOST_CHANNELS} channels to be normed together, got {channels}"
    return kernels_unavailable(x, x, multiple=1, most=MOST_CHANNELS)


def _check(
    x: Tensor, weight: Tensor | None, kind: str, groups: int | None, gate: Gated | None, skip: Skip | None
) -> None:
    given = {
        "x": x, "weight": weight, "gate.logits": None if gate is None else gate.logits,
        "skip.v": None if skip is None else skip.v, "skip.scale": None if skip is None else skip.scale,
    }  # fmt: skip
    check_tensors(given, needed=("x",))
    if kind not in get_args(Kind):
        raise unknown("kind", kind, get_args(Kind))
    if x.ndim != 4 or 0 in x.shape:
        raise ValueError(f"x: expected [B, T, H, V], a token at least, got {tuple(x.shape)}")
    B, T, H, V = x.shape
    if groups is not None and (groups < 1 or H % groups):
        raise ValueError(f"groups: expected a divisor of H={H}, or None, got {groups}")
    G = skip.v.shape[2] if skip is not None and skip.v.ndim == 4 else H
    if not G or H % G:
        raise ValueError(f"skip.v: expected a number of heads that divides H={H}, got {G}")
    if gate is not None:
        check_flag("gate.swish", gate.swish)
        check_flag("gate.first", gate.first)
    shapes: dict[str, tuple[int, ...]] = {
        "x": (B, T, H, V), "weight": (V,) if weight is not None and weight.ndim == 1 else (H, V),
        "gate.logits": (B, T, H * V), "skip.v": (B, T, G, V), "skip.scale": (H,),
    }  # fmt: skip
    wanted: dict[str, tuple[Tensor | None, tuple[int, ...], torch.dtype | None]] = {
        name: (given[name], shape, None) for name, shape in shapes.items()
    }
    check_shapes(wanted, strided=tuple(wanted))
    for name, one in given.items():
        if one is not None and (one.device != x.device or one.dtype not in KERNEL_DTYPES):
            got = f"{one.dtype} on {one.device}"
            raise ValueError(f"{name}: expected bfloat16, float16 or float32 on {x.device}, got {got}")
