"""attnzoo: every linear recurrence beside its dual softmax position encoding.

``build_attention("fox", acp=True)`` gives a module, ``get("fox").forms["parallel"](q, k, v, Gate(log_decay=g))`` the
function, ``dual("fox")`` the other side of the pair.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from attnzoo.gate import Gate
from attnzoo.pruning import Prune
from attnzoo.registry import Pair, Variant, describe, dual, get, list_variants, pairs, register

if TYPE_CHECKING:
    from attnzoo.attention import Attention, build_attention

__version__ = "0.1.0"
__all__ = [
    "Attention",
    "Gate",
    "Pair",
    "Prune",
    "Variant",
    "build_attention",
    "describe",
    "dual",
    "get",
    "list_variants",
    "pairs",
    "register",
]


def __getattr__(name: str) -> Any:
    if name in ("Attention", "build_attention"):
        return getattr(importlib.import_module("attnzoo.attention"), name)
    raise AttributeError(f"module 'attnzoo' has no attribute {name!r}")
