"""The rotation of peers' queries and keys: their angles, as contexts are stretched, and what they are multiplied by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnzoo.models.peers.layout import interleaved
from attnzoo.models.peers.settings import Settings

THETA = 10_000.0  # default base of the angles


@dataclass(frozen=True)
class PeerRotation:
    """The rotation of queries and keys in a model of another library.

    Args:
        theta: the base of the angles, before they are scaled.
        angle: radians per token of each pair of a head's channels, 0 where they stand still, `[K / 2]` float32.
        rotated: channels of a head that are rotated, the first ones.
        factor: what the rotated channels of both queries and keys are multiplied by.
        scale: of the scores, without that factor; None for K^(-1/2).
        notes: remarks for the importer.
    """

    theta: float
    angle: Tensor
    rotated: int
    factor: float
    scale: float | None
    notes: tuple[str, ...]

    @property
    def options(self) -> dict[str, Any]:
        """The options of the layer."""
        K = 2 * len(self.angle)
        options: dict[str, Any] = {"theta": self.theta}
        if self.rotated < K:
            options["rotated"] = self.rotated
        whole = self.factor if self.rotated == K else 1.0
        if self.scale is not None or whole != 1:
            options["scale"] = (K**-0.5 if self.scale is None else self.scale) * whole**2
        return options

    def keys(self, rows: Tensor, heads: int) -> Tensor:
        """The rows of keys, or their norm's scale, in our order."""
        return interleaved(rows, heads, self.rotated)

    def queries(self, rows: Tensor, heads: int) -> Tensor:
        """The rows of queries, or their norm's scale, in our order; times the factors where only some are rotated."""
        turned = self.keys(rows, heads)
        if self.rotated < 2 * len(self.angle) and self.factor != 1:
            by_head = turned.unflatten(0, (heads, -1)).clone()
            by_head[:, : self.rotated] *= self.factor**2
            turned = by_head.flatten(0, 1)
        return turned


