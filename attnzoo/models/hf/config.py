"""The configuration of a model as a Hugging Face `PretrainedConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from difflib import get_close_matches
from typing import Any, ClassVar

from transformers import PretrainedConfig

from attnzoo.errors import unknown
from attnzoo.layer.build import BUILD_OPTIONS
from attnzoo.layer.config import AttentionConfig
from attnzoo.layer.gates import GATES, gate_options
from attnzoo.models.config import THEIRS, ModelConfig
from attnzoo.models.swap import swapped

# names of the cache in calls and outputs: up to transformers 5.23, and from 5.24 on
CACHE_NAMES = ("past_key_values", "cache")
_FIELDS = {THEIRS.get(field.name, field.name): field for field in fields(ModelConfig)}
_OF_LAYERS = BUILD_OPTIONS | {field.name for field in fields(AttentionConfig)} | {*gate_options(tuple(GATES.values()))}
_OF_LAYERS -= {*_FIELDS, *vars(PretrainedConfig())}  # transformers 4 has a temperature in each configuration
_ELSEWHERE = {  # names in Llama's configurations -> our field or layer option
    "num_key_value_heads": "num_kv_heads",
    "sliding_window": "window",
    "rope_theta": "theta",
    "rms_norm_eps": "norm_eps",
}


class AttnzooConfig(PretrainedConfig):  # type: ignore[misc]
    """The fields of :class:`attnzoo.models.config.ModelConfig`, three of them under Hugging Face's names.

    `num_hidden_layers`, `num_attention_heads` and `tie_word_embeddings` stand for `num_layers`, `num_heads` and
    `tie_embeddings`; all other fields have the same names and defaults.

    Args:
        attention: the variant of each layer: a name, or a list as `ModelConfig` takes it.
        **options: further fields of `ModelConfig`, and whatever `PretrainedConfig` takes.

    Raises:
        ValueError: sizes or patterns that `ModelConfig` refuses, a name that is almost one of its fields', or one of
            the layers' options, which stand in `attention_options`.
    """

    model_type = "attnzoo"
    keys_to_ignore_at_inference: ClassVar[list[str]] = list(CACHE_NAMES)
    attribute_map: ClassVar[dict[str, str]] = dict(THEIRS)

    def __init__(self, attention: Any = "fox", **options: Any) -> None:
        given = {"attention": attention, **options}
        own = {name: given.pop(name, _default(field)) for name, field in _FIELDS.items()}
        given.pop("layer_types", None)
        _check_names(given)
        for name, value in own.items():
            if name != "tie_word_embeddings":
                setattr(self, name, _plain(value))
        super().__init__(tie_word_embeddings=own["tie_word_embeddings"], **given)
        self.tie_word_embeddings = own["tie_word_embeddings"]
        self.native()

    def native(self) -> ModelConfig:
        """This configuration as the decoder's :class:`~attnzoo.models.config.ModelConfig`."""
        return ModelConfig(**{field.name: getattr(self, name) for name, field in _FIELDS.items()})

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The configuration, as `PretrainedConfig` makes it; with another `attention` and no `attention_options`, those
        of the file that it has a use for stay.

        Raises:
            ValueError: no `attention`, neither of the file nor asked for (every file of ours has one).
        """
        if "attention" not in {**config_dict, **kwargs}:
            raise ValueError("config.json: attention: expected the variant of each layer, found no such field")
        asked, options = kwargs.get("attention"), config_dict.get("attention_options")
        if asked not in (None, config_dict.get("attention")) and options and "attention_options" not in kwargs:
            own = {name: config_dict.get(name, _default(field)) for name, field in _FIELDS.items()}
            sizes = {name: own[THEIRS.get(name, name)] for name in ("hidden_size", "num_heads")}
            kwargs["attention"], kwargs["attention_options"] = swapped(asked, options, {}, sizes)
        return super().from_dict(config_dict, **kwargs)

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> ModelConfig:
        """The decoder's :class:`~attnzoo.models.config.ModelConfig` from the fields of a `config.json`.

        Raises:
            ValueError: a field is damaged, or not known; the message names the file and the field.
        """
        try:
            _check_names({name: x for name, x in fields.items() if name not in {*_FIELDS, "layer_types"}})
            return ModelConfig.of_folder(fields)
        except ValueError as error:
            name, colon, rest = str(error).partition(":")
            raise ValueError(f"config.json: {THEIRS.get(name, name)}{colon}{rest}") from error

    @classmethod
    def of(cls, config: ModelConfig, **options: Any) -> AttnzooConfig:
        """The configuration of a decoder with ``config``; `options` are options of `PretrainedConfig`."""
        return cls(**{name: getattr(config, field.name) for name, field in _FIELDS.items()}, **options)


def _check_names(given: Mapping[str, Any]) -> None:
    """Refuse names close to a field's name, and layer options; transformers would store any name as an attribute."""
    for name in given:
        if name in THEIRS:
            raise ValueError(f"{name}: Hugging Face's name for it is {THEIRS[name]}")
        if get_close_matches(name, [*_FIELDS, *THEIRS], 1, cutoff=0.85):
            raise unknown("field", name, _FIELDS)
        option = _ELSEWHERE.get(name, name)
        if option in _FIELDS:
            raise ValueError(f"{name}: it is called {option} here")
        if option in _OF_LAYERS:
            raise ValueError(f"{name}: expected in attention_options, as {{{option!r}: {given[name]!r}}}")


def _default(field: Any) -> Any:
    return field.default if field.default is not MISSING else field.default_factory()


def _plain(value: Any) -> Any:
    """An option's value (a mapping, sequence or object) as lists and dicts for JSON."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value
