"""Typed configuration, read from YAML with `key=value` overrides.

A config is a plain dataclass; OmegaConf converts the values, and unknown keys are refused here with the nearest valid
name. `load_config` serves any dataclass, so that other commands can nest `TrainConfig` in their own schema.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import os
import re
import sys
import typing
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast, overload

from attnzoo.errors import in_section, unknown
from attnzoo.models.config import ModelConfig
from attnzoo.models.presets import PresetSettings
from attnzoo.settings import read_yaml, write_yaml
from attnzoo.training.config import TrainConfig

T = TypeVar("T")
logger = logging.getLogger(__name__)
KINDS = {  # kinds of values in a file
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "a mapping",
}


@overload
def load_config(path: str | Path | Mapping[str, Any] | None = None, overrides: Sequence[str] = ()) -> TrainConfig: ...
@overload
def load_config(path: str | Path | Mapping[str, Any] | None, overrides: Sequence[str], schema: type[T]) -> T: ...
def load_config(
    path: str | Path | Mapping[str, Any] | None = None, overrides: Sequence[str] = (), schema: type[Any] = TrainConfig
) -> Any:
    """A config dataclass from a YAML file and overrides.

    Args:
        path: the file, or its keys and values already read; None for the defaults. In a file `${KEY}` stands for the
            value of another key; variables of the environment are not read from it.
        overrides: `key=value` each: keys are dotted (`model.hidden_size=64`), values are YAML
            (`model.attention=[fox,mamba2]`).
        schema: the dataclass.

    Returns:
        A `schema`, with every field checked.

    Raises:
        FileNotFoundError: no such file.
        TypeError: no path and no mapping, or overrides that are one text.
        ValueError: a key that the schema lacks (the nearest one is named), a value that does not fit or is missing
            (`???`), or YAML that cannot be read or is empty.
    """
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not isinstance(path, str | Path | Mapping | None):
        raise TypeError(f"path: expected a file, a mapping or None, got {path!r}")
    if isinstance(overrides, str):
        raise TypeError(f"overrides: expected a list of key=value, got the text {overrides!r}")
    layers = []
    if isinstance(path, Mapping):
        layers.append(("the settings given", "", OmegaConf.create(dict(path))))
    elif path is not None:
        if not Path(path).is_file():
            raise FileNotFoundError(f"no configuration file {str(path)!r}")
        layers.append((str(path), "", _read_yaml(Path(path), schema)))
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not key or not equals:
            raise ValueError(f"override {override!r}: expected key=value")
        if any("\udc80" <= letter <= "\udcff" for letter in override):  # bytes that are not in the terminal's encoding
            utf8 = f"{key}={os.fsencode(override.partition('=')[2]).decode(errors='replace')}"
            raise ValueError(
                f"override {utf8!a}: expected letters, got bytes that are none in the terminal's encoding, "
                f"{sys.getfilesystemencoding()}; with PYTHONUTF8=1 they are read as UTF-8"
            )
        try:
            layer = OmegaConf.create()
            OmegaConf.update(layer, key, read_yaml(override.partition("=")[2], _type_at(schema, key)))
            layers.append((f"override {override!r}", key, layer))
        except (yaml.YAMLError, OmegaConfBaseException, RecursionError) as error:
            value = override.partition("=")[2]
            quoted = key + '="' + value + '"'
            hint = f"; as a text, it needs quotes: '{quoted}'" if value[:1] in tuple("*&!%@`") else ""
            raise ValueError(f"override {override!r} is not readable: {_first_line(error)}{hint}") from error

    if isinstance(path, PresetSettings):
        _keep_tokens(path, layers)
    if _type_at(schema, "model") is ModelConfig:
        _swap_variants(layers)
    merged = copy.deepcopy(_defaults(cast(Any, schema)))
    for origin, key, layer in layers:
        try:
            missing = ", ".join(sorted(OmegaConf.missing_keys(layer)))
            if missing:
                raise ValueError(f"{missing}: ??? stands for a value that is missing; give one or leave it out")
            given = cast(dict[str, Any], OmegaConf.to_container(layer))
            _check_keys(given, schema)
            _empty_mappings(merged, given, schema, key.split("."))
            _replace_other_kinds(merged, layer)
            merged = OmegaConf.unsafe_merge(merged, layer)  # both are ours: nothing is copied
        except OmegaConfBaseException as error:
            raise ValueError(_value_error(error)) from error
        except TypeError as error:  # a list for a mapping: OmegaConf's message has no key
            raise ValueError(f"{origin}: {_first_line(error)}") from error
    try:
        return OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ValueError(_value_error(error)) from error
    except ValueError as error:  # __post_init__ of a section names its field without the section
        raise ValueError(_in_section(merged, str(error))) from error


_hints = functools.cache(typing.get_type_hints)


def _types(schema: Any) -> dict[str, Any]:
    """The types of a schema's fields, by name."""
    return _hints(schema)


