"""Settings of files and of a command line: YAML 1.2, whose `010` is ten and whose `1:30` and `no` are texts."""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Sequence
from typing import Any, cast

PLAIN = {  # the looks of values without quotes, and how they may begin: YAML 1.2.2, 10.3.2, and `1_000`
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
        schema: a dataclass or type that they are to fit. Where it wants a text, a value without quotes is the text
            that is written, as `1.10` is.

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
    """YAML that :func:`read_yaml`, and readers of YAML 1.1, read back to an equal value."""
    import yaml  # type: ignore[import-untyped]

    return str(yaml.dump(value, Dumper=_classes()[1], default_flow_style=False, allow_unicode=True, sort_keys=False))


@functools.cache
def _classes() -> tuple[Any, Any]:
    """The loader, and a dumper that puts quotes around a text that looks like a number in either version of YAML."""
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
    """Make texts of the values without quotes in a YAML node for which the schema wants a text."""
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

    It is much faster than to give each of them to `load_config`, which can say of each what is wrong with it.

    Raises:
        yaml.YAMLError, omegaconf.errors.OmegaConfBaseException: a value that is not readable.
    """
    from omegaconf import OmegaConf

    nested = OmegaConf.create()
    for setting in settings:
        key, _, value = setting.partition("=")
        OmegaConf.update(nested, key, read_yaml(value))
    return cast(dict[str, Any], OmegaConf.to_container(nested))


def check_once(settings: Sequence[str], kind: str) -> None:
    """Refuse a key that is given twice, of which one value would be passed over.

    Args:
        settings: `key=value` each.
        kind: what a setting is called.

    Raises:
        ValueError: there is one.
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
