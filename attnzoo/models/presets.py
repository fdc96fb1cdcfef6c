"""Presets: models of published sizes and their training recipes by name: ``fox-pro-760m``, ``deltanet-125m``, ...

The sizes and recipes are in ``presets.toml``.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnzoo.errors import nearest
from attnzoo.models.config import ModelConfig

if TYPE_CHECKING:
    from attnzoo.models.decoder import LanguageModel

TABLE = Path(__file__).parent / "presets.toml"
OWN = "own"  # the block of a model whose name has none


@dataclass(frozen=True)
class Recipe:
    """The published recipe by which a model was trained.

    Args:
        tokens: training tokens.
        context_length: tokens of a sequence.
        sequences: sequences per step.
        lr: the peak learning rate, after a linear warm-up and before a cosine.
        min_lr: where the warm-up begins and the cosine ends.
        warmup_tokens: tokens of the warm-up.
        beta1: AdamW's beta1.
        beta2: AdamW's beta2.
        weight_decay: AdamW's weight decay.
        clip_norm: the norm to which gradients are clipped.
        source: the publication.
    """

    tokens: int
    context_length: int
    sequences: int
    lr: float
    min_lr: float
    warmup_tokens: int
    beta1: float
    beta2: float
    weight_decay: float
    clip_norm: float
    source: str

    @property
    def steps(self) -> int:
        """The number of updates of the weights."""
        return self.tokens // (self.context_length * self.sequences)

    @property
    def warmup_steps(self) -> int:
        """The number of updates of the warm-up."""
        return self.warmup_tokens // (self.context_length * self.sequences)


@dataclass(frozen=True)
class Preset:
    """A preset: a named model and its recipe.

    Args:
        name: as in :func:`names`.
        model: its sizes and layers.
        recipe: how it was trained.
    """

    name: str
    model: ModelConfig
    recipe: Recipe

    def train_settings(self) -> PresetSettings:
        """The fields that differ from the defaults of :class:`attnzoo.training.config.TrainConfig`, nested as in a
        file.

        One sequence is computed at a time, in bfloat16 beside float32 weights.
        """
        model, recipe = self.model, self.recipe
        shared = ("lr", "min_lr", "beta1", "beta2", "weight_decay", "clip_norm", "warmup_steps")
        return PresetSettings(self.recipe, {
            "output_dir": f"runs/{self.name}",
            "steps": recipe.steps,
            "batch_size": recipe.sequences,
            "gradient_accumulation": recipe.sequences,
            "mixed_precision": "bf16",
            "eval_every": 1000,
            "checkpoint_every": 500,
            "model": {name: value for name, value in vars(model).items() if value != getattr(ModelConfig(), name)},
            "data": {"context_length": recipe.context_length},
            "optimizer": {name: getattr(recipe, name) for name in shared},
        })  # fmt: skip


class PresetSettings(dict[str, Any]):
    """The settings of a preset's training run.

    Args:
        recipe: of the preset.
        settings: keys and values.
    """

    def __init__(self, recipe: Recipe, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self.recipe = recipe

    def of_context(self, length: int) -> dict[str, int]:
        """The batch, and its parts, with which sequences of another length keep the tokens of the recipe's steps."""
        recipe = self.recipe
        batch = max(1, round(recipe.context_length * recipe.sequences / length))
        parts = self["gradient_accumulation"]
        return {"batch_size": batch, "gradient_accumulation": parts if batch % parts == 0 else batch}


@functools.cache
def _table() -> dict[str, Any]:
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


@functools.cache
def _parsed() -> dict[str, tuple[str, str, str]]:
    """A dict from each preset's name to (model, block, size)."""
    from attnzoo.registry import list_variants

    table = _table()
    models = dict.fromkeys([*table["models"], *list_variants()])
    return {
        "-".join([model, size] if block == OWN else [model, block, size]): (model, block, size)
        for size in table["sizes"]
        for model in models
        for block in table["models"].get(model, {}).get("blocks", table["blocks"])
    }


def names() -> tuple[str, ...]:
    """The names of all presets, one per model, block and size."""
    return tuple(_parsed())


def preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
        ValueError: no such preset; the message explains the names and gives the nearest one.
    """
    if name not in _parsed():
        close = nearest(name, names())
        raise ValueError(
            f"unknown preset {name!r}: expected MODEL-BLOCK-SIZE, or MODEL-SIZE for a paper's own layer, with one of "
            f"{', '.join(dict.fromkeys(model for model, _, _ in _parsed().values()))}, the block llama or pro, and the "
            f"size {', '.join(_table()['sizes'])}" + (f"; did you mean {close!r}?" if close else "")
        )
    model, block, size = _parsed()[name]
    table = _table()
    entry, sizes = table["models"].get(model, {"attention": model}), table["sizes"][size]
    like = sizes.get("like", size)  # the size whose widths it has
    options = {**entry.get("options", {}), **entry.get(f"{block}_options", {}), **table["blocks"][block]}
    options |= {option: value for option, value in sizes.get("options", {}).items() if option in options}
    settings = {
        "attention": entry.get("attention"),
        "attention_options": _serving(entry.get("attention"), options),
        "vocab_size": table["vocab_size"],
        **table["sizes"][like]["model"],
        **sizes.get("model", {}),
        **table["sizes"][like].get(block, {}),
        **entry.get(block, {}).get(like, {}),
    }
    lr = entry.get("lr", {}).get(block, {}).get(size, sizes["lr"])
    return Preset(
        name,
        ModelConfig(**settings),
        Recipe(tokens=sizes["tokens"], lr=lr, **{**table["recipe"], **sizes.get("recipe", {})}),
    )


def _serving(attention: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """The options without `qk_norm_shared` where the layer's keys, unit ones or its gate's, have no learned norm."""
    if attention is None or not options.get("qk_norm_shared"):
        return options
    from attnzoo.layer.gates import gate_classes
    from attnzoo.registry import get

    gate = getattr(get(attention).module, "LAYER", {}).get("gate", "none")
    bare = any(cls.unit_keys or cls.makes_keys for cls in gate_classes(gate))
    return {name: value for name, value in options.items() if not (bare and name == "qk_norm_shared")}


def build(name: str, **changes: Any) -> LanguageModel:
    """The model of that name, with random weights.

    Args:
        name: of a preset.
        changes: fields of :class:`~attnzoo.models.config.ModelConfig` to override, such as ``vocab_size``.

    Raises:
        ValueError: no such preset, or a value out of range.
        TypeError: no such field.
    """
    from attnzoo.models.decoder import LanguageModel
    from attnzoo.models.swap import swapped

    model = preset(name).model
    if "attention" in changes and "attention_options" not in changes:
        sizes = {size: changes.get(size, getattr(model, size)) for size in ("hidden_size", "num_heads")}
        attention, options = swapped(changes["attention"], model.attention_options, {}, sizes)
        changes |= {"attention": attention, "attention_options": options}
    return LanguageModel(replace(model, **changes))


def outline(name: str) -> LanguageModel:
    """The model of that name on the meta device: sizes without numbers."""
    import torch

    from attnzoo.models.swap import Unfilled

    with torch.device("meta"), Unfilled():
        return build(name)


def parameters(name: str) -> dict[str, int]:
    """The numbers of parameters, computed without allocating: ``all``, and ``without_embedding``, which counts the
    head."""
    model = outline(name)
    total = sum(parameter.numel() for parameter in model.parameters())
    return {"all": total, "without_embedding": total - model.embedding.weight.numel()}
