"""New tokens of PaTH, whose transitions carry the keys before them, and the last ones as they came."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.forms.caches.pages.present_tokens import in_front, ordered
from attnzoo.kernels.decode.path_state import PathTokens


class Factors(NamedTuple):
    """New keys ``[B, T, G, K]`` with w and beta, those that exist first, and how many these are of each sequence."""

    k: Tensor
    w: Tensor
    beta: Tensor
    counts: list[int]

    @staticmethod
    def of(k: Tensor, gate: Gate, valid: Tensor | None) -> Factors:
        """Keys ``k`` and the gate's factors, moved to the front where they exist: ``valid [B, T]``, None for all."""
        order, counts = in_front(k.shape[0], k.shape[1], valid, k.device)

        def first(x: Tensor) -> Tensor:
            return x if valid is None else ordered(x, order)

        return Factors(first(k), first(cast(Tensor, gate.w)), first(cast(Tensor, gate.beta)), counts)

    def slice(self, start: int, stop: int) -> Factors:
        """The tokens from ``start`` to ``stop``."""
        counts = [min(max(n - start, 0), stop - start) for n in self.counts]
        return Factors(self.k[:, start:stop], self.w[:, start:stop], self.beta[:, start:stop], counts)


@dataclass(frozen=True, eq=False)
class Recent:
    """The last tokens as they came, by which a sequence becomes shorter: keys that are carried cannot be carried back.

    Args:
        lengths: of the sequences before them.
        keys, factor: ``open_keys`` and ``open_factor`` of the pool before them.
        tokens: these tokens, by call.
    """

    lengths: tuple[int, ...]
    keys: Tensor
    factor: Tensor
    tokens: tuple[Factors, ...] = ()

    def __len__(self) -> int:
        return sum(x.k.shape[1] for x in self.tokens)

    def select(self, index: Tensor) -> Recent:
        """The record for the sequences ``index``."""
        rows = index.tolist()
        tokens = (
            Factors(one.k[index], one.w[index], one.beta[index], [one.counts[b] for b in rows]) for one in self.tokens
        )
        return Recent(tuple(self.lengths[b] for b in rows), self.keys[index], self.factor[index], tuple(tokens))


def last_tokens(T: int, count: Tensor | None) -> Tensor | None:
    """Which of T tokens are the last ``count [B]``, ``[B, T]`` bool; None for all."""
    return None if count is None else torch.arange(T, device=count.device) >= T - count[:, None]


def path_tokens(k: Tensor, gate: Gate, count: Tensor | None) -> PathTokens:
    """New tokens with gates per token, of which each sequence gets ``count [B]``, or all."""
    log_decay = None if gate.log_decay is None else gate.log_decay.float()
    return PathTokens(k, cast(Tensor, gate.w), cast(Tensor, gate.beta), log_decay, count)
