"""The public functions of retention: check a call, choose kernels or the dense reference, and call them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attnzoo.algebra.values import as_given
from attnzoo.kernels.common.argument_checks import check_tensors
from attnzoo.kernels.common.call_checks import Impl, check_attention, kernels_unavailable, pick_implementation
from attnzoo.kernels.common.calls import cast_for_autocast
from attnzoo.kernels.common.dense_reference import segment_starts
from attnzoo.kernels.common.device import device_unavailable
from attnzoo.kernels.common.launching import addressable, per_head
from attnzoo.kernels.common.options import AttentionOptions
from attnzoo.kernels.common.retention import Retention, check_retention
from attnzoo.kernels.common.rows import first_visible_without_gate
from attnzoo.kernels.retention.lesson import Lesson, check_lesson, key_divergence_reference


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


def key_divergence(
    q: Tensor, k: Tensor, v: Tensor, attended: tuple[Tensor, Tensor], retention: Retention, lesson: Lesson, *,
    log_decay: Tensor | None, impl: Impl = "auto", **named: Any,
) -> Tensor:  # fmt: skip
    """How far retention is from what later rows of attention need of each key, summed over the rows that see it.

    The rows that count are those ``retention.rule.remembers`` tokens or more after the key. The target is a constant:
    the gradient is that of the keys' numbers. Memory O(T) in the Triton implementation, O(T^2) in the reference.
    Deterministic.

    Args:
        q: [B, T, H, K], k: [B, T, heads, K], v: [B, T, heads, V], as in ``fox_attention``.
        attended: its output [B, T, H, V] and log-sum-exp [B, T, H] of these.
        retention: of G key heads, which divides the heads of k: its keys are [B, T, G, 1 or 2]. Of its rule, the
            temperature is that of the pool.
        lesson: how what later rows need becomes a target.
        log_decay: [B, T, H], [H] or None, of attention.
        impl: "triton", "reference", or "auto": Triton on CUDA tensors it supports.
        named: options as in ``fox_attention``. Sinks and pruning are in its log-sum-exp, and change nothing else.

    Returns:
        [B, T, G] in the dtype of the keys' numbers.

    Raises:
        TypeError, ValueError: a wrong argument, by name.
        RuntimeError: a gradient of a gradient of the kernels.
    """
    q, k, v, log_decay = cast_for_autocast(q, k, v, {"log_decay": log_decay})
    options, (o, lse) = AttentionOptions(**named), attended
    check_lesson(lesson)
    check_attention(q, k, v, log_decay, options)
    check_tensors({"q": q, "attended[0]": o, "attended[1]": lse}, needed=("attended[0]", "attended[1]"))
    (B, T, H, K), heads, V = q.shape, k.shape[2], v.shape[3]
    if k.shape[1] != T:
        raise ValueError(f"k: expected as many tokens as q (T={T}), got {tuple(k.shape)}")
    if o.shape != (B, T, H, V) or lse.shape != (B, T, H):
        got = f"{tuple(o.shape)} and {tuple(lse.shape)}"
        raise ValueError(f"attended: expected {(B, T, H, V)} and {(B, T, H)}, got {got}")
    G = retention.keys.shape[2] if isinstance(retention, Retention) and retention.keys.ndim == 4 else heads
    check_retention(retention, k[:, :, :G] if G and heads % G == 0 else k)
    if math.isinf(retention.rule.temperature):
        raise ValueError("retention.rule.temperature: expected a finite number, got inf")
    why = kernels_unavailable(q, v, multiple=8, most=256)
    if pick_implementation("key_divergence", impl, why) == "reference":
        with as_given(q):
            return key_divergence_reference(q, k, v, retention, lesson, o, lse, log_decay, options)
    from attnzoo.kernels.retention.distillation import Distillation, distillation_op

    gate = None if log_decay is None else per_head(log_decay.detach())
    q, k, v, o, lse = (x.detach() for x in (q, k, v, o, lse))
    keys, rule = addressable(retention.keys), retention.rule
    given = Distillation(addressable(q), addressable(k), v, o, lse, keys, gate, options.of_op(K), rule, lesson)
    return distillation_op(given).divergence


def triton_unavailable(keys: Tensor) -> str:
    """Why the Triton kernels cannot take these keys, or "" if they can."""
    return device_unavailable(keys) or ("" if keys.dtype == torch.float32 else f"expected float32, got {keys.dtype}")
