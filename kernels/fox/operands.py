"""Inputs and outputs of FoX's ops, each declared once."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from attnzoo.kernels.common.launching import head_block
from attnzoo.kernels.common.options import OpOptions
from attnzoo.kernels.common.retention import Rule
from attnzoo.kernels.common.rows import Attended

Some = Tensor | None


class FoxOperands(NamedTuple):
    """What any call has: q [B, T, H, K], k [B, S, G, K], v [B, S, G, V], log_decay [B, S, H], [H] or None, sink [H],
    retention [B, S, G, 2 or 1] (``common/retention.py``) with its rule."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Some
    sink: Some
    options: OpOptions
    retention: Some = None
    rule: Rule | None = None

    @property
    def portable_alone(self) -> str:
        """What of the call only the portable kernels serve, or ""."""
        return "retention" if self.rule is not None else self.options.portable_alone

    @property
    def dims(self) -> dict[str, int]:
        """The constants of a launch that say how many heads and channels there are."""
        H, (G, K), V = self.q.shape[2], self.k.shape[2:], self.v.shape[3]
        return {"H": H, "REP": H // G, "K": K, "V": V, "BK": head_block(K), "BV": head_block(V)}


class FoxForward(NamedTuple):
    """Inputs of the forward op; with to_q and to_k the gradients of q and k go there, unrounded."""

    given: FoxOperands
    needs_gate_grad: bool
    deterministic: bool
    return_lse: bool
    to_q: Some = None
    to_k: Some = None


class KeptSums(NamedTuple):
    """What a ``GateSums`` of the S keys holds, with room for more; ``longest`` is None where it keeps none."""

    c: Tensor
    base: Tensor
    first_visible: Tensor
    tails: Tensor
    longest: Some


class FoxInference(NamedTuple):
    """Inputs of attention without a gradient; keys may not exist (``valid``), and gates may be summed already."""

    given: FoxOperands
    sums: KeptSums | None
    valid: Some
    return_lse: bool


class FoxInferred(NamedTuple):
    """Outputs of attention without a gradient: o [B, T, H, V], and the rows' log-sum-exp [B, T, H] if asked for."""

    o: Tensor
    row_lse: Some


class FoxWanted(NamedTuple):
    """Which gradients a backward pass is asked for."""

    q: bool
    k: bool
    v: bool
    log_decay: bool
    sink: bool
    retention: bool

    @property
    def rows(self) -> bool:
        """Whether dq, or what the kernel that owns rows corrects for gates and sinks, is."""
        return self.q or self.log_decay or self.sink

    @property
    def keys(self) -> bool:
        """Whether dk, dv, the column sums of dS or the gradient of retention are."""
        return self.k or self.v or self.log_decay or self.retention


class FoxBackward(NamedTuple):
    """Inputs of the backward op.

    Args:
        do: [B, T, H, V].
        dlse: gradient of the rows' log-sum-exp, or None: [B, T, H] for the op, [B, H, T] float32 for its launchers.
        made: what the forward op gave.
        unrounded: whether dq and dk are wanted in float32.
    """

    do: Tensor
    dlse: Some
    given: FoxOperands
    made: Attended
    deterministic: bool
    unrounded: bool
    wanted: FoxWanted


class FoxGradients(NamedTuple):
    """Gradients that the backward op gives, None where they are not wanted."""

    q: Some
    k: Some
    v: Some
    log_decay: Some
    sink: Some
    retention: Some


class FoxSums(NamedTuple):
    """Results of the backward launchers, undefined where they are not wanted.

    Attributes:
        q, k, v: gradients in the inputs' dtype, or as said.
        columns: with a gate, sums [B, H, S] of dS over each key's column.
        rows: with a sink, or a gate and dlse, sums [B, H, T] of dS over rows (otherwise they are 0).
        retention: its gradient, where there is one.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    columns: Some
    rows: Some
    retention: Some = None
