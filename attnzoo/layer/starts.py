"""A notice, at a layer's first training step, that gates, norms or convolutions do not begin as the layer made them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from attnzoo.algebra.values import has_values, in_transform
from attnzoo.precision import LinearMap, PreciseModule

UNSET = math.nan  # of memory that nobody has initialised
# layers whose numbers are on their way from a GPU: names, squares and whether they have come
_coming: WeakKeyDictionary[nn.Module, tuple[list[str], Tensor, Callable[[], bool]]] = WeakKeyDictionary()


class NoticedStarts(PreciseModule):
    """A module that notices at its first training step whether its parameters begin as it made them.

    Scripts that go through `model.parameters()` overwrite them, and those that build on the meta device may initialise
    no more than the modules they know. Weights of linear maps may begin anyhow. Loading a checkpoint ends the watch.
    """

    _starts: dict[str, float] | None = None  # root mean squares by name, until the first training step

    def note_starts(self) -> None:
        """Take what the parameters hold for what they are to begin with."""
        _coming.pop(self, None)
        found = self._squares()
        self._starts = None if found is None else dict(zip(found[0], found[1].sqrt().tolist(), strict=True))

    def look_at_starts(self) -> None:
        """Warn, once, where parameters hold something else. Values within a factor of 2 count as drawn by the layer.

        No step waits for a GPU: one of those that follow the first finds the numbers.
        """
        coming = _coming.get(self)
        if coming is None:
            squares = self._squares() if torch.is_grad_enabled() else None
            if squares is None:
                return
            _coming[self] = coming = (squares[0], *_sent(squares[1]))
        names, on_host, there = coming
        if not there():
            return
        found = dict(zip(names, on_host.sqrt().tolist(), strict=True))
        _coming.pop(self, None)  # another thread may have been here
        expected, self._starts = self._starts or {}, None
        moved = [
            name for name, rms in expected.items() if name in found  # not of modules that were exchanged since
            if math.isnan(rms) or not (rms / 2 <= found[name] <= 2 * rms or math.isnan(found[name]))
        ]  # fmt: skip
        if moved:
            unset = math.isnan(expected[moved[0]])
            wanted = "initial values after the meta device, got none" if unset else "the layer's own start, got another"
            warnings.warn(
                f"{', '.join(moved[:3])}{' and others' if moved[3:] else ''}: expected {wanted}; call "
                "reset_parameters() of every attnzoo layer after your own initialisation, unless this is meant",
                stacklevel=5,
            )

    @torch.no_grad()
    def _squares(self) -> tuple[list[str], Tensor] | None:
        """The names and the mean squares of the parameters; None where values cannot be read."""
        own = self._watched()
        plain = all(map(has_values, own.values())) and not in_transform()
        if not plain or _captures(own.values()):
            return None
        squares = [x.double().square().mean() for x in own.values()]
        return list(own), torch.stack(squares) if squares else torch.empty(0, device="cpu")

    def _watched(self) -> dict[str, nn.Parameter]:
        return {
            f"{prefix}.{name}".lstrip("."): parameter
            for prefix, module in self.named_modules()
            for name, parameter in module.named_parameters(recurse=False)
            if not isinstance(module, nn.Linear) and not (isinstance(module, LinearMap) and name == "weight")
        }

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._starts = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        was_meta = any(x.is_meta for x in self._watched().values())
        super()._apply(fn, recurse)
        own = self._watched()
        if was_meta and not any(x.is_meta for x in own.values()):  # `to_empty` alone does this
            self._starts = dict.fromkeys(own, UNSET)
        return self


def _captures(tensors: Iterable[Tensor]) -> bool:
    """Whether a CUDA graph is captured, in which nothing may be read."""
    return any(x.is_cuda for x in tensors) and torch.cuda.is_current_stream_capturing()


def _sent(x: Tensor) -> tuple[Tensor, Callable[[], bool]]:
    """x on the host, and whether it is there yet, which nobody waits for."""
    if not x.is_cuda:
        return x, lambda: True
    with torch.cuda.device(x.device):
        on_host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        on_host.copy_(x, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    return on_host, lambda: not torch.cuda.is_current_stream_capturing() and event.query()
