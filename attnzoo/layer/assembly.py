"""The parts of an attention layer: modules and parameters that its configuration asks for, and their first values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Self

import torch
from torch import Tensor, nn

from attnzoo.algebra.pruning import Prune
from attnzoo.forgetting.network import ForgetNetwork
from attnzoo.forgetting.rules import Forgetting
from attnzoo.layer.checks import check_layer, keys_per_token
from attnzoo.layer.config import AttentionConfig
from attnzoo.layer.gates import GATES, GateProjection, Sizes, build_gate, gate_classes
from attnzoo.layer.gates.matrix import rotary_angles
from attnzoo.layer.modules import FEATURE_MAPS, HeadNorm, Latent, ShortConvolution, TokenMix, TokenShift, ValueResidual
from attnzoo.layer.starts import NoticedStarts
from attnzoo.precision import LinearMap, fill
from attnzoo.registry.variant import Variant

OWN_GATES = frozenset(GATES.values())


class AttentionParts(NoticedStarts):
    """The parts of an :class:`~attnzoo.layer.attention.Attention`, whose arguments these are."""

    _angle: Tensor | None
    skip: Tensor | None
    correction: Tensor | None
    q_bias: Tensor | None
    k_bias: Tensor | None
    sinks: Tensor | None
    bonus: Tensor | None

    def __init__(
        self,
        variant: Variant,
        config: AttentionConfig,
        gate_options: Mapping[str, Any] | None = None,
        *,
        prune: Prune | None = None,
        impl: str = "auto",
        forgetting: Forgetting | None = None,
        keep_carries: bool = False,
    ) -> None:
        super().__init__()
        check_layer(variant, config, prune, impl, forgetting, keep_carries)
        classes = gate_classes(config.gate)
        self.variant, self.config, self.prune = variant, config, prune
        self.keep_carries = keep_carries
        self.scale, self.core_options = config.scale, config.core_options(variant.side)
        self.keys_per_token = keys_per_token(variant, config, classes, gate_options or {})  # and values
        D, H, G, K, V = config.hidden_size, config.num_heads, config.kv_heads, config.key_dim, config.v_dim
        q_heads, k_heads = config.query_heads, config.key_heads
        self.q_proj = nn.Linear(D, q_heads * K, bias=config.qkv_bias)
        factors = 1 if (gate_options or {}).get("trapezoid") else self.keys_per_token  # that projections make
        k_rows, v_rows = k_heads * factors, G * factors
        inner, shared = config.kv_rank or D, config.shared_key_dim
        self.latent = Latent(D, config.kv_rank, shared, k_rows) if config.kv_rank else None
        self.k_proj = nn.Linear(inner, k_rows * (K - shared), bias=config.qkv_bias)
        self.v_proj = nn.Linear(inner, v_rows * V, bias=config.qkv_bias)
        self.o_proj = nn.Linear(H * V, D, bias=config.output_bias)
        conv = (config.conv_size, config.conv_bias, config.conv_activation)
        self.q_conv = ShortConvolution(q_heads * K, *conv) if config.conv_size else None
        self.k_conv = ShortConvolution(k_rows * K, *conv) if config.conv_size else None
        self.v_conv = ShortConvolution(v_rows * V, *conv) if config.conv_size else None
        self.k_shift = TokenShift(D, k_rows) if config.kv_shift else None
        self.v_shift = TokenShift(D, v_rows) if config.kv_shift else None
        mixed = (0.2, 0.7, 0.7, *((0.2,) if config.output_gate != "none" else ()))
        self.token_mix = TokenMix(D, mixed) if config.token_mix else None
        self.value_residual = ValueResidual(D, rank, v_rows * V) if (rank := config.value_residual) else None
        rms = config.qk_norm.startswith("rms")
        norm = ("rms", config.qk_norm_eps, 1 if config.qk_norm == "rms_full" else None, config.qk_norm_shared)
        self.q_norm = HeadNorm(q_heads, K, *norm) if rms else None
        self.k_norm = HeadNorm(k_heads, K, *norm) if rms else None
        self.gate = build_gate(classes, Sizes(D, H, G, K), dict(gate_options or {}))
        k_biases = H if config.num_qk_heads else k_heads
        for name, there, shape in (
            ("skip", config.skip, (H,)), ("correction", config.query_correction, (q_heads,)),
            ("q_bias", config.qk_bias, (H, K)), ("k_bias", config.qk_bias, (k_biases, K)),
            ("bonus", config.bonus, (H, K)),
        ):  # fmt: skip
            self.register_parameter(name, None)
            if there:
                self.keep(name, torch.ones(shape), trainable=True)
        norm = (config.output_norm, config.output_norm_eps, config.output_norm_groups, config.output_norm_shared)
        self.output_norm = HeadNorm(H, V, *norm, config.output_norm_bias) if config.output_norm != "none" else None
        self.output_gate: nn.Module | None = None
        if config.output_gate_low_rank:
            self.output_gate = nn.Sequential(nn.Linear(D, V, bias=False), nn.Linear(V, H * V))
        elif config.output_gate == "lora":
            maps = (nn.Linear(D, config.gate_rank, bias=False), nn.Linear(config.gate_rank, H * V, bias=False))
            self.output_gate = nn.Sequential(maps[0], nn.Sigmoid(), maps[1])
        elif config.output_gate != "none":
            self.output_gate = nn.Linear(D, H * V, bias=False)
        self.register_parameter("sinks", None)
        if config.sinks:
            self.keep("sinks", torch.zeros(H), trainable=True)
        self._angle = None if config.rotary is None else self._angles()
        self.forget = None if forgetting is None else ForgetNetwork(forgetting, G, K, V, config.window)
        self.picked: str | None = None  # form and device of the last call
        self.impl = impl
        # decided once: no call changes it
        self._factors = factors
        self._heads = ((q_heads, K), (k_rows, K), (v_rows, V))
        self._maps = tuple(
            None if name == "identity" else FEATURE_MAPS[name]
            for name in (config.feature_map, config.key_feature_map or config.feature_map)
        )
        self._own_gate: tuple[nn.Module, ...] = (
            (self.gate,) if all(cls in OWN_GATES for cls in classes) else ()
        )  # no second place of a module
        self.reset_parameters()

    @property
    def impl(self) -> str:
        """The implementation that calls run on, as :func:`~attnzoo.layer.build.build_attention` explains it."""
        return self._impl

    @impl.setter
    def impl(self, impl: str) -> None:
        self._impl = impl
        for part in self.modules():
            if isinstance(part, (HeadNorm, ShortConvolution, GateProjection)):
                part.impl = impl

    def reset_parameters(self) -> None:
        """Initialise linear weights from N(0, 0.02^2), and gates, norms and convolutions as their papers do."""
        for module in self.modules():
            if isinstance(module, LinearMap):
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, (HeadNorm, ShortConvolution, nn.RMSNorm)):
                module.reset_parameters()
        if self.sinks is not None:
            fill(self.sinks, torch.zeros(self.config.num_heads))
        for ones in (self.skip, self.correction, self.q_bias, self.k_bias):
            if ones is not None:
                fill(ones, torch.ones_like(ones))
        if self.bonus is not None:
            fill(self.bonus, torch.full_like(self.bonus, -0.04))
        for part in (self.token_mix, self.value_residual):
            if part is not None:
                part.reset_parameters()
        self.gate.reset_parameters()
        if self.forget is not None:
            self.forget.reset_parameters()
        self.note_starts()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        if self._angle is not None:  # before a call that may be traced
            self.angle_on(next(self.parameters()).device)
        return self

    def angle_on(self, device: torch.device) -> Tensor:
        """The angles of the rotation beside the gate, ``[K/2]`` float64 radians per token.

        They are no buffer: a checkpoint does not hold them, and what fills a layer of the meta device one tensor after
        the other, as transformers does, would leave them at random.
        """
        if self._angle is None or self._angle.device != device:
            self._angle = self._angles().to(device)
        return self._angle

    def _angles(self) -> Tensor:
        assert self.config.rotary is not None
        angles = rotary_angles(self.config.key_dim, self.config.rotary, self.config.rotary_angles == "retnet")
        return angles.double()

    def extra_repr(self) -> str:
        chosen = {
            f.name: getattr(self.config, f.name)
            for f in fields(self.config)
            if getattr(self.config, f.name) != f.default or f.name in ("hidden_size", "num_heads")
        }
        shown = ", ".join(f"{name}={value!r}" for name, value in chosen.items() if name != "gate")
        picked = f" ({self.picked})" if self.picked else ""
        prune = f", prune={self.prune}" if self.prune else ""
        return f"{self.variant.name!r}, {shown}, impl={self.impl!r}{picked}{prune}"
