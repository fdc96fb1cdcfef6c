"""Linear maps of one input fused into one product, for steps of few rows, which are bound by reading weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo.forms.caches.device_memory import check_memory, size_of
from attnzoo.layer.modules import untouched
from attnzoo.precision import GateAffine, LinearMap


class StackedMaps:
    """A stacked copy of the weights of several linear maps.

    Args:
        maps: the maps, in the order in which they are called.
    """

    def __init__(self, maps: Sequence[LinearMap]) -> None:
        self.maps, self.sizes = list(maps), [one.out_features for one in maps]
        self.weight = torch.cat([one.weight.detach() for one in maps])  # [sum of outputs, D]
        self.given: tuple[Tensor, ...] = ()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights again, as they may have been changed in place; changes through `.data` cannot be
        detected."""
        for rows, one in zip(self.weight.split(self.sizes), self.maps, strict=True):
            rows.copy_(one.weight)


class StackedMap(nn.Module):
    """A replacement of one of several stacked maps; the first one called multiplies for all.

    Args:
        product: the stacked maps.
        place: the index of this one.
    """

    def __init__(self, product: StackedMaps, place: int) -> None:
        super().__init__()
        self.product, self.place, self.bias = product, place, product.maps[place].bias

    def forward(self, x: Tensor) -> Tensor:
        """The map's output [..., outputs] for x [..., D]."""
        y = self.unbiased(x)
        return y if self.bias is None else y + self.bias

    def unbiased(self, x: Tensor) -> Tensor:
        """The map's output without its bias."""
        if self.place == 0:
            self.product.given = F.linear(x, self.product.weight).split(self.product.sizes, -1)
        return self.product.given[self.place]


def fuse(blocks: Sequence[nn.Module], run: Callable[[], Any]) -> tuple[list[nn.Module], list[StackedMaps]]:
    """Copies of the blocks, with shared parameters, in which maps of one input are stacked; and the stacked maps.

    Args:
        blocks: the blocks, which are not changed.
        run: a function that calls each block once, as a step does.

    Raises:
        MemoryError: the copies of the weights do not fit into the memory of the device.
    """
    groups = _of_one_input(blocks, run)
    needed = sum(size_of(one.weight) for maps in groups for one in maps)
    check_memory(needed, next(blocks[0].parameters()).device, "weights one above the other")
    products = [StackedMaps(maps) for maps in groups]
    parts: dict[nn.Module, nn.Module] = {
        one: StackedMap(product, place) for product in products for place, one in enumerate(product.maps)
    }
    return [_twin(block, parts) for block in blocks], products


def _of_one_input(blocks: Sequence[nn.Module], run: Callable[[], Any]) -> list[list[LinearMap]]:
    """Groups of linear maps that read the same tensor while ``run`` calls the blocks, in the order of their calls.

    Left out are maps of another class (quantised ones), with hooks, a ``forward`` of their own or sharded weights, and
    those called twice.
    """
    seen: list[tuple[Tensor, list[LinearMap]]] = []

    def note(one: nn.Module, given: tuple[Tensor]) -> None:
        maps = next((maps for x, maps in seen if x is given[0]), None)
        if maps is None:
            seen.append((given[0], maps := []))
        maps.append(cast(LinearMap, one))

    hooks = []
    for one in {module for block in blocks for module in block.modules()}:
        plain = type(one) in (nn.Linear, GateAffine) and type(one.weight) is nn.Parameter
        if plain and untouched(one):
            hooks.append(one.register_forward_pre_hook(note))
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    calls = Counter(one for _, maps in seen for one in maps)
    groups: dict[tuple[int, torch.dtype], list[LinearMap]] = {}
    for place, (_, maps) in enumerate(seen):
        for one in maps:
            if calls[one] == 1:
                groups.setdefault((place, one.weight.dtype), []).append(one)
    return [maps for maps in groups.values() if len(maps) > 1]


def _twin(module: nn.Module, parts: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """A copy of ``module`` with the same parameters, in which ``parts`` replace submodules."""
    if module in parts:
        return parts[module]
    twin = object.__new__(type(module))  # copy.copy refuses parametrized modules
    twin.__dict__.update(module.__dict__)
    children = {name: None if child is None else _twin(child, parts) for name, child in module._modules.items()}
    twin._modules = children
    return twin
