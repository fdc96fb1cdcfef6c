"""Variants of readouts beside the linear and the softmax one: the table of those here, and what one must be."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from attnzoo.algebra.parts import PARTS
from attnzoo.algebra.readout import Readout
from attnzoo.errors import unknown
from attnzoo.readouts.both_directions import BothDirections
from attnzoo.readouts.log_linear import LogLinear
from attnzoo.readouts.normalised import Normalised
from attnzoo.readouts.stick_breaking import StickBreaking
from attnzoo.registry.pair import NAME


@dataclass(frozen=True)
class ReadoutVariant:
    """A variant of another readout: the gate, and the layer, of a variant of a pair.

    Args:
        name: registry name.
        readout: what it makes of scores and decays.
        of: the variant whose gate parts, transition and layer it has.
        title: name in print; the name itself where it is empty.
        layer: defaults of its layer, as ``build_attention`` takes them, over those of ``of`` with the gate projections
            of the readout's own parts.
    """

    name: str
    readout: Readout
    of: str
    title: str = ""
    layer: Mapping[str, Any] = field(default_factory=dict)


# fmt: off
READOUT_VARIANTS = (
    ReadoutVariant("normalised_linear_attention", Normalised(), "fox", "Normalised gated linear attention"),
    ReadoutVariant("log_linear_mamba2", LogLinear(), "mamba2", "Log-linear Mamba-2"),
    ReadoutVariant("log_linear_gated_deltanet", LogLinear(), "gated_deltanet", "Log-linear Gated DeltaNet"),
    ReadoutVariant("stick_breaking", StickBreaking(), "nope", "Stick-breaking attention"),
    ReadoutVariant("bidirectional_fox", BothDirections(), "fox", "Bidirectional FoX"),
)
# fmt: on


def check_readout_variant(one: ReadoutVariant, taken: Collection[str], gates: Mapping[str, Collection[str]]) -> None:
    """Raise where a variant cannot be registered; see :func:`attnzoo.registry.register_readout`.

    Args:
        one: the new variant.
        taken: names of other variants.
        gates: the gate parts of the variants of pairs.
    """
    name, readout = one.name, one.readout
    if not isinstance(name, str) or not re.fullmatch(NAME, name):
        raise ValueError(f"name: expected one of letters, digits and _ (runs' folders have it), got {name!r}")
    if name in taken:
        raise ValueError(f"name: expected a new one, got {name!r}, which is registered already")
    if not isinstance(readout, Readout):
        raise TypeError(f"readout: expected an object of a class Readout, got {readout!r}")
    if one.of not in gates:
        raise unknown("variant", one.of, gates, of=f"the pairs, for {name!r}")
    if not isinstance(one.layer, Mapping):
        raise TypeError(f"layer: expected options by name, such as {{'gate': 'forget'}}, got {one.layer!r}")
    able = [part for part, declared in PARTS.items() if declared.readout]
    for part in readout.parts:
        if part not in able:
            raise unknown("gate part of readouts", part, able)
    reason = readout.refuses(gates[one.of])
    if reason:
        raise ValueError(f"of: expected another gate for {name!r} ({reason}), got that of {one.of!r}")
