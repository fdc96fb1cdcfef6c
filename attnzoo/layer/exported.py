"""The reference forms as one operator of an exported program.

A traced reference form would fix the number of its blocks and so T. As a custom operator it stays whole in
``torch.export``, and T may vary. A process that loads an exported program must ``import attnzoo.layer.exported``. The
operator has no gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.algebra.pruning import Bound, Prune
from attnzoo.registry import get

Some = Tensor | None


@torch.library.custom_op("attnzoo::attend", mutates_args=())
def attend(
    variant: str, form: str, q: Tensor, k: Tensor, v: Tensor, parts: str, gate: Sequence[Tensor], scale: float | None,
    valid: Some, cu_seqlens: Some, write: Some, delta_rule: bool, window: int | None, sink: Some, eps: float | None,
    bound: str, logit_bound: Some,
) -> Tensor:  # fmt: skip
    """The output of ``form`` of ``variant``, ``[B, T, H, V]``; ``parts`` are the names of the gate's parts, separated
    by spaces."""
    options = {
        "scale": scale, "valid": valid, "cu_seqlens": cu_seqlens, "write": write, "delta_rule": delta_rule or None,
        "window": window, "sink": sink, "prune": None if eps is None else Prune(eps, cast(Bound, bound)),
        "logit_bound": logit_bound,
    }  # fmt: skip
    given = {name: value for name, value in options.items() if value is not None}
    named = dict(zip(parts.split(), gate, strict=True))
    o: Tensor = get(variant).forms[form](q, k, v, Gate(**named), **given)
    return o.contiguous()


@attend.register_fake
def _(variant: str, form: str, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return v.new_empty(*q.shape[:3], v.shape[3])


def exported(
    variant: str, form: str, q: Tensor, k: Tensor, v: Tensor, gate: Gate, options: Mapping[str, Any]
) -> Tensor:
    """The output of ``forms[form](q, k, v, gate, **options)``, computed by the operator :func:`attend`."""
    prune: Prune | None = options.get("prune")
    pruning = (None, "") if prune is None else (prune.eps, prune.bound)
    names = ("scale", "valid", "cu_seqlens", "write")
    o: Tensor = attend(
        variant, form, q, k, v, " ".join(gate.parts), [getattr(gate, name) for name in gate.parts],
        *(options.get(name) for name in names), "delta_rule" in options, options.get("window"), options.get("sink"),
        *pruning, options.get("logit_bound"),
    )  # fmt: skip
    return o
