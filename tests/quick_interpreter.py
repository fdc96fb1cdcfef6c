"""Triton's interpreter without the work that it repeats or throws away: the same numbers in half the time.

Per launch and per call of a device function it reads the members of the whole language anew, to replace what is
replaced already; it computes every integer operation a second time in 64 bits for a check that `debug` switches off;
and it makes a table of all types to look up one.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from inspect import getmembers, ismodule
from typing import Any


def quicken() -> None:
    """Replace these parts in `triton.runtime.interpreter`, where they are as expected; else leave it as it is."""
    from triton.runtime import interpreter

    needed = ("_patch_lang", "_LangPatchScope", "_get_np_dtype", "interpreter_builder", "tl")
    if not all(hasattr(interpreter, name) for name in needed):
        return
    tl, builder = interpreter.tl, interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)

    plain_dtype = interpreter._get_np_dtype
    known_dtype = functools.cache(plain_dtype)
    interpreter._get_np_dtype = lambda dtype: (known_dtype if type(dtype) is tl.dtype else plain_dtype)(dtype)

    patch, nothing = interpreter._patch_lang, interpreter._LangPatchScope()
    places = (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base)
    first = {place: next(name for name, x in getmembers(place) if tl.core.is_builtin(x)) for place in places}

    known: dict[tuple[int, int], tuple[dict[str, Any], list[Any]]] = {}

    def places_of(names: dict[str, Any]) -> list[Any]:
        """What is replaced for the functions of a module, of which ``names`` are the globals."""
        key = (id(names), len(names))
        if key not in known:
            modules = [value for value in names.values() if ismodule(value)]
            own = [tl, tl.math] * (tl in modules) + [tl.core] * (tl.core in modules)
            known[key] = (names, [*own, tl.tensor, tl.core.tensor_descriptor_base])  # names: so that its id stays taken
        return known[key][1]

    def patch_once(fn: Any) -> Any:
        if any(tl.core.is_builtin(getattr(place, first[place])) for place in places_of(fn.__globals__)):
            return patch(fn)
        return nothing

    interpreter._patch_lang = patch_once
