"""A row of the table of pairs, and what one must be."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from attnzoo.algebra.parts import PARTS, factors_in, groups, in_product
from attnzoo.algebra.transitions import Transition
from attnzoo.errors import unknown

NAME = r"\w[\w.-]*"  # of a variant
Side = Literal["linear", "softmax", "other"]


def product_of(parts: Collection[str]) -> str:
    """``R_t`` of a gate with these parts, in symbols."""
    return in_product(PARTS[part].factor for part in factors_in(parts))


@dataclass(frozen=True)
class Pair:
    """One row of the table.

    Args:
        linear: name of the linear recurrence.
        softmax: name of its softmax dual.
        requires: gate parts that both take.
        g: the scalar log-decay, in words or symbols; made of ``requires`` when empty.
        R: the matrix transition, in symbols; made of ``transition`` or ``requires`` when empty.
        note: what a reader of the literature should know.
        linear_module: where the linear forms live; when empty, the file of that name for a built-in pair, and else no
            module: forms are made of ``transition`` or ``requires``, and the layer of ``requires``.
        softmax_module: the same of the softmax forms.
        paper: source of what has no module that names one; when empty, those of the parts.
        linear_layer: defaults of the linear side's layer, over those made of ``requires``: what ``build_attention``
            takes. A side with a module has them there, as ``LAYER``.
        softmax_layer: the same of the softmax side.
        transition: R_t of both sides, of a pair without modules; None for the product of the factors of ``requires``.
    """

    linear: str
    softmax: str
    requires: tuple[str, ...]
    g: str = ""
    R: str = ""
    note: str = ""
    linear_module: str = ""
    softmax_module: str = ""
    paper: str = ""
    linear_layer: Mapping[str, Any] = field(default_factory=dict, hash=False)
    softmax_layer: Mapping[str, Any] = field(default_factory=dict, hash=False)
    transition: Transition | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        parts = self.requires if isinstance(self.requires, tuple) else ()  # register says what is wrong
        object.__setattr__(self, "g", self.g or ("g_t" if "log_decay" in parts else "0"))
        own = self.transition.shown if isinstance(self.transition, Transition) else ""
        object.__setattr__(self, "R", self.R or own or product_of(parts))


def check_pair(pair: Pair) -> None:
    """Raise where ``pair`` cannot be registered, whatever else is; see :func:`attnzoo.registry.register`."""
    if not isinstance(pair, Pair):
        raise TypeError(f"pair: expected attnzoo.Pair, got {type(pair).__name__}")
    if not isinstance(pair.requires, tuple):  # a list has no hash
        raise TypeError(f"pair.requires: expected a tuple of names such as ('log_decay',), got {pair.requires!r}")
    check_parts("pair.requires", pair.requires)
    if read := [part for part in pair.requires if PARTS[part].readout]:
        raise ValueError(f"pair.requires: expected parts of g_t and R_t, got {read[0]}, which readouts alone read")
    if len(set(pair.requires)) < len(pair.requires):
        raise ValueError(f"pair.requires: expected each part once, got {', '.join(pair.requires)}")
    for side in ("linear", "softmax"):
        layer, module = getattr(pair, f"{side}_layer"), getattr(pair, f"{side}_module")
        if not isinstance(module, str):
            said = f"expected the name of a module, such as 'package.file', got {module!r}"
            raise TypeError(f"pair.{side}_module: {said}")
        if not isinstance(layer, Mapping):
            raise TypeError(f"pair.{side}_layer: expected options by name, such as {{'gate': 'forget'}}, got {layer!r}")
        if layer and module:
            raise ValueError(f"pair.{side}_layer: expected none beside a module ({module}.LAYER has it), got {layer!r}")
        if pair.transition is not None and module:
            raise ValueError(f"pair.{side}_module: expected none beside a transition, got {module!r}")
    if not isinstance(pair.transition, Transition | None):
        raise TypeError(f"pair.transition: expected an object of a class Transition, got {pair.transition!r}")
    known = [PARTS[part] for part in getattr(pair.transition, "parts", ()) if part in PARTS]
    still = [part.symbol for part in known if not (part.carries or part.decays)]
    if still:
        raise ValueError(
            f"pair.transition: expected gate parts that are factors of R_t (GatePart.matrix), got {still[0]}"
        )
    if pair.linear == pair.softmax:
        raise ValueError(f"pair: expected two different names, got {pair.linear!r} twice")
    for name in (pair.linear, pair.softmax):
        if not isinstance(name, str):
            raise TypeError(f"pair: expected two names, got {name!r}")
        if not re.fullmatch(NAME, name):
            raise ValueError(f"pair: expected names of letters, digits and _ (runs' folders have them), got {name!r}")


def check_parts(name: str, parts: Collection[str]) -> None:
    """``parts`` are those of a gate.

    Raises:
        TypeError: one name, which is a collection of letters.
        ValueError: an unknown part, or w without beta or the other way round.
    """
    if isinstance(parts, str):
        raise TypeError(f"{name}: expected a tuple of names such as ('log_decay',), got {parts!r}")
    for part in parts:
        if part not in PARTS:
            raise unknown("gate part", part, PARTS)
    for group in groups():
        together = [part for part in group if not PARTS[part].optional]
        if set(group) & set(parts) and not set(together) <= set(parts):
            raise ValueError(f"{name}: expected {' and '.join(together)} together, got {', '.join(parts)}")
