"""Pages of carried keys that kernels step wherever they are, as those of a memory on a GPU are."""

from typing import Any

from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.forms.caches.path_pages.pool import CarriedPool


class KernelPool(CarriedPool):
    """A pool that takes the kernels also on a CPU, where they are interpreted."""

    def step(self, *args: Any) -> Tensor:
        return super().step(*args[:6], "triton", *args[7:])

    def carry(self, k: Tensor, gate: Gate, kept: Tensor, impl: Any = None) -> None:
        super().carry(k, gate, kept)
