"""Drawn tokens on their way from a GPU to the host, which goes on with the next steps meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnzoo.models.generation.request import Request

Rows = list[tuple[int, Request]]  # rows of the batch, and the sequences in them


@dataclass(eq=False)
class Sent:
    """The tokens ``[steps, B]`` of some steps, the rows that drew at each, and the event of their copy to the host."""

    tokens: Tensor
    rows: list[Rows]
    copied: torch.cuda.Event | None


@dataclass(eq=False)
class Delivery:
    """The tokens that were drawn and not handed out yet: those of the last steps, and copies that were started."""

    drawn: list[tuple[Tensor, Rows]] = field(default_factory=list)
    sent: deque[Sent] = field(default_factory=deque)

    def __bool__(self) -> bool:
        return bool(self.drawn or self.sent)

    def add(self, tokens: Tensor, rows: Rows) -> None:
        """The tokens ``[B]`` of a step, in memory of their own, where ``rows`` drew."""
        self.drawn.append((tokens, rows))

    def receive(self, behind: bool) -> Iterator[tuple[int, Request, int]]:
        """Row, sequence and token of all that was drawn, in order; with ``behind``, but for the last copy begun."""
        self._send()
        while len(self.sent) > behind:
            one = self.sent.popleft()
            if one.copied is not None:
                one.copied.synchronize()
            for tokens, rows in zip(one.tokens.tolist(), one.rows, strict=True):
                for row, request in rows:
                    yield row, request, tokens[row]

    def _send(self) -> None:
        """Start to copy what was drawn to the host."""
        if not self.drawn:
            return
        tokens, rows = zip(*self.drawn, strict=True)
        self.drawn, values, copied = [], torch.stack(tokens), None
        if values.is_cuda:
            there = torch.empty(values.shape, dtype=values.dtype, pin_memory=True, device="cpu")
            values = there.copy_(values, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self.sent.append(Sent(values, list(rows), copied))
