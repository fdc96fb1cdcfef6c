"""The conversion of a trained model to other variants: what its layers become, and the phases that train them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from attnzoo.errors import at_least
from attnzoo.files import json_object, write_whole
from attnzoo.layer.build import build_attention, from_file
from attnzoo.layer.config import PLAIN
from attnzoo.layer.gates import GateProjection, gate_classes, gate_options
from attnzoo.layer.gates.matrix import RotaryAngles
from attnzoo.models.config import LayerSpec, ModelConfig
from attnzoo.models.decoder import LanguageModel
from attnzoo.models.swap import Unfilled, swapped
from attnzoo.registry import get, list_variants
from attnzoo.registry.variant import Variant
from attnzoo.settings import read_settings
from attnzoo.trained.exchange import recipe_of
from attnzoo.training.config import ForgettingConfig, TrainConfig
from attnzoo.training.forgetting import with_forgetting
from attnzoo.training.recipe import load_config, to_yaml
from attnzoo.training.small import model_folder
from attnzoo.training.start import transferred, weights_for

SAME, FORGETTING = "same", "forgetting"  # targets that are no variants
REACH = 8  # gates begin by falling to 1/e in so many contexts
LONGEST = 4096  # tokens of a training row, unless more are asked for
PHASES = {"align": 0.2, "distil": 0.6, "text": 0.2}  # the phases, each with its share of the tokens
SHARE = 0.05  # of the tokens of a run, which convert it
TOKENS = 2**29  # for a model whose own number is unknown: Goldstein et al. (2025) take 350 to 700 million
RATES = {"align": 1e-3, "distil": 1e-4, "text": 3e-5}  # of such a model
OF_THE_PEAK = {"align": 1.0, "distil": 0.5, "text": 0.1}  # rates, as shares of a run's own
OWN = ("output_dir", "start_from", "objective", "teacher", "forgetting")  # keys that each phase sets


@dataclass(frozen=True)
class Target:
    """The variants and options that a model's layers are converted to.

    Args:
        to: a variant, or a list of them as `ModelConfig.attention` takes it, in which `same` keeps a layer as it is; or
            `forgetting`, which adds networks of One-Pass Forgetting to the softmax layers.
        context: tokens of the model's context, of which the gates' reach is 8 times as much.
        rotation: whether layers with RoPE's angles keep them beside the new gate.
        options: of the new layers, which override what they take over.
    """

    to: Any
    context: int
    rotation: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        at_least(self, 1, "context")

    def model(self, source: ModelConfig) -> ModelConfig:
        """The configuration of a model after its conversion.

        Raises:
            ValueError: an unknown variant or option, a list that does not fill the layers, or no layer that changes.
        """
        if self.to == FORGETTING:
            if not self.rotation or self.options.keys() - {FORGETTING}:
                got = [*([] if self.rotation else ["--drop-rotation"]), *(self.options.keys() - {FORGETTING})]
                raise ValueError(f"--to forgetting: expected no changes of the layers beside it, got {', '.join(got)}")
            return with_forgetting(source, self.options.get(FORGETTING, {}))  # type: ignore[no-any-return]
        plain = replace(source, attention=self.to, attention_options={})
        before, made = source.layers(), dict[str, dict[str, Any]]()
        entries = []
        for spec, asked in zip(before, plain.layers(), strict=True):
            kept = asked.name in (SAME, spec.name)
            key = repr((spec, asked))
            if key not in made:
                made[key] = _entry(spec) if kept else self._entry(spec, asked, source)
            entries.append(made[key])
        if entries == [_entry(spec) for spec in before]:
            raise ValueError(f"--to: expected other layers than the model's own, got {self.to!r}")
        grouped = [{**entry, "repeat": len(list(group))} for entry, group in groupby(entries)]
        if len(grouped) > 1 or "norm" in grouped[0]:
            return replace(source, attention=grouped, attention_options={})
        return replace(source, attention=grouped[0]["name"], attention_options=grouped[0]["options"])

    def _entry(self, spec: LayerSpec, asked: LayerSpec, model: ModelConfig) -> dict[str, Any]:
        """A layer of the converted model, as an entry of `ModelConfig.attention`."""
        sizes = {"hidden_size": model.hidden_size, "num_heads": model.num_heads}
        with torch.device("meta"), Unfilled():
            layer = build_attention(spec.name, **{**sizes, **from_file(spec.options)})
        typed, variant = {**self.options, **asked.options}, get(asked.name)
        own = getattr(variant.module, "LAYER", {})
        turns = any(isinstance(part, RotaryAngles) for part in layer.gate.modules())
        if self.rotation and turns and "gate" not in typed:
            variant, typed["gate"] = _rotated(variant)
            if variant.name == spec.name:
                return _entry(spec)
        classes = gate_classes(typed.get("gate", own.get("gate", "none")))
        opened = {name: value for name, value in own.items() if name in gate_options(classes)}
        for cls in classes:
            opened |= cls.opened(REACH * self.context, {**own, **typed})
        kept = {name: value for name, value in spec.options.items() if name != "gate"}
        if "block" not in kept:
            parts = {name: getattr(layer.config, name) for name in PLAIN}
            kept |= {"block": "llama"} | {name: value for name, value in parts.items() if value != PLAIN[name]}
        if variant.side == "linear" and layer.config.output_norm == "none":
            kept["output_norm"] = "rms"  # its sums of values are no means, and grow with the text
        _, options = swapped(variant.name, kept, {**opened, **typed}, sizes)
        return _entry(LayerSpec(variant.name, options, spec.norm))


def _entry(spec: LayerSpec) -> dict[str, Any]:
    return {"name": spec.name, "options": spec.options, **({} if spec.norm == "before" else {"norm": spec.norm})}


def _rotated(variant: Variant) -> tuple[Variant, list[Any]]:
    """The variant whose parts are these and an angle, and its gates, of which RoPE's angles are one."""
    gate = getattr(variant.module, "LAYER", {}).get("gate", "none")
    gates = [name for name in ([gate] if isinstance(gate, str) else gate) if name != "none"]
    if "angle" in variant.requires:
        return variant, [_turning(name) for name in gates]
    parts = {*variant.requires, "angle"}
    others = map(get, list_variants(variant.side))
    return next(other for other in others if {*other.requires} == parts), [*gates, "rotary"]


