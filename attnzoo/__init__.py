"""attnzoo: linear recurrences, each beside its dual softmax position encoding.

``build_attention("fox", acp=True)`` gives a module, ``get("fox").forms["parallel"](q, k, v, Gate(log_decay=g))`` the
function, ``dual("fox")`` the other side of the pair.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnzoo.algebra import oracle as oracle
    from attnzoo.algebra.gate import Gate
    from attnzoo.algebra.pruning import Evict, Prune
    from attnzoo.algebra.readout import Readout, Scores
    from attnzoo.equations import describe
    from attnzoo.forgetting.rules import Forgetting
    from attnzoo.forms.caches.state import KVCache, RecurrentState
    from attnzoo.layer.attention import Attention
    from attnzoo.layer.build import build_attention
    from attnzoo.layer.weight_decay import param_groups
    from attnzoo.registry import dual, get, list_variants, pair_for, pairs, register, register_part, register_readout
    from attnzoo.registry.pair import Pair
    from attnzoo.registry.variant import Variant

__version__ = "0.1.0"
__all__ = [
    "Attention",
    "Evict",
    "Forgetting",
    "Gate",
    "KVCache",
    "Pair",
    "Prune",
    "Readout",
    "RecurrentState",
    "Scores",
    "Variant",
    "build_attention",
    "describe",
    "dual",
    "get",
    "list_variants",
    "pair_for",
    "pairs",
    "param_groups",
    "register",
    "register_part",
    "register_readout",
]
_HOMES = {
    "Attention": "layer.attention",
    "build_attention": "layer.build",
    "Evict": "algebra.pruning",
    "Forgetting": "forgetting.rules",
    "Gate": "algebra.gate",
    "Pair": "registry.pair",
    "KVCache": "forms.caches.state",
    "RecurrentState": "forms.caches.state",
    "Prune": "algebra.pruning",
    "Readout": "algebra.readout",
    "Scores": "algebra.readout",
    "describe": "equations",
    "param_groups": "layer.weight_decay",
    "Variant": "registry.variant",
}


def __getattr__(name: str) -> Any:
    """An export, imported at its first use, so that the command line starts without torch."""
    if name == "oracle":
        return importlib.import_module("attnzoo.algebra.oracle")
    if name not in __all__:
        raise AttributeError(f"module 'attnzoo' has no attribute {name!r}")
    return getattr(importlib.import_module(f"attnzoo.{_HOMES.get(name, 'registry')}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]


importlib.import_module("attnzoo.models.hf.register").register_auto_classes()
