"""The public functions of FoX: check a call (``common/call_checks.py``), choose kernels or the reference, call them.

A call goes on from here to ``op.py``, which asks ``plan.py`` for its kernels and launches those of ``portable/`` or
``hopper/``.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from attnzoo.algebra.pruning import Prune
from attnzoo.algebra.validation import check_flag
from attnzoo.algebra.values import as_given, records
from attnzoo.kernels.common.call_checks import (
    Impl,
    check_attention,
    check_receivers,
    kernels_unavailable,
    pick_implementation,
    refuse_receivers,
    share_kept,
)
from attnzoo.kernels.common.calls import Layout, attention, cast_for_autocast, reference_share, returned, with_layout
from attnzoo.kernels.common.device import on_device_of
from attnzoo.kernels.common.launching import addressable, per_head
from attnzoo.kernels.common.options import AttentionOptions
from attnzoo.kernels.common.retention import Retention, check_retention
from attnzoo.kernels.common.running_gates import GateSums

from .operands import FoxForward, FoxInference, FoxOperands, KeptSums
from .reference import fox_reference_with_lse, prune_starts_reference


@attention
def fox_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None,
    scale: float | None = None,
    prune: Prune | None = None,
    window: int | None = None,
    sink: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    logit_bound: Tensor | None = None,
    softcap: float | None = None,
    valid: Tensor | None = None,
    gate_sums: GateSums | None = None,
    receivers: tuple[Tensor, ...] | None = None,
    retention: Retention | None = None,
    return_lse: bool = False,
    layout: Layout | None = None,
    impl: Impl = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal softmax attention with a forget gate (FoX); a constant gate is ALiBi, none is NoPE.

        o_i = sum_{j <= i} softmax_j(scale q_i . k_j + log_decay_{j+1} + ... + log_decay_i) v_j

    A log gate of -inf (anything <= -1e4) cuts off the past exactly. To neutralise padding on the left, close
    the gate of the first real token; padding on the right is never seen by real tokens.
    Mask with it, not with a large finite number: the Triton implementation knows a logit to 2^-24 of the sum of the log
    gates before it in its 128 rows (to 0.01 where they are -1000 each).

    Args:
        q: [B, T, H, K], the last T of S positions (T <= S: chunked prefill). bfloat16, float16 or float32; head dims
            are multiples of 8 up to 256 in the Triton implementation.
        k: [B, S, G, K], v: [B, S, G, V]; G divides H and head h reads key head h // (H / G).
        log_decay: natural log of the forget gate, float32, <= 0: [B, S, H] (FoX), [H] (ALiBi: minus the slope) or None.
            Differentiable, as are q, k, v and sink.
        scale: of the logits; default K ** -0.5.
        prune: skip blocks whose total weight is certified below ``prune.eps`` per row. Needs a gate. On a GPU from
            1536 keys on, and for 128 rows or more where B H T S K is at least 4e10 (16 texts of 2048 tokens, 12 heads
            of 64): below, what it leaves out takes less time than the search for it.
        window: each row sees itself and the window - 1 keys before it; with ``valid`` only keys that exist are counted.
        sink: [H] logits that take part in the softmax without a value.
        cu_seqlens: [N+1] int32 or int64 packed sequence borders 0 .. S; B is 1 and T equals S. Changing lengths does
            not recompile.
        logit_bound: [H] float32 known bound of |scale q . k| (say from the norm weights under QK-norm), used by
            ``prune``: the smaller of it and what the norms of q and k say counts. A bound that does not hold voids the
            certificate.
        softcap: ``softcap tanh(s / softcap)`` takes the place of each scaled score s, before log_decay is added
            (Gemma 2). Only the portable kernels know it.
        valid: [B, S] bool, the keys that exist; the others get no weight, whatever k and v hold there. Their gates
            count as they are. A row without any valid key gives 0. No gradient in the Triton implementation.
        gate_sums: instead of ``log_decay``, the sums of the S tokens' gates, kept from step to step, and with them the
            longest key of each head, which ``prune`` else looks for among all S. No gradient, no ``cu_seqlens``.
        receivers: float32 tensors of q's and k's shapes that get the gradients of q and k, unrounded, in place of q and
            k. What they hold is not read: a 0 that is expanded takes no memory. Needs the Triton implementation.
        retention: what is remembered of each key (One-Pass Forgetting): a bias that falls with its age is added to its
            logits. Differentiable. Positions are ages: no ``valid``, no ``gate_sums``. Only the portable kernels know
            it. What ``prune`` certifies holds with it, as a row remembers itself.
        return_lse: return the rows' log-sum-exp as well.
        layout: "bthd", the shapes above (so does None, which warns where there are more heads than tokens), or "bhtd":
            heads come before tokens, as PyTorch has them, in all that is given and returned.
        impl: "triton", "reference" (dense PyTorch, O(T S) memory), or "auto": Triton on CUDA tensors it supports.

    Under autocast q, k and v are cast to the autocast dtype and log_decay to float32.
    The forward is deterministic. So is the backward, except on Hopper, where one pass adds up dq (and with gates part
    of their gradient) in an order that varies; under ``torch.use_deterministic_algorithms(True)`` it takes the two
    deterministic kernels there too, at 1.2 to 1.5 times the backward's time.

    Returns:
        [B, T, H, V] in q's dtype; with ``return_lse`` also [B, T, H] float32 (float64 for float64 inputs), the natural
        log of the sum of a row's exponentials, its sink included. Differentiable as well.

    Raises:
        ValueError: a shape, dtype, device or option is wrong; the message says what was expected. Values (gates > 0,
            borders that do not rise, bounds below 0, NaN) are read on a CPU, on a GPU only with ATTNZOO_VALIDATE=1.
        TypeError: something that is no tensor, or no number.
        ImportError: ``impl="triton"`` without Triton.
        RuntimeError: a gradient of a gradient of the kernels, which have none.

    Source: Lin et al., "Forgetting Transformer", 2025, section 3; Press et al., "Train Short, Test Long", 2022;
    pruning: see ``kernels/common/pruning.py``.
    """
    q, k, v, log_decay = cast_for_autocast(q, k, v, {"log_decay": log_decay})
    options = AttentionOptions(scale, prune, window, sink, cu_seqlens, logit_bound, softcap)
    check_attention(q, k, v, log_decay, options, valid=valid, gate_sums=gate_sums)
    check_receivers(receivers, q, k)
    check_retention(retention, k, valid, gate_sums)
    check_flag("return_lse", return_lse)
    keys = None if retention is None else retention.keys
    rule = None if retention is None else retention.rule
    given = (q, k, v, log_decay, sink, keys, *(receivers or ()))
    backward = records(*given)
    why = triton_unavailable(q, v)
    if backward and not why and (valid is not None or gate_sums is not None):
        name = "valid" if valid is not None else "gate_sums"
        why = f"{name} has no gradient in the kernels: expected torch.no_grad() or inputs that require none"
    if pick_implementation("fox_attention", impl, why) == "reference":
        refuse_receivers(receivers, why)
        with as_given(q):  # products of what has been cast are not rounded again
            o, lse = fox_reference_with_lse(
                q, k, v, log_decay=log_decay, valid=valid, gate_sums=gate_sums, retention=retention, **options._asdict()
            )
        return (o, lse) if return_lse else o
    op = _op()
    q, k, v = addressable(q), addressable(k), addressable(v)
    keys = None if keys is None else addressable(keys)
    operands = FoxOperands(q, k, v, per_head(log_decay), per_head(sink), options.of_op(q.shape[3]), keys, rule)
    if not backward:
        s = gate_sums
        sums = None if s is None else KeptSums(s.c, s.base, s.since, s.tails, s.longest)
        inference = FoxInference(operands, sums, valid, return_lse)
        return returned(op.fox_infer_op.without_gradient(inference, q), return_lse)
    needs_gate_grad = log_decay is not None and log_decay.requires_grad
    deterministic = torch.are_deterministic_algorithms_enabled()
    given = FoxForward(operands, needs_gate_grad, deterministic, return_lse, *(receivers or ()))
    return returned(op.fox_forward_op(given), return_lse)


