"""Which form runs: by device for ``impl="auto"``, as told otherwise."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnzoo.algebra.pruning import Prune
from attnzoo.forms.fla import fla_unavailable
from attnzoo.layer.projected import Projected
from attnzoo.layer.stream import LayerCache
from attnzoo.registry import Variant

IMPLS = ("auto", "triton", "fla", "reference")


def choose(
    variant: Variant, impl: str, projected: Projected, valid: Tensor | None = None, cache: LayerCache | None = None
) -> str:
    """The form to run: ``"triton"``, ``"fla"`` or ``"reference"`` (``extend``, which also takes state and padding).

    Raises:
        RuntimeError: an explicit ``impl`` that cannot serve this variant, device or call; it never falls back.
    """
    if impl == "reference" or (impl == "auto" and not projected.q.is_cuda):
        return "reference"
    if impl == "auto":
        able = (form for form in ("triton", "fla") if _unserved(variant, form, projected, valid, cache) is None)
        return next(able, "reference")
    reason = _unserved(variant, impl, projected, valid, cache)
    if reason is not None:
        raise RuntimeError(f"impl={impl!r}: {reason}; use impl='auto' or 'reference'")
    return impl


def _unserved(
    variant: Variant, form: str, projected: Projected, valid: Tensor | None, cache: LayerCache | None
) -> str | None:
    if form not in variant.forms:
        served = ", ".join(variant.forms)
        return f"{variant.name!r} has no {form} form (it has {served})"
    if form == "fla":
        if cache is not None or valid is not None:
            return "the fla form serves whole sequences, without a cache or padding"
        if projected.gate.w is not None and projected.gate.w is not projected.k:
            return "the fla form erases along the key (w = k)"
        return fla_unavailable(projected.q, projected.gate)
    state = None if cache is None else cache.state
    return variant.module.triton_refuses(projected.q, projected.k, projected.v, projected.gate, state, valid) or None


def run(
    variant: Variant,
    form: str,
    projected: Projected,
    scale: float | None,
    cache: LayerCache | None,
    valid: Tensor | None,
    prune: Prune | None,
    logit_bound: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """Output ``[B, T, H, V]`` and the new state (None where no cache is kept)."""
    options: dict[str, Any] = {} if prune is None else {"prune": prune, "logit_bound": logit_bound}
    q, k, v, gate = projected.q, projected.k, projected.v, projected.gate
    if form == "fla":
        return variant.forms["fla"](q, k, v, gate, scale), None
    if form == "triton" and cache is None:
        padding = {} if valid is None else {"valid": valid}
        return variant.forms["triton"](q, k, v, gate, scale, **padding, **options), None
    extend = variant.extend if form == "reference" else variant.module.extend_triton
    state = None if cache is None else cache.state
    o, new_state = extend(q, k, v, gate, state, scale, valid=valid, **options)
    return o, new_state
