"""What a layer is made of, and the block presets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnzoo.errors import unknown
from attnzoo.layer.gates import GateName
from attnzoo.layer.parts import ACTIVATIONS, FEATURE_MAPS

NORMS = ("none", "rms", "l2")
OUTPUT_NORMS = ("none", "rms", "group")
OUTPUT_GATES = ("none", *ACTIVATIONS)


@dataclass(frozen=True)
class AttentionConfig:
    """The parts of a layer.

    Args:
        hidden_size: D.
        num_heads: H, query heads.
        num_kv_heads: G, key/value heads; default H.
        head_dim: K; default D / H.
        value_dim: V; default K.
        feature_map: on q and k: ``identity``, ``silu``, ``relu``, ``elu`` (elu + 1).
        qk_norm: on q and k per head: ``none``, ``rms`` (learned scale), ``l2`` (unit length).
        conv_size: short convolution on q, k and v over that many tokens; 0 for none.
        kv_shift: data-dependent shift of k and v by one token (FoX, appendix A).
        rotary: rotate q and k with this base beside the gate (RetNet); None for none.
        output_norm: per head before the output gate: ``none``, ``rms``, ``group``.
        output_gate: ``none``, ``sigmoid`` or ``swish`` of a projection of x, times the output.
        gate: gate projection(s) by name (``attnzoo.layer.gates.GATES``) or class.
        norm_eps: added to mean squares in norms.
        window: each token sees itself and the ``window - 1`` tokens before it (softmax side); None for all.
        sinks: a learned logit per head that takes part in the softmax without a value, 0 at the start, in float32
            (softmax side; as in gpt-oss, OpenAI, 2025, where it is drawn from N(0, 0.02^2)).
    """

    hidden_size: int = 768
    num_heads: int = 12
    num_kv_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    feature_map: str = "identity"
    qk_norm: str = "none"
    conv_size: int = 0
    kv_shift: bool = False
    rotary: float | None = None
    output_norm: str = "none"
    output_gate: str = "none"
    gate: GateName | Sequence[GateName] = "none"
    norm_eps: float = 1e-6
    window: int | None = None
    sinks: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "value_dim", "window"):
            size = getattr(self, name)
            if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
                raise ValueError(f"{name}: expected a positive integer, got {size!r}")
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size: expected a multiple of num_heads = {self.num_heads} (or head_dim given), "
                f"got {self.hidden_size}"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_kv_heads: expected a divisor of num_heads = {self.num_heads}, got {self.kv_heads}")
        if not isinstance(self.sinks, bool):
            raise ValueError(f"sinks: expected True or False, got {self.sinks!r}")
        if not isinstance(self.conv_size, int) or self.conv_size < 0:
            raise ValueError(f"conv_size: expected a number of tokens >= 0, got {self.conv_size!r}")
        for name, options in (
            ("feature_map", tuple(FEATURE_MAPS)),
            ("qk_norm", NORMS),
            ("output_norm", OUTPUT_NORMS),
            ("output_gate", OUTPUT_GATES),
        ):
            if getattr(self, name) not in options:
                raise unknown(name, getattr(self, name), options)

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def key_dim(self) -> int:
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def v_dim(self) -> int:
        return self.value_dim or self.key_dim


PLAIN = {
    "feature_map": "identity", "qk_norm": "none", "conv_size": 0, "kv_shift": False,
    "output_norm": "none", "output_gate": "none",
}  # fmt: skip
BLOCKS: Mapping[str, Mapping[str, Any]] = {
    "llama": PLAIN,
    "pro": {**PLAIN, "qk_norm": "rms", "kv_shift": True, "output_norm": "rms", "output_gate": "sigmoid"},
}
