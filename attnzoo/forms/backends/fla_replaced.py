"""Kernels of ours in place of some of flash-linear-attention's.

The library takes them by its registry of backends, as it takes TileLang's where that is installed: before those, unless
the owner asks for them. But first a kernel must agree with its definition on that very machine.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnzoo.forms.backends import fla_kernels
from attnzoo.kernels.common.recording import recorders

logger = logging.getLogger("attnzoo.fla")

NAME = "attnzoo"  # in its registry
CHUNK = 64  # tokens


@dataclass(frozen=True, eq=False)
class Replacement:
    """A kernel of ours in place of a function of the library's.

    Args:
        operation, name: the function's registry, and its name there.
        verified: whether the kernel serves a call, and why not.
        kernel: takes what the function takes, by name.
        drawn: arguments for sizes of heads, borders of packed sequences and a dtype, on the CPU.
        definition: what ``kernel`` returns for what is ``drawn``, on the CPU in float64.
        texts: borders of the sequences that prove the kernel; a text alone is not packed.
        most_error: of the kernel in 16 bits, relative, by norms.
        refused: the line that is logged, with the sizes, where the kernel does not agree.
    """

    operation: str
    name: str
    verified: Callable[..., tuple[bool, str | None]]
    kernel: Callable[..., Sequence[Tensor]]
    drawn: Callable[..., dict[str, Tensor]]
    definition: Callable[[dict[str, Tensor]], Sequence[Tensor]]
    texts: Sequence[list[int]]
    most_error: float
    refused: str
    _known: dict[tuple[Any, ...], bool] = field(default_factory=dict, init=False)

    def proven(self, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the kernel agrees with its definition for heads of these sizes here, packed and not."""
        if recorders.compiles:
            for _, x in self._cases(sizes, dtype, device):
                self.kernel(**x)
            return True  # no launch has computed anything yet
        key = sizes, dtype, device
        if key not in self._known:
            self._known[key] = self._agrees(sizes, dtype, device)
            if not self._known[key]:
                logger.warning(self.refused, *sizes)
        return self._known[key]

    @torch.no_grad()
    def _agrees(self, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
        for given, x in self._cases(sizes, dtype, device):
            with torch.device("cpu"):
                wanted = self.definition(given)
            for got, want in zip(self.kernel(**x), wanted, strict=True):
                if not (got.cpu() - want).norm() <= self.most_error * want.norm():
                    return False
        return True

    def _cases(
        self, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Iterator[tuple[dict[str, Tensor], dict[str, Any]]]:
        """Arguments on the CPU, packed, and on the device, where one text is not packed."""
        for borders in self.texts:
            with torch.device("cpu"):  # whatever the default device
                given = self.drawn(sizes, borders, dtype)
            alone = {} if len(borders) > 2 else {"cu_seqlens": None, "chunk_indices": None}
            yield given, {name: y.to(device) for name, y in given.items()} | alone

    def hand_over(self) -> bool:
        """Give the library the kernel; False where it takes none: by the owner's wish, or as its release cannot."""
        try:
            backends: Any = importlib.import_module("fla.backends")
            importlib.import_module(f"fla.ops.{self.operation}.backends")
        except ImportError:
            return False
        if os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1":
            return False
        calls = {f"{self.name}_verifier": staticmethod(self.verified), self.name: staticmethod(self.kernel)}
        place = {"backend_type": NAME, "priority": property(_priority)}
        backends.register(self.operation)(type("Backend", (backends.BaseBackend,), calls | place))
        return True


def _priority(backend: object) -> int:
    """The place among the library's backends, of which the least is asked first; TileLang has 5."""
    return 9 if fla_kernels.asked_for("tilelang") else 1


def chunks_of(borders: Sequence[int]) -> list[tuple[int, int, slice]]:
    """Of each chunk of packed sequences: its sequence, its number there, and its tokens."""
    return [
        (n, i, slice(start, min(start + CHUNK, end)))
        for n, (begin, end) in enumerate(itertools.pairwise(borders))
        for i, start in enumerate(range(begin, end, CHUNK))
    ]


def in_chunks(g: Tensor, borders: list[int]) -> dict[str, Tensor]:
    """Sums of ``g`` within chunks of packed sequences, and where the chunks are, by the library's names."""
    chunks = chunks_of(borders)
    sums = torch.cat([g[:, at].cumsum(1) for *_, at in chunks], 1)
    return {"g": sums, "cu_seqlens": torch.tensor(borders), "chunk_indices": torch.tensor([x[:2] for x in chunks])}


def indices_of_chunks(cu_seqlens: Tensor | None, indices: Tensor | None) -> Tensor | None:
    """``indices``, or what the library says they are."""
    if indices is not None or cu_seqlens is None:
        return indices
    made: Tensor = importlib.import_module("fla.ops.utils").prepare_chunk_indices(cu_seqlens, CHUNK)
    return made
