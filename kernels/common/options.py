"""Options of one call of attention, handed on whole: as its caller gives them, and as torch's ops take them."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from torch import Tensor

from attnzoo.algebra.pruning import Prune
from attnzoo.kernels.common.constants import LOG2E
from attnzoo.kernels.common.launching import per_head

PORTABLE_ALONE = ("softcap",)  # options that only the portable kernels serve


def portable_alone(asked: Container[str]) -> str:
    """The option among these names that only the portable kernels serve, or ""."""
    return next((name for name in PORTABLE_ALONE if name in asked), "")


class OpOptions(NamedTuple):
    """Options in the types that ops of torch have.

    Args:
        cu_seqlens: [N+1] borders of packed sequences, or None.
        logit_bound: [H] known bound of the logits, or None.
        scale: of the scores.
        window: visible keys per row, 0 for no window.
        bound: ``Prune.bound``, "" without pruning.
        log_eps: ``Prune.log_eps``, 0 without pruning.
        softcap: of the scores, 0 for none.
    """

    cu_seqlens: Tensor | None
    logit_bound: Tensor | None
    scale: float
    window: int = 0
    bound: str = ""
    log_eps: float = 0.0
    softcap: float = 0.0

    @property
    def portable_alone(self) -> str:
        """The option of the call that only the portable kernels serve, or ""."""
        return portable_alone([name for name in PORTABLE_ALONE if getattr(self, name)])

    @property
    def scale2(self) -> tuple[float, float | None]:
        """The factors by which the portable kernels compute scores (``common/scores.py``)."""
        return (self.scale / self.softcap, self.softcap * LOG2E) if self.softcap else (self.scale * LOG2E, None)


class AttentionOptions(NamedTuple):
    """Options that all functions of attention have; ``fox_attention`` says what each of them means."""

    scale: float | None = None
    prune: Prune | None = None
    window: int | None = None
    sink: Tensor | None = None
    cu_seqlens: Tensor | None = None
    logit_bound: Tensor | None = None
    softcap: float | None = None

    def scores(self, products: Tensor, K: int) -> Tensor:
        """The scores of products of queries and keys of K channels; of a bound of |q . k|, a bound of the scores."""
        scores = products * self.scale_of(K)
        return scores if self.softcap is None else self.softcap * (scores / self.softcap).tanh()

    def scale_of(self, K: int) -> float:
        """The scale of scores of K channels."""
        return K**-0.5 if self.scale is None else float(self.scale)

    def of_op(self, K: int) -> OpOptions:
        """The options as an op takes them, for heads of K channels; the sink, which has a gradient, is an operand."""
        bound, log_eps = ("", 0.0) if self.prune is None else (self.prune.bound, self.prune.log_eps)
        known, window = per_head(self.logit_bound), self.window or 0
        return OpOptions(self.cu_seqlens, known, self.scale_of(K), window, bound, log_eps, float(self.softcap or 0))
