"""What each of several ranks computes of one sequence, its fragments timed one after the other on one GPU.

Nothing is exchanged: the keys before a fragment are at hand. So this is what context parallelism cannot be faster than.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from attnzoo import Gate, Prune, get
from attnzoo.benchmarks.context import EPS, SHAPES, both, inputs, timed
from attnzoo.benchmarks.measure import (
    Result,
    chosen_names,
    describe_versions,
    headline,
    markdown_table,
    relative,
    save,
)
from attnzoo.forms.additive import AdditiveForms
from attnzoo.forms.caches.state import KVCache
from attnzoo.parallel import Fragments

PRUNED = {"prune": Prune(EPS)}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense, zigzag": ("zigzag", {}),
    "dense, contiguous": ("contiguous", {}),
    "ACP, zigzag": ("zigzag", PRUNED),
    "ACP, contiguous": ("contiguous", PRUNED),
}


def run(
    out: Path, ranks: Sequence[int], shapes: Sequence[tuple[int, ...]] = (), only: Sequence[str] = (), repeats: int = 5
) -> None:
    """Measure the shares of so many ranks of every shape, with and without pruning, and write what came out."""
    rows = [row for shape in shapes or SHAPES for row in measure(shape, ranks, only, repeats)]
    result: Result = {"machine": describe_versions(), "rows": rows}
    save(out, result, table(result))


def table(result: Result) -> str:
    """The results as Markdown."""
    shown = ("way", "shape", "ranks", "one_ms", "each_ms", "limit", "efficiency")
    lines = [headline(result), "", *markdown_table(shown, ([row[name] for name in shown] for row in result["rows"]))]
    return "\n".join(lines) + "\n"


def measure(shape: Sequence[int], ranks: Sequence[int], only: Sequence[str], repeats: int) -> list[Result]:
    """Rows of one shape (B, H, T, K): the milliseconds of each rank's fragments; ``limit`` is how many times as fast as
    one GPU the busiest rank allows, ``efficiency`` the time of the whole over that of all fragments."""
    *leaves, do = inputs(*shape)
    rows: list[Result] = []
    alone: dict[bool, tuple[Tensor, float]] = {}
    for name in chosen_names([*WAYS], only):
        cut, options = WAYS[name]
        if bool(options) not in alone:
            call = partial(both, get("fox").forms["triton"], leaves, do, **options)
            alone[bool(options)] = call()[0], timed(call, repeats)
        whole, one = alone[bool(options)]
        for number in ranks:
            fragments: Fragments = getattr(Fragments, cut)(shape[2], number)
            took, errors = [0.0] * number, []
            for start, stop, rank in fragments.table:
                call = partial(fragment, leaves, do, start, stop, **options)
                errors.append(relative(call()[0], whole[:, start:stop]))
                took[rank] += timed(call, repeats)
            row = {
                "way": name, "shape": list(shape), "ranks": number, "one_ms": round(one, 2),
                "each_ms": [round(x, 2) for x in took], "limit": round(one / max(took), 2),
                "efficiency": round(one / sum(took), 2), "error": f"{max(errors):.1e}",
            }  # fmt: skip
            rows.append(row)
            print(row, flush=True)
    return rows


def fragment(leaves: Sequence[Tensor], do: Tensor, start: int, stop: int, **options: Any) -> list[Tensor]:
    """The output of the rows from ``start`` to ``stop``, and the gradients of q, of k, v and the gates up to them."""
    firsts = (start, 0, 0, 0)
    q, k, v, g = (x[:, a:stop].detach().requires_grad_() for x, a in zip(leaves, firsts, strict=True))
    forms = cast(AdditiveForms, get("fox").form_set)
    cache = KVCache(k[:, :start], v[:, :start], g[:, :start]) if start else None
    rows = (q, k[:, start:], v[:, start:], Gate(log_decay=g[:, start:]))
    o = forms.go_on("triton", *rows, cache, forms.OPTIONS(**options))[0]
    return [o, *torch.autograd.grad(o, (q, k, v, g), do[:, start:stop])]
