"""The short convolution as a function of tensors. No Triton here before it runs."""

from __future__ import annotations

from torch import Tensor

from attnzoo.algebra.validation import check_flag, check_rising
from attnzoo.algebra.values import reads_values
from attnzoo.kernels.common.argument_checks import check_shapes, check_tensors
from attnzoo.kernels.common.call_checks import KERNEL_DTYPES, kernels_unavailable

MOST_TOKENS = 4  # of a window, which the kernels keep in registers
MOST_CHANNELS = 1 << 20


def causal_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, before: Tensor | None = None,
    cu_seqlens: Tensor | None = None, silu: bool = False,
) -> Tensor:  # fmt: skip
    """``y_t = act(bias + sum_i weight_i x_{t - n + 1 + i})`` for each channel by itself, over n tokens.

    One launch each way, and the sums of the weights' shares behind the backward. x is not copied: a slice of a wider
    projection is read where it lies. Sums are float32 and rounded once. The gradients of weight and bias are added up
    in a fixed order.

    Args:
        x: [B, T, X] bfloat16, float16 or float32.
        weight: [X, n], the latest token last.
        bias: [X], or None.
        before: [B, n - 1, X], the tokens before the first; None for zeros.
        cu_seqlens: borders [N + 1] int32 or int64 of documents packed into one row (B = 1): each begins with zeros.
        silu: whether a SiLU follows.

    Returns:
        [B, T, X] in the dtype of x.

    Raises:
        ValueError: a shape, dtype or device is wrong, or the kernels cannot run here.
        TypeError: something that is no tensor.
        RuntimeError: a gradient of a gradient, which the kernels do not have.
    """
    _check(x, weight, bias, before, cu_seqlens, silu)
    why = triton_unavailable(x, weight)
    if why:
        raise ValueError(f"x, weight: {why}")
    from .op import ConvolutionInputs, forward_op

    return forward_op(ConvolutionInputs(x, weight, bias, before, cu_seqlens, silu)).y


def triton_unavailable(x: Tensor, weight: Tensor) -> str:
    """Why the kernels cannot take these tensors, or ""."""
    if weight.dtype not in KERNEL_DTYPES:
        return f"expected a weight in bfloat16, float16 or float32, got {weight.dtype}"
    if weight.shape[1] > MOST_TOKENS:
        return f"expected windows of up to {MOST_TOKENS} tokens, got {weight.shape[1]}"
    return kernels_unavailable(x, x, multiple=1, most=MOST_CHANNELS)


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None, cu_seqlens: Tensor | None, silu: bool
) -> None:
    given = {"x": x, "weight": weight, "bias": bias, "before": before, "cu_seqlens": cu_seqlens}
    check_tensors(given, needed=("x", "weight"))
    check_flag("silu", silu)
    for name, one in given.items():
        if one is not None and one.device != x.device:
            raise ValueError(f"{name}: expected the device of x ({x.device}), got {one.device}")
    if x.ndim != 3 or 0 in x.shape:
        raise ValueError(f"x: expected [B, T, X], a token at least, got {tuple(x.shape)}")
    B, T, X = x.shape
    if weight.ndim != 2 or weight.shape[0] != X or weight.shape[1] == 0:
        raise ValueError(f"weight: expected [X={X}, n], a token at least, got {tuple(weight.shape)}")
    size = weight.shape[1]
    wanted = {"x": (x, (B, T, X), None), "bias": (bias, (X,), None), "before": (before, (B, size - 1, X), x.dtype)}
    check_shapes(wanted, strided=tuple(wanted))
    if cu_seqlens is None:
        return
    if before is not None:
        raise ValueError("before: expected None with cu_seqlens (each document begins with zeros), got a tensor")
    integers = not cu_seqlens.is_floating_point() and cu_seqlens.itemsize >= 4
    if B != 1 or cu_seqlens.ndim != 1 or len(cu_seqlens) < 2 or not integers:
        got = f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)} beside x {tuple(x.shape)}"
        raise ValueError(f"cu_seqlens: expected int32 or int64 borders [N+1] of one row, got {got}")
    if reads_values(x):
        check_rising(cu_seqlens, T)
