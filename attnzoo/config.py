"""Typed configuration, read from YAML with `key=value` overrides.

A config is a plain dataclass; OmegaConf converts the values, and what it cannot place is refused here with
the nearest valid name. `load_config` serves any dataclass, so that other commands can nest `TrainConfig` in
their own schema.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast, overload

from attnzoo.errors import unknown

T = TypeVar("T")


@dataclass(frozen=True)
class LayerSpec:
    """One layer's attention.

    Args:
        name: of the variant.
        options: given to `build_attention`.
    """

    name: str
    options: dict[str, Any]


@dataclass
class ModelConfig:
    """A decoder of RMSNorm, attention and SwiGLU blocks.

    `attention` is one of

    - a name, for every layer: `fox`;
    - a list that is repeated until the layers are filled: `[mamba2, mamba2, fox]`. A list as long as the
      model is thus a per-layer list. The number of layers must be a multiple of the list's length.

    An entry of the list (or the whole of `attention`) may also be a mapping `{name: fox, repeat: 2, options:
    {acp: true}}`: `repeat` stands for that many equal entries, and `options` are added to `attention_options`
    for those layers only.

    Args:
        attention: the variant of each layer, as above.
        attention_options: given to `build_attention` for every layer; `acp` may be `{eps: 1e-4, bound: tail}` there.
        hidden_size: D.
        num_layers: blocks.
        num_heads: H, query heads per layer.
        intermediate_size: width inside the SwiGLU; None for 8/3 of `hidden_size`, rounded up to a multiple of 64.
        vocab_size: 256 for bytes.
        tie_embeddings: one matrix for the embedding and the head.
        norm_eps: added to mean squares in the blocks' norms.
        initializer_range: standard deviation of the initial linear and embedding weights.

    Raises:
        ValueError: a size below 1, or layers that the list of `attention` does not fill evenly.
    """

    attention: Any = "fox"
    attention_options: dict[str, Any] = field(default_factory=dict)
    hidden_size: int = 256
    num_layers: int = 4
    num_heads: int = 4
    intermediate_size: int | None = None
    vocab_size: int = 256
    tie_embeddings: bool = False
    norm_eps: float = 1e-6
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        _at_least(self, 1, "hidden_size", "num_layers", "num_heads", "vocab_size")
        if self.intermediate_size is not None:
            _at_least(self, 1, "intermediate_size")
        _above(self, 0.0, "norm_eps", "initializer_range")
        self.layers()

    @property
    def mlp_size(self) -> int:
        """The width inside the SwiGLU."""
        return self.intermediate_size or -(-8 * self.hidden_size // (3 * 64)) * 64

    def layers(self) -> list[LayerSpec]:
        """What each of the `num_layers` layers is made of.

        Raises:
            ValueError: an entry is neither a name nor a mapping with a name, or the list does not fill the
                layers evenly.
        """
        entries = self.attention if isinstance(self.attention, list | tuple) else [self.attention]
        pattern = [spec for entry in entries for spec in self._layer_specs(entry)]
        if not pattern:
            raise ValueError("attention: expected a name or a list of names, got an empty list")
        if self.num_layers % len(pattern):
            raise ValueError(
                f"attention: a pattern of {len(pattern)} layers ({', '.join(spec.name for spec in pattern)}) "
                f"does not fill num_layers={self.num_layers} evenly"
            )
        return pattern * (self.num_layers // len(pattern))

    def _layer_specs(self, entry: object) -> list[LayerSpec]:
        if isinstance(entry, str):
            return [LayerSpec(entry, dict(self.attention_options))]
        if not isinstance(entry, Mapping):
            raise ValueError(f"attention: expected a name or a mapping with a name, got {entry!r}")
        for key in entry:
            if key not in ("name", "repeat", "options"):
                raise unknown("key of attention", key, ["name", "repeat", "options"])
        name, repeat, options = entry.get("name"), entry.get("repeat", 1), entry.get("options") or {}
        if not isinstance(name, str):
            raise ValueError(f"attention: expected a mapping with a name, got {dict(entry)!r}")
        if not isinstance(repeat, int) or isinstance(repeat, bool) or repeat < 1:
            raise ValueError(f"attention: repeat of {name} must be a whole number of at least 1, got {repeat!r}")
        if not isinstance(options, Mapping):
            raise ValueError(f"attention: options of {name} must be a mapping, got {options!r}")
        return [LayerSpec(name, {**self.attention_options, **options})] * repeat


@dataclass
class DataConfig:
    """Where the tokens come from, and how they are cut.

    Args:
        source: `stdlib` (the Python standard library's own source), a text file, a folder of text files, or
            pre-tokenised `.npy` / `.bin` files (one, or a folder of them). Text is read byte by byte: the vocabulary is
            256, and a zero byte ends each document.
        context_length: tokens per training sequence.
        heldout_fraction: share of the text that training never sees, by file; of a single file, its end.
        heldout_source: held-out tokens from here instead; then all of `source` is trained on.
        pattern: which files of a text folder, at any depth.
        vocab_size: needed for pre-tokenised files.
        dtype: of `.bin` files.
        seed: of the order in which the text is seen.

    Raises:
        ValueError: a number out of range or an unknown dtype.
    """

    source: str = "stdlib"
    context_length: int = 256
    heldout_fraction: float = 0.05
    heldout_source: str | None = None
    pattern: str = "*"
    vocab_size: int | None = None
    dtype: str = "uint16"
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least(self, 1, "context_length")
        _at_least(self, 0, "seed")
        if not 0 < self.heldout_fraction < 1:
            raise ValueError(f"heldout_fraction must be between 0 and 1, got {self.heldout_fraction}")
        _one_of(self, "dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
        if self.vocab_size is not None:
            _at_least(self, 1, "vocab_size")


@dataclass
class OptimizerConfig:
    """AdamW with a linear warm-up and a cosine to 0, as in the Forgetting Transformer (Lin et al. 2025,
    appendix B).

    Args:
        lr: the peak of the learning rate, reached after `warmup_steps`.
        beta1: decay of the mean of the gradients.
        beta2: decay of the mean of their squares.
        eps: added to the root of the latter.
        weight_decay: not on norms, biases and other one-dimensional parameters.
        clip_norm: longest gradient, over all parameters.
        warmup_steps: of the linear rise; must be below the run's `steps`.

    Raises:
        ValueError: a number out of range.
    """

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    warmup_steps: int = 100

    def __post_init__(self) -> None:
        _above(self, 0.0, "lr", "eps", "clip_norm")
        _at_least(self, 0, "weight_decay", "warmup_steps")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")


@dataclass
class TrainConfig:
    """One training run. Its result depends on this and the data alone, not on the number of processes.

    Args:
        output_dir: the run's folder; a run in it is continued if it is this one, and refused if it is another.
        seed: of the initial weights.
        steps: updates of the weights.
        batch_size: sequences per step, over all processes and accumulated parts.
        gradient_accumulation: parts into which each process cuts its share of a step.
        mixed_precision: `none`, `bf16` or `fp16`.
        device: `auto` (what accelerate finds) or `cpu`.
        log_every: steps between rows of the metrics.
        eval_every: steps between evaluations; 0 for one at the end.
        eval_tokens: held-out tokens per evaluation, spread evenly over the held-out text.
        checkpoint_every: steps between checkpoints; 0 for one at the end.
        keep_checkpoints: the newest ones are kept.
        progress: `auto` (a bar on a terminal, else lines), `bar`, `lines` or `quiet`.
        tensorboard: write the metrics for TensorBoard too.
        model: see `ModelConfig`.
        data: see `DataConfig`.
        optimizer: see `OptimizerConfig`.

    Raises:
        ValueError: a number out of range, an unknown word, or a warm-up that never ends.
    """

    output_dir: str = "runs/default"
    seed: int = 0
    steps: int = 1000
    batch_size: int = 32
    gradient_accumulation: int = 1
    mixed_precision: str = "none"
    device: str = "auto"
    log_every: int = 10
    eval_every: int = 100
    eval_tokens: int = 65536
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    progress: str = "auto"
    tensorboard: bool = True
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        _at_least(
            self,
            1,
            "steps",
            "batch_size",
            "gradient_accumulation",
            "log_every",
            "eval_tokens",
            "keep_checkpoints",
        )
        _at_least(self, 0, "seed", "eval_every", "checkpoint_every")
        _one_of(self, "mixed_precision", ["none", "bf16", "fp16"])
        _one_of(self, "device", ["auto", "cpu"])
        _one_of(self, "progress", ["auto", "bar", "lines", "quiet"])
        if self.optimizer.warmup_steps >= self.steps:
            raise ValueError(
                f"optimizer.warmup_steps={self.optimizer.warmup_steps} must be below steps={self.steps}: "
                "the learning rate would never reach its peak"
            )


@overload
def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> TrainConfig: ...
@overload
def load_config(path: str | Path | None, overrides: Sequence[str], schema: type[T]) -> T: ...
def load_config(path: str | Path | None = None, overrides: Sequence[str] = (), schema: type[Any] = TrainConfig) -> Any:
    """Read a YAML file, apply overrides, and make a config dataclass of it.

    Args:
        path: the file; None for the defaults.
        overrides: `key=value` each: keys are dotted (`model.hidden_size=64`), values are YAML
            (`model.attention=[fox,mamba2]`).
        schema: the dataclass.

    Returns:
        A `schema`, with every field checked.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a key that the schema lacks (the nearest one is named), a value that does not fit, or YAML
            that cannot be read.
    """
    import yaml  # type: ignore[import-untyped]
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    layers = []
    if path is not None:
        if not Path(path).is_file():
            raise FileNotFoundError(f"no configuration file {str(path)!r}")
        try:
            layers.append(OmegaConf.load(path))
        except (yaml.YAMLError, OmegaConfBaseException) as error:
            raise ValueError(f"{path} is not readable as YAML: {error}") from error
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not key or not equals:
            raise ValueError(f"override {override!r}: expected key=value")
        try:
            layers.append(OmegaConf.from_dotlist([override]))
        except (yaml.YAMLError, OmegaConfBaseException) as error:
            raise ValueError(f"override {override!r} is not readable: {_first_line(error)}") from error

    merged = OmegaConf.structured(schema)
    for layer in layers:
        if not isinstance(layer, DictConfig):
            raise ValueError(f"{path}: expected a mapping of keys to values at the top, got a list")
        _check_keys(OmegaConf.to_container(layer), schema)
        try:
            merged = OmegaConf.merge(merged, layer)
        except OmegaConfBaseException as error:
            raise ValueError(_value_error(error)) from error
    try:
        return OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ValueError(_value_error(error)) from error


def save_config(config: Any, path: str | Path) -> None:
    """Write a config dataclass as YAML that `load_config` reads back to an equal one."""
    Path(path).write_text(to_yaml(config), encoding="utf-8")


def to_yaml(config: Any) -> str:
    """A config dataclass as YAML text."""
    from omegaconf import OmegaConf

    return str(OmegaConf.to_yaml(OmegaConf.structured(config)))


def config_differences(old: Any, new: Any) -> dict[str, tuple[Any, Any]]:
    """The dotted fields in which two configs differ, with their (old, new) values as a file would hold them."""
    from omegaconf import OmegaConf

    before, after = (dict(_flatten(OmegaConf.to_container(OmegaConf.structured(config)))) for config in (old, new))
    keys = dict.fromkeys([*before, *after])
    pairs = {key: (before.get(key), after.get(key)) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _flatten(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value


def _check_keys(given: Any, schema: type[Any], prefix: str = "") -> None:
    """Refuse keys that the schema lacks; the rest is left to OmegaConf's own conversion."""
    types = typing.get_type_hints(schema)
    for key, value in given.items():
        if key not in types:
            known = [f"{prefix}{name}" for name in types]
            raise unknown("configuration key", f"{prefix}{key}", known)
        if dataclasses.is_dataclass(types[key]):
            if not isinstance(value, Mapping):
                raise ValueError(f"{prefix}{key}: expected a mapping of keys to values, got {value!r}")
            _check_keys(value, cast(type[Any], types[key]), f"{prefix}{key}.")


def _value_error(error: Exception) -> str:
    key = getattr(error, "full_key", None)
    return f"{key}: {_first_line(error)}" if key else _first_line(error)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _at_least(config: Any, minimum: float, *names: str) -> None:
    for name in names:
        if not getattr(config, name) >= minimum:
            raise ValueError(f"{name} must be at least {minimum}, got {getattr(config, name)}")


def _above(config: Any, minimum: float, *names: str) -> None:
    for name in names:
        if not getattr(config, name) > minimum:
            raise ValueError(f"{name} must be above {minimum:g}, got {getattr(config, name)}")


def _one_of(config: Any, name: str, options: list[str]) -> None:
    if getattr(config, name) not in options:
        raise unknown(name, getattr(config, name), options)
