"""Marks of code that ``torch.compile`` leaves as it is, without importing the compiler, which takes as long as torch.

``torch.compiler`` has the first two as decorators, which import it where they stand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from packaging.version import Version

F = TypeVar("F", bound=Callable[..., Any])
KNOWS_EXPORT = Version(torch.__version__) >= Version("2.13")  # before, torch.compile looks like an export


def exporting() -> bool:
    """Whether a program is exported, as far as this torch can tell that from compiling."""
    return torch.compiler.is_exporting() and (KNOWS_EXPORT or not torch.compiler.is_dynamo_compiling())


def untraced(function: F) -> F:
    """``torch.compiler.disable(function)``, once the function is called: torch's own way to wait."""
    disable = getattr(torch._compile, "_disable_dynamo", torch.compiler.disable)
    return cast(F, disable(function))


def constant_in_traces(function: F) -> F:
    """``torch.compiler.assume_constant_result(function)``, which sets this mark and no more."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def cached_in_traces(function: F) -> F:
    """``functools.cache``, whose result is a constant of what is compiled: the compiler warns of caches it sees."""
    cached = functools.cache(function)

    def call(*given: Any) -> Any:
        return cached(*given)

    functools.update_wrapper(call, function)
    del call.__wrapped__  # type: ignore[attr-defined]  # the compiler would look there
    call.cache_clear = cached.cache_clear  # type: ignore[attr-defined]
    return constant_in_traces(cast(F, call))
