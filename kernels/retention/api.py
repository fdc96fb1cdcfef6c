"""The public function of retention: check a call, choose kernels or the dense reference, and call them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnzoo.kernels.common.call_checks import Impl, pick_implementation
from attnzoo.kernels.common.dense_reference import segment_starts
from attnzoo.kernels.common.device import device_unavailable
from attnzoo.kernels.common.launching import addressable
from attnzoo.kernels.common.retention import Retention, check_retention
from attnzoo.kernels.common.rows import first_visible_without_gate


def held_keys(
    retention: Retention, *, window: int | None = None, cu_seqlens: Tensor | None = None, impl: Impl = "auto"
) -> Tensor:
    """The expected number of keys that each row still holds.

        n_i = sum_{j <= i} sigma(temperature (r_j(i - j) - threshold))

    Memory O(T) in the Triton implementation, O(T^2) in the reference. Differentiable, deterministic.

    Args:
        retention: of keys [B, T, G, 1 or 2], float32 (float64: reference).
        window: rows see themselves and the window - 1 keys before them; None for all.
        cu_seqlens: [N+1] borders of packed sequences; B is 1.
        impl: "triton", "reference", or "auto": Triton on CUDA tensors.

    Returns:
        [B, T, G] in the dtype of the keys.

    Raises:
        TypeError, ValueError: a wrong argument, by name.
    """
    keys, rule = retention
    check_retention(retention, keys)
    if math.isinf(rule.temperature):
        raise ValueError("retention.rule.temperature: expected a finite number, got inf")
    T = keys.shape[1]
    doc = segment_starts(cu_seqlens, T)
    first = first_visible_without_gate(doc, window or 0, T, keys.device)
    if pick_implementation("held_keys", impl, triton_unavailable(keys)) == "reference":
        j = torch.arange(T, device=keys.device)
        age = j[:, None] - j
        seen = age >= 0 if first is None else (age >= 0) & (j >= first.view(T, 1))
        return retention.held(age).masked_fill(~seen, 0.0).sum(-1).transpose(1, 2)
    from attnzoo.kernels.retention.op import HeldForward, held_forward_op

    stop = None
    if first is not None:  # the first row that does not see each key
        stop = torch.searchsorted(first.view(T), torch.arange(T, device=keys.device), right=True).int()
        first = first.view(T).contiguous()
    return held_forward_op(HeldForward(addressable(keys), rule, first, stop)).held


def triton_unavailable(keys: Tensor) -> str:
    """Why the Triton kernels cannot take these keys, or "" if they can."""
    return device_unavailable(keys) or ("" if keys.dtype == torch.float32 else f"expected float32, got {keys.dtype}")
