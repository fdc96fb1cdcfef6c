"""The public function of Wall on whole sequences: check a call, choose the kernels or the dense reference, call them.

A call goes on from here to ``op.py``, which launches the carries of ``portable/`` and, by PaTH's plan, PaTH's kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.algebra.pruning import Prune
from attnzoo.algebra.validation import check_flag
from attnzoo.algebra.values import as_given, records
from attnzoo.kernels.common.argument_checks import check_log_diag, check_tensors, check_values
from attnzoo.kernels.common.call_checks import Impl, check_whole_sequences, kernels_unavailable, pick_implementation
from attnzoo.kernels.common.calls import Layout, attention, cast_for_autocast, returned
from attnzoo.kernels.common.launching import addressable, per_head
from attnzoo.kernels.common.options import AttentionOptions

from .operands import WallForward, WallOperands
from .reference import wall_reference_lse


@attention
def wall_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_diag: Tensor,
    log_decay: Tensor | None = None,
    scale: float | None = None,
    prune: Prune | None = None,
    window: int | None = None,
    sink: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    logit_bound: Tensor | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    layout: Layout | None = None,
    impl: Impl = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal softmax attention with a decay per channel inside the logits (Wall), and a forget gate beside them.

        o_i = sum_{j <= i} softmax_j(scale sum_c q_ic k_jc exp(log_diag_{j+1,c} + ... + log_diag_ic)
                                     + log_decay_{j+1} + ... + log_decay_i) v_j

    A log gate of -inf (anything <= -1e4) closes its channel exactly. It takes the channel's share of the score to 0,
    not the weight: every earlier key keeps its place in the softmax, so without log_decay no key may be skipped,
    however small its decay.
    Mask with -inf in log_decay, too, not with a large finite number: the Triton implementation knows a logit to 2^-24
    of the sum of the log gates before it in its 128 rows (to 0.01 where they are -1000 each).

    Args:
        q: [B, T, H, K]. bfloat16, float16 or float32; the Triton implementation takes K and V that are multiples of 16
            up to 128.
        k: [B, T, G, K], v: [B, T, G, V]; G divides H and head h reads key head h // (H / G).
        log_diag: [B, T, H, K] natural log of each channel's gate, float32, <= 0. All of these, and sink, are
            differentiable.
        log_decay: [B, T, H] natural log of the forget gate, float32, <= 0, or None; closed at -inf (anything <= -1e4),
            which cuts off the past exactly.
        scale: of the scores; default K ** -0.5.
        prune: skip blocks whose total weight is certified below ``prune.eps`` per row. Needs log_decay.
        window: each row sees itself and the window - 1 keys before it.
        sink: [H] logits that take part in the softmax without a value.
        cu_seqlens: [N+1] int32 or int64 packed sequence borders 0 .. T; B is 1. Changing lengths does not recompile.
        logit_bound: [H] float32 known bound of |scale q . k|, used by ``prune`` besides measured norms.
        softcap: ``softcap tanh(s / softcap)`` takes the place of each scaled score s, before log_decay is added
            (Gemma 2). Only the portable kernels know it.
        return_lse: also return the log-sum-exp of each row's logits, the sink's included; differentiable.
        layout: "bthd", the shapes above (so does None, which warns where there are more heads than tokens), or "bhtd":
            heads come before tokens, as PyTorch has them, in all that is given and returned.
        impl: "triton", "reference" (dense PyTorch, O(T^2) memory), or "auto": Triton on CUDA tensors it supports.

    Under autocast q, k and v are cast to the autocast dtype and log_diag to float32.
    The forward is deterministic. So is the backward, except on Hopper, where one pass adds up the gradients of the
    queries in an order that varies; ``torch.use_deterministic_algorithms(True)`` selects the deterministic kernels.

    Returns:
        [B, T, H, V] in q's dtype; with ``return_lse`` also [B, T, H] float32, in natural units.

    Raises:
        ValueError: a shape, dtype, device or option is wrong; the message says what was expected. Values (gates > 0,
            borders that do not rise, NaN) are read on a CPU, on a GPU only with ATTNZOO_VALIDATE=1.
        TypeError: something that is no tensor, or no number.
        ImportError: ``impl="triton"`` without Triton.
        RuntimeError: a gradient of a gradient of the kernels, which have none.

    Source: Averbuch and Pai (Tilde Research), Wall attention, in flash-linear-attention 0.6.
    """
    gates = {"log_diag": log_diag, "log_decay": log_decay}
    q, k, v, log_diag, log_decay = cast_for_autocast(q, k, v, gates, needed=("log_diag",))
    options = AttentionOptions(scale, prune, window, sink, cu_seqlens, logit_bound, softcap)
    check_tensors({"q": q, "log_diag": log_diag}, needed=("q", "log_diag"))
    check_whole_sequences(q, k, v, log_decay, options)
    check_log_diag(q, log_diag)
    check_values(q, log_diag=log_diag)
    check_flag("return_lse", return_lse)
    with as_given(q):
        if pick_implementation("wall_attention", impl, triton_unavailable(q, v)) == "reference":
            o, lse = wall_reference_lse(q, k, v, log_diag=log_diag, log_decay=log_decay, **options._asdict())
            return (o, lse) if return_lse else o
        from .op import wall_forward_op

        q, k, v, log_diag = (addressable(x) for x in (q, k, v, log_diag))
        needs_grad = records(q, k, log_diag, log_decay, sink)
        operands = WallOperands(q, k, v, log_diag, log_decay, per_head(sink), options.of_op(q.shape[3]))
        deterministic = torch.are_deterministic_algorithms_enabled()
        made = wall_forward_op(WallForward(operands, needs_grad, deterministic, return_lse))
        return returned(made, return_lse)


def triton_unavailable(q: Tensor, v: Tensor) -> str:
    """Why the Triton kernels cannot take these tensors, or "" if they can."""
    return kernels_unavailable(q, v, multiple=16, most=128)
