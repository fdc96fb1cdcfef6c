"""Exports of a package that are loaded when they are first used."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of ``package``: ``homes`` names the module of each export, relative to the package.

    Configurations and the command line thus start without torch. Asked for another name it raises AttributeError.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    return get
