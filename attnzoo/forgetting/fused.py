"""The student on the kernels of FoX, and what it learns from the teacher on those of retention, where the bias of a key
depends on two numbers of the key and its age alone.

Retention that falls with age is its own running minimum, so that no scan along time is needed.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.forgetting.rules import Forgetting, full_bias
from attnzoo.forms.additive import AdditiveForms
from attnzoo.forms.backends.fox_path import on_packed
from attnzoo.forms.options import SoftmaxOptions
from attnzoo.forms.protocol import Call
from attnzoo.kernels.common.retention import Retention, Rule
from attnzoo.kernels.retention import held_keys, key_divergence
from attnzoo.kernels.retention.lesson import Lesson, has_kernel


def fuses(forms: Any, options: Forgetting) -> bool:
    """Whether kernels compute a student of these forms: the network reads no pairs, and no token moves earlier keys."""
    return isinstance(forms, AdditiveForms) and "triton" in forms.forms and not options.of_pairs


def teaches(options: Forgetting) -> bool:
    """Whether kernels compute what a student that :func:`fuses` learns from its teacher: all but
    ``pool="softmax"`` with a discount, and discounts below 1/2."""
    return has_kernel(options.pool, options.discount)


def retention_of_keys(keys: Tensor, options: Forgetting, temperature: float) -> Retention:
    """The retention of keys with features ``[B, G, T, X]`` (``ForgetNetwork.of_keys``), as kernels take it."""
    return Retention(keys.transpose(1, 2), Rule(temperature, options.threshold, options.limit, options.window))


def fused_student(
    forms: AdditiveForms, call: Call, keys: Tensor, options: Forgetting, temperature: float = math.inf
) -> Tensor:
    """The student's output ``[B, T, H, V]`` for whole sequences; without a temperature that of a cache.

    Args:
        forms: of the variant.
        call: inputs and options of the core.
        keys: the network's features of the keys, ``[B, G, T, X]``.
        options: see :class:`~attnzoo.forgetting.rules.Forgetting`.
        temperature: tau.
    """
    given = replace(SoftmaxOptions(**call.options), return_lse=False)
    if given.sink is not None:
        given = replace(given, sink=given.sink + full_bias(options, temperature))
    retention = retention_of_keys(keys, options, temperature)
    o: Tensor = forms.kernels["triton"].run(call.q, call.k, call.v, call.gate, given, retention=retention)
    return o


def fused_teacher(
    forms: AdditiveForms, call: Call, keys: Tensor, options: Forgetting, temperature: float
) -> tuple[Tensor, Tensor]:
    """The teacher's output ``[B, T, H, V]``, and the divergence of each key's retention from its targets, summed over
    rows, ``[B, T, G]``.

    Args:
        forms, call, keys, options, temperature: as in :func:`fused_student`.
    """
    from attnzoo.kernels.fox import fox_attention

    lesson, G = Lesson(options.pool, options.discount, options.normalize, options.divergence), keys.shape[1]

    def taught(
        q: Tensor, k: Tensor, v: Tensor, *, retention: Retention, return_lse: bool, receivers: Any = None, **named: Any
    ) -> tuple[Tensor, Tensor]:
        """Of the arguments of ``fox_attention``; no gradient asks for one that keeps digits, or for log-sum-exps."""
        own = retention._replace(keys=retention.keys[:, :, :: retention.keys.shape[2] // G])
        attended = fox_attention(q, k, v, return_lse=True, **named)
        return attended[0], key_divergence(q, k, v, attended, own, lesson, **named)

    given = SoftmaxOptions(**call.options)
    q, k, v = (x.detach() for x in (call.q, call.k, call.v))
    found: tuple[Tensor, Tensor] = forms.kernels["triton"].run(
        q, k, v, call.gate.map(Tensor.detach), replace(given, sink=None if given.sink is None else given.sink.detach()),
        retention=retention_of_keys(keys, options, temperature), function=taught,
    )  # fmt: skip
    return found


def fused_kept(keys: Tensor, options: Forgetting, temperature: float, given: SoftmaxOptions) -> tuple[Tensor, Tensor]:
    """The expected numbers of keys that rows still see ``[B, G, T]``, and those of all their tokens ``[B or 1, 1, T]``.

    Args:
        keys: the network's features of the keys, ``[B, G, T, X]``.
        given: options of the core.
    """
    retention, T = retention_of_keys(keys, options, temperature), keys.shape[2]

    def held(keys: Tensor, borders: Tensor | None) -> Tensor:
        return held_keys(retention._replace(keys=keys), window=given.window, cu_seqlens=borders, impl="triton")

    tokens = torch.arange(1, T + 1, device=keys.device)[None]
    if given.valid is not None:
        tokens = given.valid.cumsum(1).masked_fill(~given.valid, 0)
    elif given.cu_seqlens is not None:
        borders = given.cu_seqlens.long()
        tokens = tokens - F.pad(borders, (1, 0))[torch.searchsorted(borders, tokens - 1, right=True)]
    tokens = tokens if given.window is None else tokens.clamp(max=given.window)
    if given.valid is None:
        kept = held(retention.keys, given.cu_seqlens)
    else:
        kept = cast(Tensor, on_packed(held, given.valid, retention.keys))
    return kept.transpose(1, 2), tokens[:, None]
