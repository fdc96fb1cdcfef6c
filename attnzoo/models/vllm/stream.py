"""The rows of one step of the engine, whose requests continue from states in its pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.forms.packing import SimilarRows, similar_rows
from attnzoo.layer.stream import OwnCore


@dataclass(frozen=True, eq=False)
class Step:
    """The R requests of one step; their N tokens lie packed, one request after the other.

    Args:
        borders: where each request begins, ``[R + 1]`` int64.
        pages: the page of each request's state, ``[R]`` int64.
        fresh: whether a request has no earlier tokens, ``[R]`` bool.
        sequence: the request of each token, ``[N]`` int64.
        groups: requests of similar length, by sub-tokens of a token, once a layer has asked for them.
    """

    borders: Tensor
    pages: Tensor
    fresh: Tensor
    sequence: Tensor
    groups: dict[int, list[SimilarRows]] = field(default_factory=dict)

    def rows(self, sub_tokens: int) -> list[SimilarRows]:
        """The requests as rows of similar length, with so many rows for each token."""
        if sub_tokens not in self.groups:
            self.groups[sub_tokens] = list(similar_rows(self.borders * sub_tokens))
        return self.groups[sub_tokens]

    @staticmethod
    def of(metadata: Any, tokens: int) -> Step:
        """The step that vLLM's ``metadata`` of a state's layer describes, with ``tokens`` rows."""
        borders = metadata.query_start_loc.long()
        place = torch.arange(tokens, device=borders.device)
        sequence = torch.searchsorted(borders, place, right=True) - 1
        pages, fresh = metadata.state_indices_tensor.long(), metadata.seq_lens <= borders.diff()
        return Step(borders, pages, fresh, sequence.clamp(max=len(pages) - 1))  # rows at the end may be padding


@dataclass(frozen=True, eq=False, kw_only=True)
class ServedStream(OwnCore):
    """One layer's view of a step.

    Args:
        layer: the served layer, which runs the core.
        place: the index of each token in its request, ``[N]``.
        step: None where nothing is kept, as when vLLM measures its memory.
    """

    layer: Any
    place: Tensor
    step: Step | None

    def run(self, variant: Any, form: str, call: Any, keys_per_token: int) -> Tensor:
        out: Tensor = self.layer.core(self, variant, form, call, keys_per_token)
        return out

    def positions(self) -> Tensor:
        return self.place[None]

    def read(self, name: str) -> Tensor:
        """The tensor ``name`` of each request's state, ``[R, ...]``; zeros where it is fresh."""
        assert self.step is not None
        kept: Tensor = self.layer.states.tensors[name][self.step.pages]
        return kept.masked_fill(self.step.fresh.view(-1, *(1,) * (kept.ndim - 1)), 0)

    def write(self, name: str, x: Tensor) -> None:
        """Put ``x [R, ...]`` into the requests' states."""
        assert self.step is not None
        kept = self.layer.states.tensors[name]
        kept[self.step.pages] = x.to(kept.dtype)

    def windowed(self, name: str, x: Tensor, size: int, fn: Callable[[Tensor], Tensor]) -> Tensor:
        n, step = size - 1, self.step
        if step is None or not n:
            return fn(F.pad(x, (0, 0, n, 0)))
        place = torch.arange(x.shape[1], device=x.device) + n * step.sequence
        before = (step.borders[:-1] + n * torch.arange(len(step.pages), device=x.device))[:, None]
        last = torch.arange(n, device=x.device)
        spaced = x.new_zeros(1, x.shape[1] + n * len(step.pages), x.shape[2])  # n rows before those of each request
        spaced[0, place + n] = x[0]
        spaced[0, before + last] = self.read(name).to(x.dtype)
        self.write(name, spaced[0, before + step.borders.diff()[:, None] + last])
        return fn(spaced).index_select(1, place)

    def running(self, name: str, x: Tensor) -> Tensor:
        """The running sums of ``x [N, ...]`` over each request, in float64, which its state continues."""
        sums = x.double().cumsum(0)
        if self.step is None:
            return sums
        first, last = self.step.borders[:-1], self.step.borders[1:] - 1
        before = torch.cat([torch.zeros_like(sums[:1]), sums])[first]
        sums = sums + (self.read(name) - before)[self.step.sequence]
        self.write(name, sums[last])
        return sums
