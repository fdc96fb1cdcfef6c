"""A layer's step over pages in few operations: products with weights, and fused kernels between them."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from attnzoo.algebra.gate import Gate
from attnzoo.forms.caches.inplace import Memory
from attnzoo.forms.caches.pages.inplace import PagedMemory
from attnzoo.kernels.common.parts import Finish, Norm
from attnzoo.kernels.common.untraced import untraced
from attnzoo.kernels.decode import Forget, Shift
from attnzoo.layer.gates import GATES
from attnzoo.layer.gates.decay import ForgetGate
from attnzoo.layer.inplace import FixedCache, FixedStream
from attnzoo.layer.modules import as_built

OF_X = tuple(GATES[name] for name in ("none", "alibi", "forget", "independent", "fixed", "softplus"))  # of x alone


ONE_TOKEN = False


def serves(layer: Any, memory: Memory, dtype: torch.dtype) -> bool:
    """Whether :func:`step` can replace the layer's parts in a step over ``memory``, the in-place memory of its
    cache."""
    config = layer.config
    return (
        type(layer.gate) in OF_X
        and not layer.variant.carries and layer.config.rotary is None and layer.forget is None
        and layer.skip is layer.correction is None and layer.keys_per_token == 1 and config.num_qk_heads is None
        and {config.feature_map, config.key_feature_map} <= {"identity", None}
        and config.qk_norm in ("none", "rms") and config.output_norm_groups is None and not config.gate_before_norm
        and as_built(layer)
    )  # fmt: skip


def step(layer: Any, x: Tensor, cache: FixedCache) -> Tensor:
    """The output ``[B, T, D]`` of a step; equal to that of the layer's parts up to rounding."""
    config, stream = layer.config, cache.stream(x)
    q, k, v = layer.rows(x, stream)
    k_mix, v_mix = (None if shift is None else shift.proj(x) for shift in (layer.k_shift, layer.v_shift))
    heads = q.unflatten(-1, (-1, config.key_dim)), k.unflatten(-1, (-1, config.key_dim))
    gate = _gate(layer, x, *heads, stream)
    out = None if layer.output_gate is None else layer.output_gate(x).unflatten(-1, (-1, config.v_dim))
    if k_mix is not None and x.shape[1] > 1:
        stream.before("k_shift", k)  # stored until the number of tokens that stay is known
        stream.before("v_shift", v)
    o = _attend(layer, cache, (*heads, v.unflatten(-1, (-1, config.v_dim))), gate, (k_mix, v_mix), out)
    y: Tensor = layer.o_proj(o.flatten(2))
    return y


def _gate(layer: Any, x: Tensor, q: Tensor, k: Tensor, stream: FixedStream) -> Tensor | Forget | None:
    """The log decays ``[B, T, H]``, or the logits from which the kernel computes them; None without a gate."""
    if type(layer.gate) is ForgetGate:
        of = layer.gate.logits(x)
        return Forget(of.logits, of.bias, of.factor)
    gate: Gate = layer.gate(x, k, stream)[0]
    return gate.per_token(q).log_decay


@untraced  # the kernels write to the pool in place
def _attend(
    layer: Any, cache: FixedCache, rows: tuple[Tensor, Tensor, Tensor], gate: Tensor | Forget | None,
    mix: tuple[Tensor | None, Tensor | None], out: Tensor | None,
) -> Tensor:  # fmt: skip
    config, (_, k, v) = layer.config, rows
    parts: dict[str, Any] = {"gate": gate}
    if mix[0] is not None and mix[1] is not None:
        before = (cache.windows[name].view(-1, *x.shape[2:]) for name, x in (("k_shift", k), ("v_shift", v)))
        parts["shift"] = Shift(mix[0], mix[1], *before)
    if layer.q_norm is not None:
        parts["norm"] = Norm(layer.q_norm.weight, layer.k_norm.weight, config.qk_norm_eps)
    norm: nn.Module | None = layer.output_norm
    scale = None if norm is None else norm.weight
    centred, swish = config.output_norm == "group", config.output_gate == "swish"
    if scale is not None or out is not None:
        parts["finish"] = Finish(scale, config.output_norm_eps, centred, out, swish)  # type: ignore[arg-type]
    return cast(PagedMemory, cache.memory).whole_step(rows, parts, layer.step_options(cache.bound)).to(v.dtype)
