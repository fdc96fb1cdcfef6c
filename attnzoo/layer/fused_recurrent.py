"""A linear layer's step in few operations: products with weights, and one or two fused kernels between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from attnzoo.forms.caches.inplace import MatrixMemory
from attnzoo.kernels.common.parts import Finish, Norm
from attnzoo.kernels.common.untraced import untraced
from attnzoo.kernels.linear import Convolution, RecurrentParts, linear_step, triton_unavailable
from attnzoo.layer.gates import GATES, Combined
from attnzoo.layer.gates.base import GateProjection
from attnzoo.layer.gates.channel import FullRankDiagonal, SoftplusDiagonal
from attnzoo.layer.gates.decay import ForgetGate, SoftplusDecay
from attnzoo.layer.gates.matrix import DeltaRule, LowRankDiagonal
from attnzoo.layer.inplace import FixedCache
from attnzoo.layer.modules import UNIT_EPS, as_built
from attnzoo.recurrences.complex_linear import rotate_all

SERVED = tuple(
    GATES[name]
    for name in (
        "none", "alibi", "retention", "forget", "independent", "fixed", "softplus", "mamba2", "low_rank", "full_rank",
        "channel_softplus", "delta",
    )
)  # fmt: skip


ONE_TOKEN = True  # a step takes one token of each sequence


def serves(layer: Any, memory: Any, dtype: torch.dtype) -> bool:
    """Whether :func:`step` can replace the layer's parts in a step of one token.

    Args:
        dtype: the dtype of the hidden states; a packed (quantised) weight has another.
    """
    config, members, matrix = layer.config, _members(layer.gate), memory.matrix
    plain = config.feature_map == "identity" and config.key_feature_map in ("identity", None)
    if not (
        getattr(getattr(layer.variant.form_set, "kernels", {}).get("triton"), "steps_whole", False)
        and (layer.impl == "triton" or (layer.impl == "auto" and matrix.is_cuda))
        and all(type(member) in SERVED for member in members) and sum(member.writes for member in members) < 2
        and layer.keys_per_token == 1 and layer.k_shift is None and layer.forget is None
        and layer.latent is layer.correction is layer.q_bias is None
        and as_built(layer) and config.qk_norm in ("none", "rms", "l2")
        and (config.rotary is None or (plain and config.qk_norm == "none" and not config.conv_size))
    ):  # fmt: skip
        return False
    k, v = (matrix.new_empty(1, 1, 1, n, dtype=dtype) for n in matrix.shape[2:])
    return triton_unavailable(k, v) == ""


def step(layer: Any, x: Tensor, cache: FixedCache) -> Tensor:
    """The output ``[B, 1, D]`` of one token of each sequence; equal to that of the layer's parts up to rounding."""
    config = layer.config
    rows = [layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)]
    q, k, v = (
        y.unflatten(-1, (-1, n)) for y, n in zip(rows, (config.key_dim, config.key_dim, config.v_dim), strict=True)
    )
    gates = _gates(layer, x)
    if config.rotary is not None:
        q, k = rotate_all(cache.stream(x).positions()[..., None, None] * layer.angle_on(x.device), q, k)
    out = None if layer.output_gate is None else layer.output_gate(x)
    y: Tensor = layer.o_proj(_attend(layer, cache, (q, k, v), gates, out).flatten(2))
    return y


@untraced  # the kernels write to the state in place
def _attend(
    layer: Any, cache: FixedCache, rows: tuple[Tensor, Tensor, Tensor], gates: dict[str, Any], out: Tensor | None
) -> Tensor:
    config, memory = layer.config, cast(MatrixMemory, cache.memory)
    norm = {"none": None, "l2": UNIT_EPS}.get(config.qk_norm)
    weight = None if layer.output_norm is None else layer.output_norm.weight
    finish = Finish(weight, config.output_norm_eps, config.output_norm == "group", out, config.output_gate == "swish")
    parts = RecurrentParts(
        conv=_convolutions(layer, cache),
        maps=(config.feature_map, config.key_feature_map or config.feature_map),
        norm=norm if layer.q_norm is None else Norm(layer.q_norm.weight, layer.k_norm.weight, config.qk_norm_eps),
        skip=layer.skip, gate_first=config.gate_before_norm, groups=config.output_norm_groups, scale=layer.scale,
        finish=finish, **gates,
    )  # fmt: skip
    return linear_step(*rows, state=memory.matrix, active=memory.rows.active, parts=parts)


def _convolutions(layer: Any, cache: FixedCache) -> tuple[Convolution, Convolution, Convolution] | None:
    if layer.q_conv is None:
        return None
    silu = layer.config.conv_activation == "silu"
    q, k, v = (
        Convolution(one.weight, one.bias, cache.windows[name], silu)
        for name, one in (("q", layer.q_conv), ("k", layer.k_conv), ("v", layer.v_conv))
    )
    return q, k, v


def _members(gate: nn.Module) -> Sequence[Any]:
    return list(gate.members) if isinstance(gate, Combined) else [gate]


def _gates(layer: Any, x: Tensor) -> dict[str, Any]:
    """The gate arguments of :func:`~attnzoo.kernels.linear.linear_step`: products of x with the gates' weights."""
    found: dict[str, Any] = {}
    for gate in _members(layer.gate):
        if isinstance(gate, (ForgetGate, SoftplusDecay)):
            found |= {"decay": gate.logits(x), "writes": gate.writes}
        elif isinstance(gate, (LowRankDiagonal, FullRankDiagonal, SoftplusDiagonal)):
            found["diag"] = gate.logits(x)
        elif isinstance(gate, DeltaRule):
            found |= {"beta": gate.beta_proj(x), "beta_factor": 2.0 if gate.allow_neg_eigval else 1.0}
        elif type(gate) is not GateProjection:  # a gate without inputs
            found["decay"] = gate(x, None, None)[0].log_decay
    return found