@functools.cache
def _defaults(schema: type[Any]) -> Any:
    """A schema's defaults, as an OmegaConf object of which each configuration begins as a copy."""
    from omegaconf import OmegaConf

    return OmegaConf.structured(schema)


def _read_yaml(path: Path, schema: type[Any]) -> Any:
    """The keys and values of a file, as an OmegaConf object."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    try:
        read = read_yaml(text, schema)
        if read is None:
            raise ValueError(f"{path} is empty: expected keys and values, or {{}} for the defaults")
        if not isinstance(read, dict):
            raise ValueError(f"{path}: expected a mapping of keys to values at the top")
        _check_calls(read, str(path))
        return OmegaConf.create(read)
    except (yaml.YAMLError, OmegaConfBaseException, RecursionError) as error:
        raise ValueError(f"{path} is not readable as YAML: {error}") from error


def _check_calls(value: Any, origin: str) -> None:
    """Refuse `${oc.env:NAME}` and other resolvers: a file from somebody else could reveal this machine's
    environment."""
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_calls(inner, origin)
    depth = 0  # nesting depth of ${...}
    for sign in re.findall(r"\$\{|\}|:", value if isinstance(value, str) else ""):
        depth = max(0, depth + {"${": 1, "}": -1, ":": 0}[sign])
        if sign == ":" and depth:
            raise ValueError(
                f"{origin}: expected a value, or ${{KEY}} for that of another key, got {value!r}: files read no "
                'variables of the environment; on the command line KEY="$NAME" does'
            )


def _replace_other_kinds(merged: Any, layer: Any) -> None:
    """Replace a mapping by a list, or the reverse, where a field takes both; OmegaConf merges neither."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    there = dict(merged.items_ex(resolve=False))
    for key, new in layer.items_ex(resolve=False):
        old = there.get(key)
        if OmegaConf.is_dict(old) and OmegaConf.is_dict(new):
            _replace_other_kinds(old, new)
        elif OmegaConf.is_config(old) and OmegaConf.is_config(new) and OmegaConf.is_dict(old) != OmegaConf.is_dict(new):
            with suppress(OmegaConfBaseException):  # where a field takes only one, merging raises
                merged[key] = new


def _empty_mappings(merged: Any, given: Mapping[str, Any], schema: type[Any], path: Sequence[str]) -> None:
    """Empty the free mappings that an override replaces as a whole, which OmegaConf would merge instead.

    Args:
        path: an override's dotted key; a mapping of which it sets one entry is not replaced.
    """
    types, there = _types(schema), dict(merged.items_ex(resolve=False))
    for key, value in given.items():
        inner = path[1:] if path[:1] == [key] else []
        if not isinstance(value, Mapping) or not isinstance(there.get(key), MutableMapping):
            continue
        if dataclasses.is_dataclass(types[key]):
            _empty_mappings(there[key], value, cast(type[Any], types[key]), inner)
        elif not inner:
            merged[key] = {}


def _keep_tokens(settings: PresetSettings, layers: Sequence[tuple[str, str, Any]]) -> None:
    """Keep the tokens of a preset's steps, and so of its run and warm-up, where overrides change the context length."""
    from omegaconf import OmegaConf

    (_, _, preset), *overrides = layers
    typed = {key: OmegaConf.select(layer, key) for _, key, layer in overrides}
    length, before = typed.get("data.context_length"), settings["data"]["context_length"]
    if isinstance(length, int) and 0 < length != before and not {"steps", "batch_size"} & typed.keys():
        fitted = settings.of_context(length)
        batch = fitted["batch_size"]
        tokens = f"{batch * length:,} tokens a step"
        logger.warning("data.context_length=%d: batch_size=%d, for the %s of the recipe", length, batch, tokens)
        preset.merge_with({key: value for key, value in fitted.items() if key not in typed})


