"""Processes that share each sequence of a batch, `context_parallel` of them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from attnzoo.models.loss import IGNORED
from attnzoo.parallel import Fragments, context_parallel
from attnzoo.training.batches import TokenBatch

if TYPE_CHECKING:
    from accelerate import Accelerator

    from attnzoo.models import LanguageModel
    from attnzoo.training.config import TrainConfig


@dataclass(frozen=True)
class Sharing:
    """The groups of processes that share sequences.

    Args:
        groups: number of groups; each reads rows of its own.
        number: this process's group.
        cut: the constructor of :class:`Fragments` for a row: `zigzag`, or `contiguous` where no layer has a softmax,
            whose late rows see more keys than early ones.
        group: the process group, None where each process has whole sequences.
    """

    groups: int
    number: int
    cut: str = "zigzag"
    group: Any = None

    @classmethod
    def of(cls, config: TrainConfig, accelerator: Accelerator, model: LanguageModel) -> Sharing:
        """The groups of a run; called by all processes."""
        from torch.distributed import new_subgroups

        ranks, processes = config.context_parallel, accelerator.num_processes
        groups, number = config.groups(processes), accelerator.process_index // ranks
        if ranks == 1:
            return cls(groups, number)
        group, _ = new_subgroups(ranks, timeout=timedelta(seconds=config.exchange_timeout))
        causal = any(layer.variant.side == "softmax" for layer in model.attentions())
        return cls(groups, number, "zigzag" if causal else "contiguous", group)

    def share(self, rows: TokenBatch) -> TokenBatch:
        """This process's part of the rows of its group."""
        if self.group is None:
            return rows
        tokens = rows.inputs.shape[1] if rows.cu_seqlens is None else rows.cu_seqlens
        fragments: Fragments = getattr(Fragments, self.cut)(tokens, self.group)
        inputs, targets = fragments.shard(rows.inputs, rows.targets)
        counted = int((targets != IGNORED).sum()) if rows.counted else 0
        targets = targets if counted else inputs  # a model refuses rows without any target; these weigh nothing
        return replace(
            rows, inputs=inputs, targets=targets, cu_seqlens=None, counted=counted, fragments=fragments
        )  # fmt: skip


def in_context(rows: TokenBatch) -> AbstractContextManager[None]:
    """The context in which a model reads the rows."""
    return nullcontext() if rows.fragments is None else context_parallel(rows.fragments)
