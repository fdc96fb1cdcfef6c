"""The public functions of PaTH on whole sequences: check a call, choose the kernels or the dense reference, call them.

A call goes on from here to ``op.py``, which asks ``levels/plan.py`` for its kernels and launches those of ``portable/``
or ``hopper/``. Cached steps are in ``decode.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnzoo.algebra.gate import expand_heads
from attnzoo.algebra.pruning import Prune
from attnzoo.algebra.validation import check_flag
from attnzoo.algebra.values import as_given, records
from attnzoo.kernels.common.argument_checks import check_log_diag, check_tensors, check_values
from attnzoo.kernels.common.call_checks import (
    Impl,
    check_receivers,
    check_whole_sequences,
    kernels_unavailable,
    pick_implementation,
    refuse_receivers,
    share_kept,
)
from attnzoo.kernels.common.calls import Layout, attention, cast_for_autocast, reference_share, returned, with_layout
from attnzoo.kernels.common.device import machine, on_device_of
from attnzoo.kernels.common.launching import addressable, per_head
from attnzoo.kernels.common.options import AttentionOptions
from attnzoo.kernels.path.fits import too_small

from .operands import PathForward, PathOperands
from .reference import path_reference_lse, prune_starts_reference


@attention
def path_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    w: Tensor,
    beta: Tensor,
    log_diag: Tensor | None = None,
    log_decay: Tensor | None = None,
    scale: float | None = None,
    prune: Prune | None = None,
    window: int | None = None,
    sink: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    logit_bound: Tensor | None = None,
    softcap: float | None = None,
    receivers: tuple[Tensor, ...] | None = None,
    return_lse: bool = False,
    layout: Layout | None = None,
    keep_carries: bool = False,
    impl: Impl = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal softmax attention with keys carried by Householder-like transitions (PaTH), and a forget gate (PaTH-FoX).

        o_i = sum_{j <= i} softmax_j(scale k_j^T R_{j+1} ... R_i q_i + log_decay_{j+1} + ... + log_decay_i) v_j
        R_t = I - beta_t w_t w_t^T, with log_diag Diag(exp(log_diag_t)) (I - beta_t w_t w_t^T)

    The log gate is added unscaled: beta = 0 is FoX exactly. A log gate of -inf (anything <= -1e4) cuts off the past
    exactly. To neutralise padding on the left, close the gate of the first real token (or pack); padding
    on the right is never seen by real tokens.
    Mask with it, not with a large finite number: the Triton implementation knows a logit to 2^-24 of the sum of the log
    gates before it in its 128 rows (to 0.01 where they are -1000 each).

    Args:
        q: [B, T, H, K]. bfloat16, float16 or float32; the Triton implementation takes K and V that are multiples of 16
            up to 128.
        k: [B, T, G, K], v: [B, T, G, V]; G divides H and head h reads key head h // (H / G).
        w: [B, T, G, K] vectors of length 1 or less, beta: [B, T, G] in [0, 2], both in q's dtype or float32. A w
            rounded to 16 bits may be longer by 2^-9, which pruning's certificate does not count.
        log_diag: [B, T, H, K] natural log of each channel's gate, float32, <= 0, or None; closed at -inf (anything
            <= -1e4). It makes old keys neutral, not light: only log_decay forgets them. Where G < H, keys are repeated.
        log_decay: [B, T, H] natural log of the forget gate, float32, <= 0, or None. All of these, and sink, are
            differentiable.
        scale: of the scores; default K ** -0.5.
        prune: skip blocks whose total weight is certified below ``prune.eps`` per row. Needs a gate. The transitions
            that only skipped blocks need are not computed either.
        window: each row sees itself and the window - 1 keys before it. The transitions that only keys outside of it
            need are not computed either.
        sink: [H] logits that take part in the softmax without a value.
        cu_seqlens: [N+1] int32 or int64 packed sequence borders 0 .. T; B is 1. Changing lengths does not recompile.
        logit_bound: [H] float32 known bound of |scale q . k|, used by ``prune`` besides measured norms. A bound that
            does not hold voids the certificate.
        softcap: ``softcap tanh(s / softcap)`` takes the place of each scaled score s, before log_decay is added
            (Gemma 2). Only the portable kernels know it.
        receivers: float32 tensors of the shapes of q, k and w that get the gradients of these, unrounded, in their
            place. What they hold is not read: a 0 that is expanded takes no memory. Needs the Triton implementation.
        return_lse: also return the log-sum-exp of each row's logits, the sink's included; differentiable.
        keep_carries: keep what the forward makes of the transitions for the backward, which makes it again otherwise:
            the backward is faster by about half of the forward, for about 33 K bytes a token and key head in 16 bits
            (``kernels/path/kept_transitions.py``). Values and gradients are the same. Not with log_diag. Without a
            gradient to come nothing is kept, and the reference keeps everything in any case.
        layout: "bthd", the shapes above (so does None, which warns where there are more heads than tokens), or "bhtd":
            heads come before tokens, as PyTorch has them, in all that is given and returned.
        impl: "triton", "reference" (dense PyTorch, O(T^2) memory), or "auto": Triton on CUDA tensors it supports (GPUs
            of compute capability 8.0 and up; float32 and head dims over 64 need 9.0 or 10.0, with Triton 3.7 also 8.0).

    Under autocast q, k and v are cast to the autocast dtype, and w, beta and log_decay to float32.
    The forward is deterministic. So is the backward, except on Hopper, where one pass adds up the gradients of the
    queries, which those of w and beta depend on (and with gates part of theirs), in an order that varies;
    ``torch.use_deterministic_algorithms(True)`` selects the deterministic kernels there too.

    Returns:
        [B, T, H, V] in q's dtype; with ``return_lse`` also [B, T, H] float32, in natural units.

    Raises:
        ValueError: a shape, dtype, device or option is wrong; the message says what was expected. Values (gates > 0,
            beta outside [0, 2], w longer than 1, borders that do not rise, bounds below 0, NaN) are read on a CPU,
            on a GPU only with ATTNZOO_VALIDATE=1.
        TypeError: something that is no tensor, or no number.
        ImportError: ``impl="triton"`` without Triton.
        RuntimeError: a gradient of a gradient of the kernels, which have none.

    Source: Yang et al., "PaTH Attention", 2025, sections 2.2 and 3; pruning: ``kernels/common/pruning.py``.
    """
    gates = {"w": w, "beta": beta, "log_diag": log_diag, "log_decay": log_decay}
    q, k, v, w, beta, log_diag, log_decay = cast_for_autocast(q, k, v, gates, needed=("w", "beta"))
    options = AttentionOptions(scale, prune, window, sink, cu_seqlens, logit_bound, softcap)
    _check(q, k, v, w, beta, log_decay, log_diag, options)
    check_receivers(receivers, q, k, w)
    check_flag("return_lse", return_lse)
    check_flag("keep_carries", keep_carries)
    if keep_carries and log_diag is not None:
        raise ValueError("keep_carries: expected False with log_diag (decays of the channels are made again), got True")
    why = triton_unavailable(q, v)
    with as_given(q):
        if pick_implementation("path_attention", impl, why) == "reference":
            refuse_receivers(receivers, why)
            o, lse = path_reference_lse(
                q, k, v, w=w, beta=beta, log_diag=log_diag, log_decay=log_decay, **options._asdict()
            )
            return (o, lse) if return_lse else o
        from .op import path_forward_op

        if log_diag is not None:  # transitions of its own for each query head
            k, v, w, beta = (expand_heads(x, q.shape[2]) for x in (k, v, w, beta))
            receivers = None if receivers is None else tuple(expand_heads(x, q.shape[2]) for x in receivers)
            log_diag = addressable(log_diag)
        operands = _operands(q, k, v, w, beta, log_decay, log_diag, options)
        needs_gate_grad = torch.is_grad_enabled() and log_decay is not None and log_decay.requires_grad
        keep = keep_carries and records(q, k, v, w, beta, log_decay, sink, *(receivers or ()))
        deterministic = torch.are_deterministic_algorithms_enabled()
        made = path_forward_op(
            PathForward(operands, needs_gate_grad, deterministic, return_lse, keep, *(receivers or ()))
        )
    return returned(made, return_lse)


