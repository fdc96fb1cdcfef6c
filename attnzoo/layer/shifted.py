"""Shifted sparse attention in training (Chen et al., "LongLoRA", 2024, section 3.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.algebra.gate import Gate
from attnzoo.forms.options import SoftmaxOptions
from attnzoo.forms.protocol import Call


def by_groups(core: Callable[[Call], Tensor], call: Call, group: int) -> Tensor:
    """The output ``[B, T, H, V]`` of a core whose rows see the tokens of their own group alone.

    Groups of the first half of the heads begin with the sequence, those of the second half half a group earlier, so
    that information passes from group to group. The source rolls the tokens of the second half; here its first and last
    groups are shorter, so that no row sees tokens that come after it.

    Args:
        core: the output of a call ``[N, group, H / 2, V]``.
        call: without a state or packed sequences.
        group: tokens of a group, even.

    Raises:
        ValueError: packed sequences.
    """
    given = SoftmaxOptions(**call.options)
    if given.cu_seqlens is not None:
        raise ValueError("cu_seqlens: expected None with training_groups (a group may hold two sequences), got borders")
    halves = zip(*(_halves(x, 2) for x in (call.q, call.k, call.v)), _gates(call.gate.per_token(call.q)), strict=True)
    found = []
    for half, (q, k, v, gate) in enumerate(halves):
        sink, bound = (None if x is None else _halves(x, 0)[half] for x in (given.sink, given.logit_bound))
        one = Call(q, k, v, gate, options=replace(given, sink=sink, logit_bound=bound))
        found.append(_grouped(core, one, group, before=group // 2 * half))
    return torch.cat(found, 2)


def _grouped(core: Callable[[Call], Tensor], call: Call, group: int, before: int) -> Tensor:
    """:func:`by_groups` for heads whose first group lacks its first ``before`` tokens."""
    B, T = call.q.shape[:2]
    after = -(before + T) % group
    cut = partial(_cut, group=group, before=before, after=after)
    given = SoftmaxOptions(**call.options)
    if before or after or given.valid is not None:
        there = torch.ones(B, T, dtype=torch.bool, device=call.q.device) if given.valid is None else given.valid
        given = replace(given, valid=cut(there))
    o = core(Call(cut(call.q), cut(call.k), cut(call.v), call.gate.map(cut), options=given))
    return o.reshape(B, before + T + after, *o.shape[2:])[:, before : before + T]


def _cut(x: Tensor, group: int, before: int, after: int) -> Tensor:
    """``[B, T, ...]`` as groups ``[B * n, group, ...]``, filled up with zeros."""
    x = F.pad(x, (0, 0) * (x.ndim - 2) + (before, after))
    return x.reshape(x.shape[0] * x.shape[1] // group, group, *x.shape[2:])


def _halves(x: Tensor, axis: int) -> Sequence[Tensor]:
    """The first and second half of the heads; twice the whole where all heads share one."""
    return (x, x) if x.shape[axis] == 1 else x.chunk(2, axis)


def _gates(gate: Gate) -> Sequence[Gate]:
    return [gate.map(lambda part: _halves(part, 2)[0]), gate.map(lambda part: _halves(part, 2)[1])]
