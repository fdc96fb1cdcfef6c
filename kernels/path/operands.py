"""Inputs and outputs of PaTH's ops, each declared once."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from attnzoo.kernels.common.options import OpOptions
from attnzoo.kernels.common.rows import RowGates
from attnzoo.kernels.levels.layout import Wanted

Some = Tensor | None


class PathOperands(NamedTuple):
    """Operands of a call: q [B, T, H, K], k and w [B, T, G, K], v [B, T, G, V], beta [B, T, G], log_decay [B, T, H],
    sink [H] and log_diag [B, T, H, K], with which there is a key head for each query head."""

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor
    beta: Tensor
    log_decay: Some
    sink: Some
    log_diag: Some
    options: OpOptions


class PathForward(NamedTuple):
    """Inputs of the forward op.

    Args:
        needs_gate_grad: whether a gradient of log_decay will be asked for; only then may o_rest be there.
        keep: whether the carried operands are kept (``kept_transitions.py``).
        to_q, to_k, to_w: if given, the gradients of q, k and w go there, unrounded.
    """

    given: PathOperands
    needs_gate_grad: bool
    deterministic: bool
    return_lse: bool
    keep: bool
    to_q: Some = None
    to_k: Some = None
    to_w: Some = None


class PathAttended(NamedTuple):
    """Outputs of the forward op: those of any (``common/rows.py``), and the kept transitions in one buffer."""

    o: Tensor
    row_lse: Some
    lse: Tensor
    rows: RowGates
    o_rest: Some
    kept: Some


class PathBackward(NamedTuple):
    """Inputs of the backward op, do [B, T, H, V] and dlse [B, T, H] or None among them; unrounded: whether dq, dk and
    dw are wanted in float32."""

    do: Tensor
    dlse: Some
    given: PathOperands
    made: PathAttended
    deterministic: bool
    unrounded: bool
    wanted: Wanted


class PathGradients(NamedTuple):
    """Gradients that the backward op gives, contiguous; None where they are not wanted."""

    q: Some
    k: Some
    v: Some
    w: Some
    beta: Some
    log_decay: Some
    sink: Some
    log_diag: Some


class PathStep(NamedTuple):
    """N new tokens (at most CHUNK) after S cached ones.

    Args:
        q: [B, N, H, K]; k, w: [B, N, G, K]; beta: [B, N, G]; w and beta may have n factors per token, as in
            ``path_extend``.
        keys: [B, S, G, K] float32, as the last cached token left them.
        values: [B, S + N, G, V], gates: [B, S + N, H], valid: [B, S + N] bool, of the cached and the new tokens.
        sink: [H] or None.
        log_diag: [B, N, H, K] with as many key heads, or None.
        options: of them, a window counts the tokens that exist.
    """

    q: Tensor
    k: Tensor
    w: Tensor
    beta: Tensor
    keys: Tensor
    values: Tensor
    gates: Some
    valid: Some
    sink: Some
    log_diag: Some
    options: OpOptions = OpOptions(None, None, 1.0)


class Advanced(NamedTuple):
    """o [B, N, H, V] in the dtype of the values, the rows' log-sum-exp [B, N, H] float32, and the keys [B, S + N, G, K]
    as the last new token leaves them."""

    o: Tensor
    lse: Tensor
    keys: Tensor
