"""Log decays of logits, and values times write strengths, as functions of tensors. No Triton here before it runs."""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.algebra.validation import check_flag
from attnzoo.kernels.common.argument_checks import check_shapes, check_tensors
from attnzoo.kernels.common.call_checks import kernels_unavailable
from attnzoo.kernels.linear.parts import DecayLogits

MOST_LOGITS = 1 << 20  # of a token
MOST_VALUES = 16384  # channels, which a program holds


def log_decays(of: DecayLogits, steps: bool = False) -> tuple[Tensor, Tensor | None]:
    """The log decays that ``of`` describes, of all tokens, in one launch; their gradients in one more and its sums.

    Args:
        of: its logits are [B, T, H], or [B, T, H K] for a decay per channel.
        steps: also the softplus that the decays are made of (``of.opposite``).

    Returns:
        [B, T, H] or [B, T, H K] float32, and the softplus in the same shape, or None.

    Raises:
        ValueError: a shape, dtype or device is wrong, or the kernels cannot run here.
        TypeError: something that is no tensor.
        RuntimeError: a gradient of a gradient, which the kernels do not have.
    """
    check_flag("steps", steps)
    check_tensors({"logits": of.logits, "bias": of.bias, "log_a": of.log_a}, needed=("logits",))
    if of.logits.ndim != 3 or 0 in of.logits.shape:
        raise ValueError(f"logits: expected [B, T, H] or [B, T, H K], a token at least, got {tuple(of.logits.shape)}")
    B, T, C = of.logits.shape
    H = C if of.log_a is None or of.log_a.ndim != 1 else len(of.log_a)
    if not H or C % H:
        raise ValueError(f"log_a: expected [H], with H a divisor of the {C} logits of a token, got H={H}")
    wanted: dict[str, tuple[Tensor | None, tuple[int, ...], torch.dtype | None]] = {
        "logits": (of.logits, (B, T, C), None), "bias": (of.bias, (C,), None), "log_a": (of.log_a, (H,), None),
    }  # fmt: skip
    check_shapes(wanted, strided=tuple(wanted))
    for name, (one, _, _) in wanted.items():
        if one is not None and (one.device != of.logits.device or one.dtype == torch.float64):
            raise ValueError(f"{name}: expected up to float32 on {of.logits.device}, got {one.dtype} on {one.device}")
    if steps and not of.opposite:
        raise ValueError("steps: expected False unless the decays are made of a softplus (opposite), got True")
    why = decays_unavailable(of.logits)
    if why:
        raise ValueError(f"logits: {why}")
    from .decaying import DecayInputs, forward_op

    made = forward_op(DecayInputs(of, steps))
    return made.decay, made.step


def written_values(v: Tensor, write: Tensor) -> Tensor:
    """``write_t v_t`` in the dtype of v: one launch, and one for both gradients.

    Args:
        v: [B, T, G, V], V up to 16384.
        write: [B, T, G].

    Raises:
        ValueError: a shape, dtype or device is wrong, or the kernels cannot run here.
        TypeError: something that is no tensor.
        RuntimeError: a gradient of a gradient, which the kernels do not have.
    """
    check_tensors({"v": v, "write": write}, needed=("v", "write"))
    if v.ndim != 4 or 0 in v.shape:
        raise ValueError(f"v: expected [B, T, G, V], a token at least, got {tuple(v.shape)}")
    check_shapes({"v": (v, v.shape, None), "write": (write, v.shape[:3], None)}, strided=("v", "write"))
    why = writing_unavailable(v)
    if why:
        raise ValueError(f"v: {why}")
    from .writing import WriteInputs, forward_op

    return forward_op(WriteInputs(v, write)).y


def writing_unavailable(v: Tensor) -> str:
    """Why the kernel cannot multiply v, or ""."""
    return kernels_unavailable(v, v, multiple=1, most=MOST_VALUES)


def decays_unavailable(logits: Tensor) -> str:
    """Why the kernels cannot take these logits, or ""."""
    return kernels_unavailable(logits, logits, multiple=1, most=MOST_LOGITS)
