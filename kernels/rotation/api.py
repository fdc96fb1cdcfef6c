"""The rotation before a kernel that knows none, as a function of tensors. No Triton here before it runs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.algebra.values import counted
from attnzoo.kernels.common.argument_checks import check_tensors
from attnzoo.kernels.common.call_checks import KERNEL_DTYPES, kernels_unavailable

MOST_CHANNELS = 256


class Turned(NamedTuple):
    """Outputs of :func:`rotate`; w is None without one, and so are the receivers where none were asked for."""

    q: Tensor
    k: Tensor
    w: Tensor | None
    phase: Tensor
    receivers: tuple[Tensor, ...] | None


def rotate(
    angle: Tensor, q: Tensor, k: Tensor, w: Tensor | None = None, *, dtype: torch.dtype, received: bool = False,
    balanced: bool = False,
) -> Turned:  # fmt: skip
    """Turn the pairs of channels (2i, 2i+1) of each token by its phase, the sum of the angles up to and with its own.

    Phases are added up in float64 and reduced to less than an eighth of a turn before they are rounded: a late token
    turns as exactly as an early one. The gradient of an angle is a sum over all later tokens in which what is right
    cancels and rounding does not. So it is taken of the rounded vectors, whose scores see differences of phases alone,
    and added up in float64. All is deterministic.

    Args:
        angle: [B or 1, T, 1 or H, K/2] radians; or [K/2], of every token, without a gradient.
        q, k, w: [B, T, heads, K] with H heads, or where the angles are those of all heads with any number of them;
            bfloat16, float16 or float32, K even up to 256.
        dtype: of the q and k that come out; w comes out in float32.
        received: the gradients come unrounded, to receivers; what has turned has none.
        balanced: for gradients with roundings inside. Turned together the vectors give the same scores, so the angles'
            gradient is 0 for all tokens together: what rounding made of the 0 goes from each token's part by its share
            of the variance.

    Returns:
        q, k, w, the phase of the last token [B or 1, 1, 1 or H, K/2] float64 without a gradient, and the receivers of
        q, k and w, float32 in their shapes, which are 0.

    Raises:
        ValueError: a shape, dtype or device is wrong, or the kernels cannot run here.
        TypeError: something that is no tensor.
        RuntimeError: a gradient of a gradient, which the kernels do not have.
    """
    _check(angle, q, k, w, dtype)
    why = triton_unavailable(angle, q, k, w)
    if why:
        raise ValueError(f"q, k, w, angle: {why}")
    from .op import rotate_vectors

    return Turned(*rotate_vectors(angle, q, k, w, dtype, received, balanced))


def triton_unavailable(angle: Tensor, q: Tensor, k: Tensor, w: Tensor | None = None) -> str:
    """Why the kernels cannot take these tensors, or ""."""
    why = kernels_unavailable(q, q, multiple=2, most=MOST_CHANNELS)
    if why:
        return why
    for name, x in (("k", k), ("w", w)):
        if x is not None and x.dtype not in KERNEL_DTYPES:
            return f"expected {name} in bfloat16, float16 or float32, got {x.dtype}"
    if w is not None and w.ndim != 4:
        return f"expected one vector w for each token and head, [B, T, heads, K]{counted(w.shape)}"
    if angle.ndim == 1 and angle.requires_grad and torch.is_grad_enabled():
        return "angles [K/2] of every token have no gradient in the kernels"
    return ""


def _check(angle: Tensor, q: Tensor, k: Tensor, w: Tensor | None, dtype: torch.dtype) -> None:
    check_tensors({"q": q, "k": k, "w": w, "angle": angle}, needed=("q", "k", "angle"))
    if q.ndim != 4 or 0 in q.shape:
        raise ValueError(f"q: expected [B, T, heads, K], a token at least, got {tuple(q.shape)}")
    B, T, _, K = q.shape
    vectors = {"q": q, "k": k} if w is None else {"q": q, "k": k, "w": w}
    for name, x in vectors.items():
        if x.ndim != 4 or x.shape[:2] != (B, T) or x.shape[3] != K or 0 in x.shape:
            raise ValueError(f"{name}: expected [B={B}, T={T}, heads, K={K}] as in q, got {tuple(x.shape)}")
    if K % 2:
        raise ValueError(f"q: expected an even K, got {K}")
    if dtype not in KERNEL_DTYPES:
        raise ValueError(f"dtype: expected bfloat16, float16 or float32, got {dtype}")
    if not angle.is_floating_point():
        raise ValueError(f"angle: expected a floating dtype, got {angle.dtype}")
    if angle.shape == (K // 2,):
        return
    if angle.ndim != 4 or angle.shape[0] not in (1, B) or angle.shape[1] != T or angle.shape[3] != K // 2:
        raise ValueError(
            f"angle: expected [B={B} or 1, T={T}, 1 or heads, K/2={K // 2}] or [{K // 2}], got {tuple(angle.shape)}"
        )
    if angle.shape[2] != 1:
        for name, x in vectors.items():
            if x.shape[2] != angle.shape[2]:
                raise ValueError(f"{name}: expected {angle.shape[2]} heads, as angle has, got {x.shape[2]}")
