"""Lazy exports of a package, imported at their first use."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of ``package``: ``homes`` names the module of each export, relative to the package.

    Configurations and the command line thus start without torch. It raises AttributeError for other names.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    return get
