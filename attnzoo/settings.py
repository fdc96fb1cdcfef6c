"""Settings of files and of a command line: YAML 1.2, whose `010` is ten and whose `1:30` and `no` are texts."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
import typing
from collections.abc import Sequence
from typing import Any, cast

PLAIN = {  # tag -> regular expression and first letters of unquoted values: YAML 1.2.2, 10.3.2, and `1_000`
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    "merge": (r"<<", ["<"]),
}


def read_yaml(text: str, schema: Any = None) -> Any:
    """The keys and values of a YAML 1.2 text.

    Args:
        text: one document.
        schema: the expected dataclass or type. Where it has a str, an unquoted value is taken literally, such as
            `1.10`.

    Raises:
        yaml.YAMLError: it cannot be read, or a key is given twice.
        RecursionError: it is nested too deeply.
    """
    loader = _classes()[0](text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _keep_texts(node, schema)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def write_yaml(value: Any) -> str:
    """A YAML text from which :func:`read_yaml` and readers of YAML 1.1 read an equal value."""
    import yaml

    return str(yaml.dump(value, Dumper=_classes()[1], default_flow_style=False, allow_unicode=True, sort_keys=False))


@functools.cache
def _classes() -> tuple[Any, Any]:
    """The loader of YAML 1.2, and a dumper that quotes texts that look like numbers in YAML 1.1 or 1.2."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        yaml_implicit_resolvers: typing.ClassVar[dict[str, Any]] = {}

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [key.value for key, _ in node.value if key.id == "scalar"]
            if twice := [key for number, key in enumerate(keys) if key in keys[:number]]:
                raise yaml.constructor.ConstructorError(problem=f"found duplicate key {twice[0]}")
            return super().construct_mapping(node, deep)

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        pass

    for tag, (looks, beginnings) in PLAIN.items():
        for either in (Loader, Dumper):
            either.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{looks})$"), beginnings)
    Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: _whole(node.value))
    return Loader, Dumper


def _whole(said: str) -> int:
    return int(said, 16) if said.startswith("0x") else int(said.replace("_", ""))


def _keep_texts(node: Any, schema: Any) -> None:
    """Tag unquoted values of a YAML node as texts where the schema has a str."""
    types = typing.get_args(schema)
    if dataclasses.is_dataclass(schema) and node.id == "mapping":
        fields = typing.get_type_hints(schema)
        for key, value in node.value:
            _keep_texts(value, fields.get(key.value) if key.id == "scalar" else None)
    elif typing.get_origin(schema) is list and node.id == "sequence":
        for item in node.value:
            _keep_texts(item, types[0])
    elif node.id == "scalar" and (schema is str or types == (str, type(None))) and not node.tag.endswith(":null"):
        node.tag = "tag:yaml.org,2002:str"


def read_settings(settings: Sequence[str]) -> dict[str, Any]:
    """`key=value` settings as nested keys and values, later ones over earlier ones.

    It is much faster than `load_config`, which checks each setting and explains errors.

    Raises:
        yaml.YAMLError, omegaconf.errors.OmegaConfBaseException: a value that is not readable.
    """
    return copy.deepcopy(_read(tuple(settings)))


@functools.cache
def _read(settings: tuple[str, ...]) -> dict[str, Any]:
    from omegaconf import OmegaConf

    nested = OmegaConf.create()
    for setting in settings:
        key, _, value = setting.partition("=")
        OmegaConf.update(nested, key, read_yaml(value))
    return cast(dict[str, Any], OmegaConf.to_container(nested))


def check_once(settings: Sequence[str], kind: str) -> None:
    """Raise where a key is given twice, as one value would be ignored.

    Args:
        settings: `key=value` each.
        kind: the word for a setting in the message.

    Raises:
        ValueError: a key that is given twice.
    """
    known = set[str]()
    for setting in settings:
        key, equals, _ = setting.partition("=")
        if equals and key in known:
            raise ValueError(f"{kind} {setting!r}: expected {key} once, got it twice")
        known.add(key)


def names_key(settings: Any, key: str) -> bool:
    """Whether nested settings have a key, given with dots."""
    first, _, rest = key.partition(".")
    return isinstance(settings, dict) and first in settings and (not rest or names_key(settings[first], rest))