def _turning(name: Any) -> Any:
    cls: type[GateProjection] = gate_classes(name)[0]
    return "rotary" if cls.provides == ("angle",) else name


def phases(
    source: Path, out: Path, to: Any, overrides: Sequence[str] = (), *, context: int | None = None,
    tokens: int | None = None, rotation: bool = True,
) -> dict[str, TrainConfig]:  # fmt: skip
    """The training runs that convert a model, by name: `align`, `distil` and `text`, each from the weights of the last.

    Layers are first aligned one by one with the original's, then the model learns the original's logits, then the text
    (Goldstein et al., "RADLADS", 2025, arXiv:2505.03005). With the target `forgetting` the first phase trains the
    networks alone, and the second moves their schedule to its end.

    Args:
        source: the folder of a run, a small trained model by its name, or a folder that `attnzoo export` or `attnzoo
            import` wrote.
        out: where the runs go.
        to, rotation: see :class:`Target`.
        overrides: `key=value` of all three; those of `model.attention_options` are of the new layers.
        context: tokens of the model's context; None for what the folder says.
        tokens: of all phases; None for 5% of those of a run, or for 2^29.

    Raises:
        FileNotFoundError: neither a run nor a model folder.
        ValueError: a target that the model cannot become, an unknown context, or settings that conversion makes itself.
    """
    base, known = recipe_of(source), (model_folder(source) / "config.yaml").is_file()
    settings = read_settings(overrides)
    model = dict(settings.pop("model", {}))
    options = model.pop("attention_options", {})
    for name in [*(f"model.{name}" for name in model), *(key for key in OWN if key in settings)]:
        raise ValueError(f"{name}: the conversion sets it; other settings can be given")
    context = context or _context(source, base, known)
    converted = Target(to, context, rotation, options).model(base.model)
    rest = [override for override in overrides if not override.startswith("model")]
    row = base.data.context_length if known else min(context, LONGEST)
    tokens = tokens or (round(SHARE * base.steps * base.batch_size * row) if known else TOKENS)
    base = replace(base, data=replace(base.data, context_length=row))
    base = load_config(asdict(base), [override for override in rest if override.startswith(("batch_size", "data"))])
    if not known:
        base = replace(base, mixed_precision="bf16", gradient_accumulation=base.batch_size)
    batch = base.batch_size * base.data.context_length
    found: dict[str, TrainConfig] = {}
    for phase, share in PHASES.items():
        steps = round(share * tokens / batch)
        if steps < 2:
            least = math.ceil(1.5 / min(PHASES.values()) * batch)
            raise ValueError(f"--tokens: expected at least {least:,}, two steps in each phase, got {tokens:,}")
        lr = OF_THE_PEAK[phase] * base.optimizer.lr if known else RATES[phase]
        config = replace(
            base, output_dir=str(out / phase), model=converted, steps=steps, eval_every=0,
            start_from=str(source if not found else out / list(found)[-1]),
            objective=phase, teacher=None if phase == "text" else str(source),
            checkpoint_every=max(1, steps // 10), forgetting=ForgettingConfig(),
            optimizer=replace(
                base.optimizer, lr=lr, min_lr=min(lr, base.optimizer.min_lr), warmup_steps=steps // 20, extensions=[]
            ),
        )  # fmt: skip
        found[phase] = load_config(asdict(_forgetting(config) if to == FORGETTING else config), rest)
    return found


def _context(source: Path, base: TrainConfig, known: bool) -> int:
    """The tokens of a model's context, of its run's rows or as `config.json` says.

    Raises:
        ValueError: it does not say.
    """
    if known:
        return base.data.context_length
    said = json_object((source / "config.json").read_bytes(), source / "config.json").get("max_position_embeddings")
    if not isinstance(said, int):
        raise ValueError(f"--context: expected the tokens of the model's context, as {str(source)!r} does not say them")
    return said


def _forgetting(config: TrainConfig) -> TrainConfig:
    """A phase of learning what may be forgotten: networks alone, then with all of their weight, then all weights."""
    if config.objective == "align":
        given = ForgettingConfig(distill_steps=config.steps, alone=True)
        return replace(config, objective="text", teacher=None, forgetting=given)
    if config.objective == "distil":
        given = ForgettingConfig(distill_steps=0, anneal_steps=config.steps // 2, alone=True)
        return replace(config, forgetting=given)
    return replace(config, forgetting=ForgettingConfig(distill_steps=0, anneal_steps=0))


def write_phases(source: Path, out: Path, found: Mapping[str, TrainConfig]) -> str:
    """Write each phase's configuration as a file in the folder `out`; return what becomes of the weights, in words.

    Raises:
        FileExistsError: a file of that name holds another configuration; nothing is written then.
        ValueError: weights that do not fit, or data of another tokenizer.
    """
    first = next(iter(found.values()))
    with torch.device("meta"), Unfilled():
        model = LanguageModel(first.model)
    said = transferred(*weights_for(model, str(source), first.data), str(source))
    files = {out / f"{phase}.yaml": to_yaml(config) for phase, config in found.items()}
    for path, text in files.items():
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise FileExistsError(f"--out: expected no {str(path)!r}, or one of this conversion: give another folder")
    out.mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        write_whole(path, text)
    return said
