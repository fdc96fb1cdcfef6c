"""Measurement of a model's attention layers during one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from attnzoo.layer.attention import Attention
from attnzoo.layer.projected import Projected

Found = TypeVar("Found")


@torch.no_grad()
def each_layer(
    model: nn.Module,
    tokens: Tensor,
    measure: Callable[[Attention, Projected], Found | None],
    numbers: Collection[int] | None = None,
) -> list[tuple[int, Found]]:
    """The result of a measure for each attention layer, taken during a forward pass, so that no inputs are stored.

    Args:
        model: holds :class:`~attnzoo.layer.attention.Attention` modules, as :class:`attnzoo.models.LanguageModel` does.
        tokens: one window of ids, ``[T]``, on any device.
        measure: a function of the layer and its q, k, v and gate (per token) of the window (B = 1).
        numbers: numbers of the layers to measure; None for all.

    Returns:
        Pairs of a layer's number and its result, without those that are None.

    Raises:
        ValueError: a number that no layer has.
    """
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    for number in numbers or ():
        if not 0 <= number < len(layers):
            raise ValueError(f"layers: expected numbers from 0 to {len(layers) - 1}, got {number}")
    found: list[tuple[int, Found]] = []

    def look(module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        core = cast(Attention, module).project(args[0], first=given.get("first"))
        core = replace(core, gate=core.gate.per_token(core.q))
        measured = measure(cast(Attention, module), core)
        if measured is not None:
            found.append((layers.index(cast(Attention, module)), measured))

    asked = [layer for number, layer in enumerate(layers) if numbers is None or number in numbers]
    with ExitStack() as hooks:
        for layer in asked:
            hooks.callback(layer.register_forward_pre_hook(look, with_kwargs=True).remove)
        getattr(model, "hidden", model)(tokens[None].to(next(model.parameters()).device))
    return found
