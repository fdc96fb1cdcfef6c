"""One variant in the place of another: which options of its layers the new one has a use for."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from attnzoo.layer.build import build_attention, from_file
from attnzoo.models.config import ModelConfig

logger = logging.getLogger(__name__)


ELEMENTWISE = {"exp", "expm1", "log", "neg", "uniform_"}


class Unfilled(TorchFunctionMode):
    """A torch function mode that leaves out ``torch.nn.init``, and functions of each element.

    On the meta device tensors have no values, and most of the time of making a layer would go there: PyTorch imports
    its compiler for the first function of a tensor without values.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        if getattr(func, "__name__", "") in ELEMENTWISE and args and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


def swapped(
    attention: Any, options: Mapping[str, Any], typed: Mapping[str, Any], sizes: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """`attention` and `attention_options` of a model in which other variants take the places of its own.

    Of the options for the variants before, those that a new one has no use for are left out, and a line names them.
    Where layers differ in what they can use, each entry of `attention` has its own.

    Args:
        attention: the new variants, as in :class:`ModelConfig`.
        options: for the variants before.
        typed: options that were asked for together with `attention`: they are kept, and refused where they do not fit.
        sizes: `hidden_size` and `num_heads` of the model.
    """
    listed = attention if isinstance(attention, list | tuple) else [attention]
    entries = [entry if isinstance(entry, Mapping) else {"name": entry} for entry in listed]
    kept = [_useful(entry, {**options, **typed}, typed, sizes) for entry in entries]
    if all(found == kept[0] for found in kept):
        return attention, kept[0]
    pairs = zip(entries, kept, strict=True)
    return [{**entry, "options": {**found, **(entry.get("options") or {})}} for entry, found in pairs], dict(typed)


def _useful(
    entry: Mapping[str, Any], options: Mapping[str, Any], typed: Collection[str], sizes: Mapping[str, Any]
) -> dict[str, Any]:
    """The options that an entry's layer can be built with, in their order; all that are typed are among them."""

    def builds(names: Collection[str]) -> bool:
        chosen = {name: options[name] for name in names}
        try:
            spec = ModelConfig({**entry, "repeat": 1}, chosen, num_layers=1, **sizes).layers()[0]
            with torch.device("meta"), Unfilled():
                build_attention(spec.name, **{**sizes, **from_file(spec.options)})
        except (ValueError, TypeError):
            return False
        return True

    found = set(typed)
    if builds(found):
        while more := [name for name in options if name not in found and builds({*found, name})][:1]:
            found.update(more)  # one by one: an option may need another that stands behind it
        if without := [name for name in options if name not in found]:
            logger.warning("model.attention: %s has no use for %s, left out", entry["name"], ", ".join(without))
    return {name: value for name, value in options.items() if name in found}


def projection_of(name: str) -> str:
    """The weight's name in a layer where its gate projection is the only one."""
    return re.sub(r"\.gate\.members\.\d+\.", ".gate.", name)


def by_projection(names: Collection[str]) -> dict[str, str]:
    """The names by their :func:`projection_of`, without those that two names share."""
    times = Counter(map(projection_of, names))
    return {projection_of(name): name for name in names if times[projection_of(name)] == 1}
