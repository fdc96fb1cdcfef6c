"""Options of one call of attention, handed on whole: as its caller gives them, and as torch's ops take them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from attnzoo.algebra.pruning import Prune
from attnzoo.kernels.common.launching import per_head


class OpOptions(NamedTuple):
    """Options in the types that ops of torch have.

    Args:
        cu_seqlens: [N+1] borders of packed sequences, or None.
        logit_bound: [H] known bound of the logits, or None.
        scale: of the scores.
        window: visible keys per row, 0 for no window.
        bound: ``Prune.bound``, "" without pruning.
        log_eps: ``Prune.log_eps``, 0 without pruning.
    """

    cu_seqlens: Tensor | None
    logit_bound: Tensor | None
    scale: float
    window: int = 0
    bound: str = ""
    log_eps: float = 0.0


class AttentionOptions(NamedTuple):
    """Options that all functions of attention have; ``fox_attention`` says what each of them means."""

    scale: float | None = None
    prune: Prune | None = None
    window: int | None = None
    sink: Tensor | None = None
    cu_seqlens: Tensor | None = None
    logit_bound: Tensor | None = None

    def of_op(self, K: int) -> OpOptions:
        """The same (but for the sink, an operand with a gradient) for heads of K channels."""
        scale = K**-0.5 if self.scale is None else float(self.scale)
        bound, log_eps = ("", 0.0) if self.prune is None else (self.prune.bound, self.prune.log_eps)
        return OpOptions(self.cu_seqlens, per_head(self.logit_bound), scale, self.window or 0, bound, log_eps)
