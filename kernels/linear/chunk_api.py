"""The linear readout of a scalar decay over whole sequences, as a function of tensors. No Triton before it runs."""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.algebra.pruning import Prune
from attnzoo.algebra.validation import check_flag
from attnzoo.kernels.common.argument_checks import check_shapes, check_tensors
from attnzoo.kernels.common.call_checks import check_attention, kernels_unavailable
from attnzoo.kernels.common.calls import with_layout
from attnzoo.kernels.common.options import AttentionOptions

MOST_CHANNELS = 256


@with_layout
def linear_chunks(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None, state: Tensor | None = None, *,
    scale: float | None = None, cu_seqlens: Tensor | None = None, keeps_state: bool = False, prune: Prune | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """``S_t = exp(g_t) S_{t-1} + v_t k_t^T``, ``o_t = S_t (scale q_t)`` with its gradients, by chunks of 64 tokens.

    Sums and states are float32; between chunks states are rounded to the dtype of q (float16: they stay float32). The
    gradient of a gate is summed pair by pair where it acts, so its error does not grow with the text. All is
    deterministic.

    With ``layout="bhtd"`` heads come before tokens in q, k, v, log_decay and o; where nothing is said, a warning comes
    where there are more heads than tokens.

    Args:
        q: [B, T, H, K], K up to 256.
        k: [B, T, G, K], with G a divisor of H.
        v: [B, T, G, V], V up to 256.
        log_decay: [B, T, H] or [H] float32 log gates g; of -1e4 or less they forget exactly. None for none.
        state: [B, H, K, V] float32, ``S^T`` after the tokens before; None for zeros.
        scale: of the queries; default K ** -0.5.
        cu_seqlens: [N + 1] borders of sequences packed into one row (B = 1), without states.
        keeps_state: also return the state after the last token.
        prune: where a sequence is split over several programs, leave out what is carried to a part from before it if
            the gates certify that its weights sum to at most ``prune.eps`` in every row, and in gradients of k and v in
            every column. None leaves out nothing.

    Returns:
        o [B, T, H, V] in v's dtype, and the state [B, H, K, V] float32 or None.

    Raises:
        ValueError: a shape, dtype, device or option is wrong, a value is (read on a CPU, on a GPU only with
            ATTNZOO_VALIDATE=1), or the kernels cannot run here.
        TypeError: something that is no tensor.
        RuntimeError: a gradient of a gradient, which the kernels do not have.
    """
    check_attention(q, k, v, log_decay, AttentionOptions(scale=scale, cu_seqlens=cu_seqlens))
    check_tensors({"q": q, "state": state}, needed=("q",))
    (B, T, H, K), V = q.shape, v.shape[3]
    if k.shape[1] != T:
        raise ValueError(f"k: expected as many tokens as q (T={T}), got {tuple(k.shape)}")
    check_shapes({"state": (state, (B, H, K, V), torch.float32)}, strided=("state",))
    check_flag("keeps_state", keeps_state)
    if prune is not None and (not isinstance(prune, Prune) or prune.bound != "tail" or log_decay is None):
        raise ValueError(f"prune: expected None, or with log_decay attnzoo.Prune(eps=...), got {prune!r}")
    if cu_seqlens is not None and (state is not None or keeps_state):
        raise ValueError("cu_seqlens: expected None with a state (packed sequences have none), got borders")
    why = chunks_unavailable(q, v)
    if why:
        raise ValueError(f"q, v: {why}")
    from .chunk_op import ChunkInputs, chunk_forward_op

    scale = K**-0.5 if scale is None else float(scale)
    if log_decay is not None and log_decay.ndim == 1:
        log_decay = log_decay.expand(B, T, H)
    eps = 0.0 if prune is None else float(prune.eps)
    made = chunk_forward_op(ChunkInputs(q, k, v, log_decay, state, cu_seqlens, scale, keeps_state, eps))
    return made.o, made.last


def chunks_unavailable(q: Tensor, v: Tensor) -> str:
    """Why the kernels cannot take these tensors, or ""."""
    return kernels_unavailable(q, v, multiple=1, most=MOST_CHANNELS)