@with_layout
@torch.no_grad()
def kept_fraction(
    q: Tensor, k: Tensor, *, log_decay: Tensor, layout: Layout | None = None, impl: Impl = "auto", **named: Any
) -> Tensor:
    """Share of the causal blocks (128 rows by 64 keys) that ``fox_attention`` computes, per head.

    Arguments as ``fox_attention``, the options by name; a sink changes nothing. Closed gates,
    packing and the window count as well as pruning, here also where there are so few products that their search would
    take a GPU longer than what it saves.

    Returns:
        [B, H] float32 in (0, 1].
    """
    options = AttentionOptions(**named)
    check_attention(q, k, k, log_decay, options)
    if pick_implementation("fox_attention", impl, triton_unavailable(q, k)) == "reference":
        return reference_share(q, k, log_decay, options, prune_starts_reference)
    q, k = (addressable(x) for x in (q, k))
    with on_device_of(q):
        rows = _op().row_gates(FoxOperands(q, k, k, per_head(log_decay), None, options.of_op(q.shape[3])))
    return share_kept(rows.first_visible, rows.first_computed, q, k.shape[1])


def _op() -> ModuleType:
    """The module that needs Triton."""
    import attnzoo.kernels.fox.op as op  # not from a package: that is looked up again at each call

    return op


def triton_unavailable(q: Tensor, v: Tensor) -> str:
    """Why the Triton kernels cannot take these tensors, or "" if they can."""
    return kernels_unavailable(q, v, multiple=8, most=256)
