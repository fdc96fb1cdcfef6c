"""Settings as a command line gives them: `key=value`, the keys dotted, the values YAML."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, cast

OCTAL, BASE_60 = re.compile(r"[-+]?0[0-7_]+"), re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")


def read_settings(settings: Sequence[str]) -> dict[str, Any]:
    """`key=value` settings as nested keys and values, later ones over earlier ones.

    It is much faster than to give each of them to `load_config`, which can say of each what is wrong with it.

    Raises:
        ValueError: a number that YAML reads otherwise than it looks.
        yaml.YAMLError, omegaconf.errors.OmegaConfBaseException: a value that is not readable.
    """
    from omegaconf import OmegaConf

    for setting in settings:
        check_numbers(setting.partition("=")[2], f"setting {setting!r}")
    return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.from_dotlist(list(settings))))


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


def check_numbers(text: str, origin: str) -> None:
    """Refuse numbers that YAML 1.1 reads otherwise than they look: 010 as 8, 1:30 as 90.

    Args:
        text: YAML.
        origin: where it stands.

    Raises:
        ValueError: there is one.
    """
    import yaml  # type: ignore[import-untyped]

    if not (OCTAL.search(text) or BASE_60.search(text)):
        return
    for node in _scalars(yaml.compose(text, Loader=yaml.SafeLoader)):
        said, digits = node.value, node.value.replace("_", "")
        if node.style is not None or not node.tag.endswith((":int", ":float")):
            continue
        octal = OCTAL.fullmatch(said) and int(digits, 8) != int(digits)
        if octal or BASE_60.fullmatch(said):
            read = yaml.safe_load(said)
            base = "base 8" if octal else "base 60"
            raise ValueError(f'{origin}: {said} would be read as {read} ({base}); as a text, it needs quotes: "{said}"')


def _scalars(node: Any) -> Iterator[Any]:
    """The single values of a YAML node, keys included."""
    if isinstance(node.value, str):
        yield node
        return
    for item in node.value:
        for inner in item if isinstance(item, tuple) else (item,):
            yield from _scalars(inner)