def rotation(settings: Settings, head_dim: int, partial: float = 1.0, scale: float | None = None) -> PeerRotation:
    """The rotation that a peer's settings describe.

    Args:
        settings: of the model.
        head_dim: K.
        partial: the default share of the channels that are rotated.
        scale: of the scores; None for K^(-1/2).

    Raises:
        ValueError: an unknown kind of scaling, or a share above 1.
    """
    rope = rope_settings(settings, partial)
    share = rope.get("partial_rotary_factor", partial)
    if share > 1:
        raise ValueError(f"{rope.place}partial_rotary_factor: expected a share of the channels, got {share}")
    rotated = int(head_dim * share)
    kind = rope.get("rope_type", "default")
    if kind not in KINDS:
        raise ValueError(f"config.json: rope_type = {kind!r} is not supported (only {', '.join(map(repr, KINDS))})")
    theta = float(rope.get("rope_theta", THETA))
    plain = theta ** (-torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)
    angle, factor = KINDS[kind](rope, settings, plain)
    rope.read.update(
        ("type", "original_max_position_embeddings", *(("factor", "long_factor") if kind in BEYOND else ()))
    )
    notes = (*rope_notes(settings), *rope.unread())
    if kind in BEYOND:
        within = rope["original_max_position_embeddings"]
        notes += (
            f"{kind} angles are those of contexts of up to {within} tokens; beyond, {BEYOND[kind]}, and here not",
        )
    return PeerRotation(theta, pad(angle, (0, (head_dim - rotated) // 2)), rotated, factor, scale, notes)


def _default(rope: Settings, settings: Settings, angle: Tensor) -> tuple[Tensor, float]:
    return angle, 1.0


def _linear(rope: Settings, settings: Settings, angle: Tensor) -> tuple[Tensor, float]:
    """Chen et al., 2023, "Extending Context Window of Large Language Models via Positional Interpolation"."""
    return angle / float(rope.required("factor", "float")), 1.0


def _llama3(rope: Settings, settings: Settings, angle: Tensor) -> tuple[Tensor, float]:
    """Llama 3.1's model card: slow pairs are slowed down, fast ones are not, with a ramp between them."""
    names = ("factor", "low_freq_factor", "high_freq_factor")
    factor, low, high = (float(rope.required(name, "float")) for name in names)
    turns = rope["original_max_position_embeddings"] * angle / (2 * math.pi)  # in the original context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return angle * kept + angle / factor * (1 - kept), 1.0


def _yarn(rope: Settings, settings: Settings, angle: Tensor) -> tuple[Tensor, float]:
    """Peng et al., 2023, YaRN: section 3.2 with the ramp over pairs, section 3.4 with the temperature."""
    length, pairs = rope["original_max_position_embeddings"], len(angle)
    factor = float(rope.optional("factor", "float") or settings["max_position_embeddings"] / length)
    log_theta = math.log(float(rope.get("rope_theta", THETA)))

    def pair_of(turns: float) -> float:
        """The pair that makes that many turns in the original context."""
        return pairs * math.log(length / (turns * 2 * math.pi)) / log_theta

    low, high = pair_of(float(rope.get("beta_fast", 32.0))), pair_of(float(rope.get("beta_slow", 1.0)))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    slowed = ((torch.arange(pairs, dtype=torch.float32) - low) / (high - low or 0.001)).clamp(0, 1)

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0

    given, one, all_ = (rope.optional(name, "float", 0.0) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    inferred = temperature(one) / temperature(all_) if one and all_ else temperature(1.0)
    return angle / factor * slowed + angle * (1 - slowed), float(inferred if given is None else given)


def _longrope(rope: Settings, settings: Settings, angle: Tensor) -> tuple[Tensor, float]:
    """Ding et al., 2024, LongRoPE: a factor for each pair."""
    length = rope["original_max_position_embeddings"]
    factor = rope.optional("factor", "float") or settings.get("max_position_embeddings", length) / length
    short = rope.listed("short_factor", "float", len(angle))
    if short is None:
        raise ValueError(f"{rope.place}expected a value of 'short_factor', found none")
    given = rope.optional("attention_factor", "float")
    inferred = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
    return angle / torch.tensor(short, dtype=torch.float32), float(inferred if given is None else given)


KINDS = {
    "default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope, "su": _longrope,
    "dynamic": _default,
}  # fmt: skip
BEYOND = dict.fromkeys(("longrope", "su"), "transformers takes its long_factor") | {
    "dynamic": "transformers lowers them with the length"
}


def rope_settings(settings: Settings, partial: float = 1.0) -> Settings:
    """The settings of the angles, from `rope_scaling` or `rope_parameters` and from fields beside them.

    As in transformers (5.23, modeling_rope_utils.py) `rope_scaling` alone counts where both exist.

    Args:
        settings: the model's settings.
        partial: the default of `partial_rotary_factor`.

    Raises:
        ValueError: the two fields differ in more than the kind of scaling, or from fields beside them; or layers of
            different kinds have different angles.
    """
    scaling, parameters = (settings.within(name) for name in ("rope_scaling", "rope_parameters"))
    rope = scaling if scaling.fields else parameters
    if any(isinstance(value, dict) for one in (scaling, parameters) for value in one.fields.values()):
        raise ValueError("config.json: rope_parameters that differ between kinds of layers are not supported")
    rope.said_once("rope_type", "type")
    found = {name: value for name, value in rope.fields.items() if value is not None}
    found.setdefault("rope_type", found.get("type", "default"))
    neutral = {"rope_theta": THETA, "partial_rotary_factor": partial, "original_max_position_embeddings": None}
    for name, value in neutral.items():
        if name in settings:
            value = settings.raw(name)
            if found.setdefault(name, value) != value:
                raise ValueError(
                    f"config.json: {name} = {value!r} and {rope.place.removeprefix(settings.place)}{name} = "
                    f"{found[name]!r} say one thing twice, and differ"
                )
        other = parameters.fields.get(name)
        if other is not None and other != found.get(name, value):
            raise ValueError(
                f"config.json: expected {name} = {other!r} of rope_parameters in rope_scaling, too, which counts alone "
                f"where both are there, got {found.get(name)!r}"
            )
    if "max_position_embeddings" in settings:
        found.setdefault("original_max_position_embeddings", settings["max_position_embeddings"])
    return Settings({"partial_rotary_factor": partial, **found}, rope.place)


def rope_by_kind(settings: Settings, bases: Mapping[str, tuple[str, float]]) -> dict[str, Settings]:
    """The model's settings as each kind of layers reads them, where each has angles of its own.

    As in transformers (5.23, Olmo3Config and Gemma3TextConfig) `rope_scaling` is that of layers without windows.

    Args:
        settings: of the model.
        bases: for each kind, the one without windows first, the field and the default of its base.

    Raises:
        ValueError: `rope_parameters` that are not given for each kind.
    """
    given, found = settings.within("rope_parameters"), {}
    if any(not isinstance(value, dict | None) for value in given.fields.values()):
        raise ValueError(f"config.json: rope_parameters: expected those of {', '.join(bases)}, got {given.fields!r}")
    scaling = settings.within("rope_scaling").fields
    for kind, (field, default) in bases.items():
        own = {**given.within(kind).fields, **scaling}
        scaling = {}  # not of the other kinds
        own.setdefault("rope_theta", settings.get(field, default))
        Settings(own, f"{given.place}{kind}.").only("truncate", True)  # transformers does not read it here
        found[kind] = settings.beside({"rope_parameters": own, "rope_scaling": None, "rope_theta": None})
    return found


def rope_notes(settings: Settings) -> tuple[str, ...]:
    """Remarks for the importer where `rope_scaling` and `rope_parameters` both exist."""
    scaling, parameters = (settings.within(name).fields for name in ("rope_scaling", "rope_parameters"))
    if not scaling or not parameters or scaling == parameters:
        return ()
    return ("config.json: rope_scaling counts, and rope_parameters beside it does not, as in transformers",)
