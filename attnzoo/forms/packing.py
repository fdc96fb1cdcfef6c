"""Packed sequences on a CPU as padded rows of similar lengths, for forms without packing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from attnzoo.algebra.gate import Gate


def in_rows(form: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, gate: Gate, options: Any) -> Any:
    """The output of ``form`` on packed sequences, which run as rows grouped by similar length.

    Rows are padded at the end, which no token sees, to at most twice their length.

    Args:
        form: ``form(q, k, v, gate, options)`` of whole sequences, which returns ``[B, T, ...]`` or a tuple of such.
        q, k, v, gate: one row ``[1, T, ...]`` of packed sequences.
        options: the form's checked options, with ``cu_seqlens``.
    """
    borders = options.cu_seqlens.long()
    per_token = {name: x for name in ("valid", "write") if (x := getattr(options, name, None)) is not None}
    starts, lengths = borders[:-1], borders.diff()
    like = lengths.new_tensor([n.bit_length() for n in lengths.tolist()])
    place = lengths.new_empty(q.shape[1])  # index of each token in the outputs
    outputs: list[tuple[Tensor, ...]] = []
    used, single = 0, True
    for size in like[lengths > 0].unique().tolist():
        chosen = (like == size).nonzero()
        slot = torch.arange(int(lengths[chosen].max()), device=q.device)
        there = slot < lengths[chosen]
        index = torch.where(there, starts[chosen] + slot, starts[chosen])  # [rows, L]

        def pick(x: Tensor, index: Tensor = index) -> Tensor:
            return cast(Tensor, x[0].index_select(0, index.flatten()).unflatten(0, tuple(index.shape)))

        local = gate.map(lambda part, pick=pick: part if part.ndim == 1 else pick(part))  # type: ignore[misc]
        picked = {name: pick(x) for name, x in per_token.items()}
        o = form(pick(q), pick(k), pick(v), local, replace(options, cu_seqlens=None, **picked))
        single = isinstance(o, Tensor)
        outputs.append(tuple(x.flatten(0, 1) for x in ((o,) if single else o)))
        place[index[there]] = (used + torch.arange(index.numel(), device=q.device).view_as(index))[there]
        used += index.numel()
    whole = tuple(torch.cat(parts).index_select(0, place)[None] for parts in zip(*outputs, strict=True))
    return whole[0] if single else whole
