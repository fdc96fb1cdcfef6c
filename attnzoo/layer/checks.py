"""What an attention layer is given, checked: hidden states and masks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attnzoo.algebra.values import reads_values


def check_hidden(x: Tensor, hidden_size: int, projection: nn.Module) -> None:
    """``x`` is ``[B, T, D]`` with a token, as the layer's ``projection`` can take it.

    Raises:
        TypeError, ValueError: another shape, dtype or device.
    """
    if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[2] != hidden_size:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"x: expected [B, T, D = {hidden_size}], got {got}")
    if x.shape[1] == 0:
        raise ValueError(f"x: expected at least one token, got shape {tuple(x.shape)}")
    if type(projection) is not nn.Linear:
        return  # quantised or sharded: its own weight says nothing
    weight = projection.weight
    if (x.dtype == weight.dtype and x.device == weight.device) or hasattr(projection, "_hf_hook"):
        return  # with accelerate's hook, weights are brought here when they are used
    if x.device != weight.device:
        raise ValueError(f"x: expected the device of the layer, {weight.device}, got {x.device}")
    if x.is_meta or not x.is_floating_point() or not torch.is_autocast_enabled(x.device.type):
        raise TypeError(f"x: expected the dtype of the layer, {weight.dtype} (or autocast), got {x.dtype}")


def valid_tokens(mask: Tensor | None, x: Tensor, cached: int) -> Tensor | None:
    """Which of the rows ``x [B, T, D]`` are tokens, ``[B, T]`` bool; None where all are.

    Args:
        mask: ``[B, T]``, or ``[B, S + T]`` with the S = ``cached`` tokens before; None for no padding.

    Raises:
        TypeError, ValueError: another shape, dtype or device, or other values than 0 and 1.
    """
    if mask is None:
        return None
    B, T = x.shape[:2]
    if not isinstance(mask, Tensor):
        raise TypeError(f"attention_mask: expected a tensor, got {type(mask).__name__}")
    if tuple(mask.shape) not in ((B, T), (B, cached + T)):
        also = f" or [B, S + T] = {(B, cached + T)}" if cached else ""
        raise ValueError(f"attention_mask: expected [B, T] = {(B, T)}{also}, got {tuple(mask.shape)}")
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(f"attention_mask: expected bool or integers (0 at padding), got {mask.dtype}")
    if mask.device != x.device:
        raise ValueError(f"attention_mask: expected the device of x, {x.device}, got {mask.device}")
    valid = mask[:, mask.shape[1] - T :]
    if not reads_values(mask):
        return valid.bool()
    if valid.dtype != torch.bool and bool(((valid != 0) & (valid != 1)).any()):
        raise ValueError(f"attention_mask: expected 1 for tokens and 0 for padding, got {valid.unique().tolist()}")
    valid = valid.bool()
    return None if bool(valid.all()) else valid