def _swap_variants(layers: Sequence[tuple[str, str, Any]]) -> None:
    """Fit what a file says of its variants' layers to the variants that overrides put in their place."""
    from omegaconf import OmegaConf

    def said(layer: Any, name: str) -> Any:
        value = (
            OmegaConf.select(layer, f"model.{name}") if OmegaConf.is_dict(OmegaConf.select(layer, "model")) else None
        )
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value

    (_, key, file), *overrides = layers or [("", "-", None)]
    told = [layer for _, _, layer in overrides if said(layer, "attention") is not None]
    options = {} if key else said(file, "attention_options")
    whole = any(key == "model.attention_options" for _, key, _ in overrides)  # nothing of the file's is left
    if not told or not options or not isinstance(options, dict) or whole:
        return
    attention = said(told[-1], "attention")
    if attention == said(file, "attention"):
        return
    from attnzoo.models.swap import swapped

    typed: dict[str, Any] = {}
    sizes: dict[str, Any] = {}
    for _, _, layer in layers:
        typed |= (said(layer, "attention_options") or {}) if layer is not file else {}
        sizes |= {name: size for name in ("hidden_size", "num_heads") if (size := said(layer, name)) is not None}
    attention, kept = swapped(attention, options, typed, sizes)
    OmegaConf.update(file, "model.attention_options", {k: v for k, v in kept.items() if k not in typed}, merge=False)
    OmegaConf.update(told[-1], "model.attention", attention, merge=False)


def _type_at(schema: Any, key: str) -> Any:
    """The schema's type of a dotted key; None inside a free mapping and for unknown keys."""
    for name in key.split("."):
        schema = _types(schema).get(name) if dataclasses.is_dataclass(schema) else None
    return schema


def save_config(config: Any, path: str | Path) -> None:
    """Write a config dataclass as YAML that `load_config` reads back to an equal one."""
    Path(path).write_text(to_yaml(config), encoding="utf-8")


def to_yaml(config: Any) -> str:
    """A config dataclass as YAML text."""
    return write_yaml(_plain(dataclasses.asdict(config)))


def _plain(value: Any) -> Any:
    """Mappings and lists as a file has them."""
    if isinstance(value, dict):
        return {key: _plain(x) for key, x in value.items()}
    return [_plain(x) for x in value] if isinstance(value, list | tuple) else value


def config_differences(old: Any, new: Any) -> dict[str, tuple[Any, Any]]:
    """The dotted fields in which two configs differ, with their (old, new) values as a file would hold them."""
    before, after = (dict(_flatten(_plain(dataclasses.asdict(config)))) for config in (old, new))
    keys = dict.fromkeys([*before, *after])
    pairs = {key: (before.get(key), after.get(key)) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _flatten(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _check_keys(given: Any, schema: type[Any], prefix: str = "") -> None:
    """Raise for keys that the schema lacks; OmegaConf checks the values."""
    types = _types(schema)
    for key, value in given.items():
        if key not in types:
            known = [f"{prefix}{name}" for name in types]
            raise unknown("configuration key", f"{prefix}{key}", known)
        if dataclasses.is_dataclass(types[key]):
            if not isinstance(value, Mapping):
                raise ValueError(f"{prefix}{key}: expected a mapping of keys to values, got {value!r}")
            _check_keys(value, cast(type[Any], types[key]), f"{prefix}{key}.")
        entry = (*typing.get_args(types[key]), None)[0]
        if typing.get_origin(types[key]) is list and dataclasses.is_dataclass(entry):
            if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
                raise ValueError(f"{prefix}{key}: expected a list of mappings of keys to values, got {value!r}")
            for number, item in enumerate(value):
                _check_keys(item, cast(type[Any], entry), f"{prefix}{key}[{number}].")


def _value_error(error: Exception) -> str:
    """The error for a value that OmegaConf refused, with the expected kind where the field has one."""
    key, name = getattr(error, "full_key", None), str(getattr(error, "key", None))
    section = getattr(error, "object_type", None)
    field = _types(section).get(name) if dataclasses.is_dataclass(section) else None
    kinds = (typing.get_origin(field) or field, *typing.get_args(field))  # int | None has int among its arguments
    kind = next((KINDS[kind] for kind in kinds if kind in KINDS), None)
    if kind is None:
        return f"{key}: {_first_line(error)}" if key else _first_line(error)
    empty = " or null" if type(None) in kinds else ""
    return f"{key}: expected {kind}{empty}, got {getattr(error, 'value', None)!r}"


def _in_section(config: Any, said: str) -> str:
    """A message with the section, such as "data.", of the field that it begins with."""
    from omegaconf import OmegaConf

    entries = [(str(key), config, key) for key in config]
    lists = [key for key in config if OmegaConf.is_list(config[key])]
    entries += [(f"{key}[{number}]", config[key], number) for key in lists for number in range(len(config[key]))]
    for name, owner, key in entries:
        kind = OmegaConf.get_type(owner, key)
        if not dataclasses.is_dataclass(kind) or owner[key] is None:
            continue
        try:
            OmegaConf.to_object(owner[key])
        except ValueError as error:
            if str(error) != said:
                continue
            known = [field.name for field in dataclasses.fields(kind)]
            return in_section(_in_section(owner[key], said), f"{name}.", known)
    return said


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