@with_layout
@torch.no_grad()
def kept_fraction(
    q: Tensor,
    k: Tensor,
    *,
    w: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    layout: Layout | None = None,
    impl: Impl = "auto",
    **named: Any,
) -> Tensor:
    """Share of the causal blocks (128 rows by 64 keys) that ``path_attention`` computes, per head.

    Arguments as ``path_attention``, the options by name; a sink changes nothing. Closed gates,
    packing and the window count as well as pruning.

    Returns:
        [B, H] float32 in (0, 1].
    """
    options = AttentionOptions(**named)
    _check(q, k, k, w, beta, log_decay, None, options)
    if pick_implementation("path_attention", impl, triton_unavailable(q, k)) == "reference":

        def starts(q: Tensor, k: Tensor, *given: Any) -> Tensor:
            return prune_starts_reference(q, k, w, beta, *given)

        return reference_share(q, k, log_decay, options, starts)
    from .op import row_gates

    with on_device_of(q):
        rows = row_gates(_operands(q, k, k, w, beta, log_decay, None, options))
    return share_kept(rows.first_visible, rows.first_computed, q, k.shape[1])


def triton_unavailable(q: Tensor, v: Tensor) -> str:
    """Why the Triton kernels cannot take these tensors, or "" if they can."""
    why = kernels_unavailable(q, v, multiple=16, most=128)
    return why or (too_small(q.dtype, max(q.shape[3], v.shape[3]), machine(q.device)) if q.is_cuda else "")


def _operands(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, log_decay: Tensor | None, log_diag: Tensor | None,
    options: AttentionOptions,
) -> PathOperands:  # fmt: skip
    """The operands as the kernels read them."""
    q, k, v, w, beta = (addressable(x) for x in (q, k, v, w, beta.float()))
    return PathOperands(q, k, v, w, beta, log_decay, per_head(options.sink), log_diag, options.of_op(q.shape[3]))


def _check(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, log_decay: Tensor | None, log_diag: Tensor | None,
    options: AttentionOptions,
) -> None:  # fmt: skip
    """Types, shapes, dtypes, devices and options; values where they may be read."""
    check_tensors({"q": q, "w": w, "beta": beta, "log_diag": log_diag}, needed=("q", "w", "beta"))
    check_whole_sequences(q, k, v, log_decay, options)
    B, T, H, K = q.shape
    G = k.shape[2]
    for name, x, shape, axes in (("w", w, (B, T, G, K), "[B, T, G, K]"), ("beta", beta, (B, T, G), "[B, T, G]")):
        if tuple(x.shape) != shape:
            raise ValueError(f"{name}: expected {axes} = {shape}, got {tuple(x.shape)}")
        if x.dtype not in (q.dtype, torch.float32):
            raise ValueError(f"{name}: expected q's dtype ({q.dtype}) or float32, got {x.dtype}")
    if log_diag is not None:
        check_log_diag(q, log_diag)
    check_values(q, w=w, beta=beta, log_diag=log_diag)
