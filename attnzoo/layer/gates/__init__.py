"""The gate projections by name, and how a layer's gate is built from one or several of them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any, Literal, cast

from torch import Tensor, nn

from attnzoo.algebra.gate import Gate, expand_heads
from attnzoo.errors import check_kinds, unknown
from attnzoo.layer.gates.angles import Mamba3Decay, SelectiveAngles
from attnzoo.layer.gates.base import GateProjection, Keyed, Sizes, Strength, Write
from attnzoo.layer.gates.channel import FullRankDiagonal, SoftplusDiagonal
from attnzoo.layer.gates.decay import (
    ALiBiSlope,
    FixedForgetGate,
    ForgetGate,
    IndependentForgetGate,
    Mamba2Decay,
    RetentionDecay,
    SoftplusDecay,
)
from attnzoo.layer.gates.hgrn2 import BoundedForgetGate
from attnzoo.layer.gates.matrix import DeltaRule, LowRankDiagonal, PathTransition, RotaryAngles
from attnzoo.layer.gates.oblique import ObliqueDelta
from attnzoo.layer.gates.readouts import BackwardForgetGate, LevelWeights
from attnzoo.layer.modules import untouched
from attnzoo.layer.stream import Stream
from attnzoo.precision import GateAffine

__all__ = ["GATES", "Combined", "GateName", "GateProjection", "Sizes", "build_gate", "gate_classes", "gate_options"]


class Combined(GateProjection):
    """Several gate projections as one: the union of their gate parts, and the product of their write strengths."""

    def __init__(self, sizes: Sizes, members: Sequence[GateProjection]) -> None:
        super().__init__(sizes)
        self.members = nn.ModuleList(members)

    @property
    def maps(self) -> dict[str, GateAffine]:
        return {
            name: part
            for member in self.members
            if isinstance(member, GateProjection) and untouched(member)
            for name, part in member.maps.items()
        }

    def reset_parameters(self) -> None:
        for member in self.members:
            cast(GateProjection, member).reset_parameters()

    def forward(self, x: Tensor, k: Tensor, stream: Stream) -> tuple[Gate, Write]:
        parts: dict[str, Tensor] = {}
        strengths: list[Tensor | Literal["delta_rule"]] = []
        keys = None
        for member in self.members:
            gate, strength = member(x, k, stream)
            parts.update({name: getattr(gate, name) for name in gate.parts})
            if isinstance(strength, Keyed):
                keys, strength = strength.keys, strength.strength
            strengths += [] if strength is None else [strength]
        together = self._product(strengths, parts)
        return Gate(**parts), together if keys is None else Keyed(keys, together)

    @staticmethod
    def _product(strengths: Sequence[Tensor | Literal["delta_rule"]], parts: dict[str, Tensor]) -> Strength:
        if len(strengths) < 2:
            return strengths[0] if strengths else None
        factors = [parts["beta"] if isinstance(strength, str) else strength for strength in strengths]
        heads = max(factor.shape[2] for factor in factors)  # per key head, or per query head
        first, *rest = (expand_heads(factor, heads) for factor in factors)
        return math.prod(rest, start=first)

    def written(
        self, k: Tensor, v: Tensor, gate: Gate, write: Strength, stream: Stream
    ) -> tuple[Tensor, Tensor, Strength]:
        for member in self.members:
            k, v, write = cast(GateProjection, member).written(k, v, gate, write, stream)
        return k, v, write


GATES: dict[str, type[GateProjection]] = {
    "none": GateProjection,
    "alibi": ALiBiSlope,
    "retention": RetentionDecay,
    "forget": ForgetGate,
    "independent": IndependentForgetGate,
    "fixed": FixedForgetGate,
    "softplus": SoftplusDecay,
    "mamba2": Mamba2Decay,
    "low_rank": LowRankDiagonal,
    "full_rank": FullRankDiagonal,
    "channel_softplus": SoftplusDiagonal,
    "hgrn2": BoundedForgetGate,
    "rotary": RotaryAngles,
    "selective": SelectiveAngles,
    "mamba3": Mamba3Decay,
    "delta": DeltaRule,
    "path": PathTransition,
    "rwkv7": ObliqueDelta,
    "levels": LevelWeights,
    "forget_back": BackwardForgetGate,
}

GateName = str | type[GateProjection]


def gate_classes(gate: GateName | Sequence[GateName]) -> tuple[type[GateProjection], ...]:
    """The projection classes behind a name, a class, or several of them.

    Raises:
        ValueError: an unknown name, none at all, or two that give the same part.
        TypeError: neither a name nor a projection class.
    """
    names = list(gate) if isinstance(gate, list | tuple) else [gate]
    if not names:
        raise ValueError("gate: expected at least one name ('none' for no gate), got none")
    classes: list[type[GateProjection]] = []
    for name in names:
        if isinstance(name, str):
            if name not in GATES:
                raise unknown("gate", name, GATES)
            classes.append(GATES[name])
        elif isinstance(name, type) and issubclass(name, GateProjection):
            classes.append(name)
        else:
            raise TypeError(f"gate: expected a name or a GateProjection class, got {name!r}")
    givers: dict[str, object] = {}
    for name, cls in zip(names, classes, strict=True):
        for part in cls.provides:
            if part in givers:
                raise ValueError(f"gate: expected one projection to {part}, got both {givers[part]!r} and {name!r}")
            givers[part] = name
    return tuple(classes)


def gate_options(classes: Sequence[type[GateProjection]]) -> dict[str, type[GateProjection]]:
    """Names of the keyword options of these projections, each with the class that takes it."""
    return {
        name: cls
        for cls in classes
        for name, parameter in inspect.signature(cls.__init__).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def build_gate(classes: Sequence[type[GateProjection]], sizes: Sizes, options: dict[str, Any]) -> GateProjection:
    """One projection, or several combined, with the options that each takes.

    Raises:
        ValueError: an option that none or several of them take, or a value that does not fit its annotation.
    """
    owner = gate_options(classes)
    for name in options:
        if name not in owner:
            raise unknown("option", name, owner, of="the gate")
        takers = [cls for cls in classes if name in gate_options((cls,))]
        if len(takers) > 1:
            both = " and ".join(cls.__name__ for cls in takers)
            raise ValueError(f"{name}: expected an option of one gate projection, got one that {both} take")
    for cls in classes:
        kinds = cls.__init__.__annotations__
        check_kinds({name: x for name, x in options.items() if owner[name] is cls}, kinds)
    members = [cls(sizes, **{n: x for n, x in options.items() if owner[n] is cls}) for cls in classes]
    return members[0] if len(members) == 1 else Combined(sizes, members)
