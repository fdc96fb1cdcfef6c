"""Gate sums and first visible keys of whole sequences."""

from __future__ import annotations

from torch import Tensor

from attnzoo.kernels.common.dense_reference import segment_starts
from attnzoo.kernels.common.gate_sums import gate_sums
from attnzoo.kernels.common.options import OpOptions
from attnzoo.kernels.common.rows import RowGates, first_visible_without_gate


def summed(q: Tensor, log_decay: Tensor | None, options: OpOptions) -> tuple[RowGates, Tensor | None]:
    """Gate sums and first visible keys, and the tails that pruning reads; without gates first visible keys alone."""
    T = q.shape[1]
    doc = segment_starts(options.cu_seqlens, T)
    if log_decay is None:
        return RowGates(None, None, first_visible_without_gate(doc, options.window, T, q.device)), None
    c, base, first_visible, tails = gate_sums(log_decay, doc, options.window or T)
    return RowGates(c, base, first_visible), tails
