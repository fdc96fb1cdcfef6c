"""The reference forms as one operator of an exported program.

A traced reference form would fix the number of its blocks and so T. As a custom operator it stays whole in
``torch.export``, and T may vary. A process that loads an exported program must ``import attnzoo.layer.exported``. The
operator has no gradient.
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.algebra.pruning import Prune
from attnzoo.registry import get

TENSORS = ("valid", "cu_seqlens", "write", "sink", "logit_bound")  # options that are tensors


@torch.library.custom_op("attnzoo::attend", mutates_args=())
def attend(
    variant: str, form: str, q: Tensor, k: Tensor, v: Tensor, parts: str, gate: Sequence[Tensor], names: str,
    tensors: Sequence[Tensor], rest: str,
) -> Tensor:  # fmt: skip
    """The output of ``form`` of ``variant``, ``[B, T, H, V]``.

    Args:
        parts, names: names of the gate's parts and of the options that are tensors, separated by spaces.
        rest: the other options as ``name=value``, separated by spaces; ``prune`` as its fields ``eps`` and ``bound``.
    """
    named, numbers = dict(zip(parts.split(), gate, strict=True)), {}
    for word in rest.split():
        name, _, value = word.partition("=")
        numbers[name] = literal_eval(value)
    if "eps" in numbers:
        numbers["prune"] = Prune(numbers.pop("eps"), numbers.pop("bound"))
    given = dict(zip(names.split(), tensors, strict=True))
    o: Tensor = get(variant).forms[form](q, k, v, Gate(**named), **given, **numbers)
    return o.contiguous()


@attend.register_fake
def _(variant: str, form: str, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return v.new_empty(*q.shape[:3], v.shape[3])


def exported(
    variant: str, form: str, q: Tensor, k: Tensor, v: Tensor, gate: Gate, options: Mapping[str, Any]
) -> Tensor:
    """The output of ``forms[form](q, k, v, gate, **options)``, computed by the operator :func:`attend`."""
    prune: Prune | None = options.get("prune")
    numbers = [f"{name}={value!r}" for name, value in options.items() if name not in (*TENSORS, "prune")]
    if prune is not None:
        numbers += [f"eps={prune.eps!r}", f"bound={prune.bound!r}"]
    given = {name: options[name] for name in TENSORS if name in options}
    o: Tensor = attend(
        variant, form, q, k, v, " ".join(gate.parts), [getattr(gate, name) for name in gate.parts],
        " ".join(given), [*given.values()], " ".join(numbers),
    )  # fmt: skip
    return o
