"""The configuration of a layer, and the block presets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from attnzoo.errors import WIDEST, check_kinds
from attnzoo.layer.gates import GateName
from attnzoo.layer.modules import ACTIVATIONS, CONV_ACTIVATIONS, FEATURE_MAPS, ROTARY_ANGLES

NORMS = ("none", "rms", "rms_full", "l2")
OUTPUT_NORMS = ("none", "rms", "group")
OUTPUT_GATES = ("none", *ACTIVATIONS)
CHOICES: dict[str, tuple[str | None, ...]] = {
    "feature_map": tuple(FEATURE_MAPS), "key_feature_map": (None, *FEATURE_MAPS), "qk_norm": NORMS,
    "conv_activation": CONV_ACTIVATIONS, "rotary_angles": ROTARY_ANGLES, "output_norm": OUTPUT_NORMS,
    "output_gate": OUTPUT_GATES,
}  # fmt: skip
SIZES = (
    "hidden_size", "num_heads", "num_kv_heads", "num_qk_heads", "head_dim", "value_dim", "output_norm_groups", "window",
    "kv_rank", "value_residual", "output_gate_rank", "training_groups",
)  # fmt: skip
POSITIVE = ("scale", "softcap", "qk_norm_eps", "output_norm_eps", "expand")

INSTEAD = {"value_dim": "expand", "num_kv_heads": "num_qk_heads"}  # a given key replaces the value's option
NEEDS = {  # an option -> the options one of which must be on for it to have an effect
    "qk_norm_shared": ("qk_norm",), "qk_norm_eps": ("qk_norm",), "output_norm_eps": ("output_norm",),
    "conv_bias": ("conv_size",), "conv_activation": ("conv_size",),
    "rotary_angles": ("rotary",), "output_norm_groups": ("output_norm",), "output_norm_shared": ("output_norm",),
    "shared_key_dim": ("kv_rank",), "output_norm_bias": ("output_norm",), "output_gate_rank": ("output_gate",),
    "gate_before_norm": ("output_norm", "output_gate"), "output_gate_low_rank": ("output_gate",),
}  # fmt: skip
OFF = (None, 0, "none")
OF_SOFTMAX = ("window", "sinks", "softcap", "training_groups")  # parts of the softmax side alone
OF_CORE = ("scale", "window", "softcap")  # options of the core that are numbers


@dataclass(frozen=True)
class AttentionConfig:
    """The parts of a layer.

    Args:
        hidden_size: D.
        num_heads: H, query heads.
        num_kv_heads: G, key/value heads; default H.
        num_qk_heads: heads of q and k, where each serves H / num_qk_heads value heads (grouped values; Mamba-2's
            groups of B and C); default one for each query or key head.
        head_dim: K; default D / H.
        value_dim: V; default K.
        expand: V as a multiple of D / H, where ``value_dim`` is not given.
        feature_map: on q and k: ``identity``, ``silu``, ``relu``, ``elu`` (elu + 1).
        key_feature_map: on k alone; None for ``feature_map``.
        qk_norm: on q and k: ``none``, ``rms`` per head (learned scale), ``rms_full`` over all heads together (OLMo 2),
            ``l2`` per head, to length 1.
        qk_norm_shared: one learned scale for all heads of q, and one for those of k.
        qk_norm_eps: added to the mean squares of q and k.
        conv_size: short convolution on q, k and v over that many tokens; 0 for none.
        conv_bias: with a learned bias per channel.
        conv_activation: after it: ``silu`` or ``identity`` (none).
        kv_shift: data-dependent shift of k and v by one token (FoX, appendix A).
        token_mix: q, k, v and the output gate are projected from mixtures of each token with the one before, by
            learned weights per channel (RWKV-7).
        value_residual: v is mixed with the v of a model's first layer, by a map of that rank; None for v alone
            (RWKV-7). In a model's options it is that of all layers but the first.
        qkv_bias: learned biases of the projections to q, k and v.
        output_bias: a learned bias of the output projection.
        kv_rank: k and v are projected from a normed projection of x to that many channels (multi-head latent attention,
            DeepSeek-V2); None for x itself.
        shared_key_dim: channels of every key, its first ones, that come straight from x, the same for all heads.
        qk_bias: learned biases of q and k behind their norm, 1 at the start (linear side; Mamba-3).
        query_correction: ``q - d_h k`` takes the place of q before its norm, with d learned for each head and 1 at the
            start (Hu et al., 2025, Comba's output correction).
        rotary: rotate q and k with this base beside the gate (RetNet); None for none.
        rotary_angles: ``rope``, ``base^(-2i/K)``, or ``retnet``, ``base^(-i/(K/2-1))``, which ends in 1/base.
        scale: of the scores; None for ``K^(-1/2)``.
        skip: add ``D_h v_t`` to the output of head h, with D learned and 1 at the start (Mamba-2).
        output_norm: of each head's output: ``none``, ``rms``, ``group``.
        output_norm_bias: with a learned bias per channel.
        output_norm_groups: norm the heads together in that many groups; None for each head by itself.
        output_norm_shared: one learned scale for all heads.
        output_norm_eps: added to the mean squares of the output.
        bonus: add ``(sum_i r_hi q_i k_i) v`` to the normed output, with r learned per head and channel (RWKV-7).
        output_gate: ``none``, ``sigmoid`` or ``swish`` of a projection of x, times the output; ``lora`` for
            ``W_2 sigmoid(W_1 x)`` (RWKV-7).
        output_gate_rank: of ``lora``; None for the multiple of 32 near ``5 D^(1/2)``.
        output_gate_low_rank: the output gate's projection has rank V, and a bias (Kimi Delta Attention).
        gate_before_norm: the output gate comes before the output norm (Mamba-2), not after it.
        gate: gate projection(s) by name (``attnzoo.layer.gates.GATES``) or class.
        window: each token sees itself and the ``window - 1`` tokens before it (softmax side); None for all.
        sinks: a learned logit per head that takes part in the softmax without a value, 0 at the start, in float32
            (softmax side; as in gpt-oss, OpenAI, 2025, where it is drawn from N(0, 0.02^2)).
        softcap: ``softcap tanh(s / softcap)`` takes the place of a score s before its decay is added (softmax side;
            Gemma 2's ``attn_logit_softcapping``, 50 there); None for none.
        training_groups: in training each token sees those of its own group of so many tokens, and the groups of half of
            the heads are shifted by half a group (softmax side; LongLoRA's shifted sparse attention). In evaluation it
            sees all. None for all in training, too.

    Raises:
        ValueError: a value of the wrong kind or out of range, an unknown word, or options that contradict each other.
    """

    hidden_size: int = 768
    num_heads: int = 12
    num_kv_heads: int | None = None
    num_qk_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    expand: float | None = None
    feature_map: str = "identity"
    key_feature_map: str | None = None
    qk_norm: str = "none"
    qk_norm_shared: bool = False
    qk_norm_eps: float = 1e-5
    conv_size: int = 0
    conv_bias: bool = False
    conv_activation: str = "silu"
    kv_shift: bool = False
    token_mix: bool = False
    value_residual: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    kv_rank: int | None = None
    shared_key_dim: int = 0
    qk_bias: bool = False
    query_correction: bool = False
    rotary: float | None = None
    rotary_angles: str = "rope"
    scale: float | None = None
    skip: bool = False
    output_norm: str = "none"
    output_norm_bias: bool = False
    output_norm_groups: int | None = None
    output_norm_shared: bool = False
    output_norm_eps: float = 1e-6
    bonus: bool = False
    output_gate: str = "none"
    output_gate_rank: int | None = None
    output_gate_low_rank: bool = False
    gate_before_norm: bool = False
    gate: GateName | Sequence[GateName] = "none"
    window: int | None = None
    sinks: bool = False
    softcap: float | None = None
    training_groups: int | None = None

    def __post_init__(self) -> None:
        check_kinds(vars(self), AttentionConfig.__annotations__, CHOICES)
        for name in (*SIZES, *POSITIVE):
            number, what = getattr(self, name), "integer" if name in SIZES else "number"
            if number is not None and number <= 0:
                raise ValueError(f"{name}: expected a positive {what}, got {number!r}")
            if name in SIZES and name != "window" and (number or 0) >= WIDEST:
                raise ValueError(f"{name}: expected a number below {WIDEST}, got {number!r}")
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size: expected a multiple of num_heads = {self.num_heads} (or head_dim given), "
                f"got {self.hidden_size}"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_kv_heads: expected a divisor of num_heads = {self.num_heads}, got {self.kv_heads}")
        if self.training_groups is not None and (self.training_groups % 2 or self.kv_heads % 2):
            got = f"{self.training_groups} tokens and {self.kv_heads} key heads"
            raise ValueError(f"training_groups: expected an even number of tokens and of key heads, got {got}")
        if self.num_qk_heads is not None and self.num_kv_heads not in (None, self.num_heads):
            raise ValueError(
                f"num_qk_heads: expected None with num_kv_heads = {self.num_kv_heads}, got {self.num_qk_heads}"
            )
        for name in ("num_qk_heads", "output_norm_groups"):
            if self.num_heads % (getattr(self, name) or 1):
                raise ValueError(
                    f"{name}: expected a divisor of num_heads = {self.num_heads}, got {getattr(self, name)}"
                )
        if self.expand is not None and self.value_dim is not None:
            raise ValueError(f"expand: expected None with value_dim = {self.value_dim}, got {self.expand}")
        if self.expand is not None and (self.expand * self.hidden_size) % self.num_heads:
            raise ValueError(
                f"expand: expected a whole number of channels per head, hidden_size = {self.hidden_size} over "
                f"num_heads = {self.num_heads}, got {self.expand}"
            )
        if self.expand is not None and self.expand * self.hidden_size / self.num_heads >= 2**31:
            raise ValueError(f"expand: expected less than 2^31 channels per head, got {self.expand}")
        if self.conv_size < 0:
            raise ValueError(f"conv_size: expected a number of tokens >= 0, got {self.conv_size!r}")
        if not 0 <= self.shared_key_dim < self.key_dim:
            raise ValueError(f"shared_key_dim: expected less than a key's {self.key_dim}, got {self.shared_key_dim}")
        if self.query_correction and self.query_heads != self.key_heads:
            raise ValueError(
                f"query_correction: expected False with {self.key_heads} keys of {self.query_heads} queries"
            )
        lora = self.output_gate == "lora"
        if self.output_gate_rank is not None and not lora:
            raise ValueError(f"output_gate_rank: expected None without output_gate='lora', got {self.output_gate_rank}")
        if self.output_gate_low_rank and lora:
            raise ValueError("output_gate_low_rank: expected False with output_gate='lora', got True")
        if self.token_mix and self.kv_rank is not None:
            raise ValueError(f"kv_rank: expected None with token_mix (k and v have inputs apart), got {self.kv_rank}")
        if self.qk_bias and (self.rotary is not None or self.qk_norm == "l2"):
            name, given = ("rotary", self.rotary) if self.rotary is not None else ("qk_norm", self.qk_norm)
            raise ValueError(f"qk_bias: expected False with {name} = {given!r}, got True")
        if self.rotary is not None and self.rotary < 1:
            raise ValueError(f"rotary: expected a base of at least 1 (no angle over 1 radian), got {self.rotary!r}")
        for field in fields(self):
            for part in NEEDS.get(field.name, ()):
                if getattr(self, part) in OFF and getattr(self, field.name) != field.default:
                    raise ValueError(
                        f"{field.name}: expected {field.default!r} without {part}, got {getattr(self, field.name)!r}"
                    )
        if self.qk_norm_shared and self.qk_norm == "l2":
            raise ValueError("qk_norm_shared: expected False with qk_norm='l2', which has no learned scale, got True")

    def core_options(self, side: str) -> dict[str, Any]:
        """The options that are numbers of every call of a core of this side, by name."""
        return {name: getattr(self, name) for name in OF_CORE if side == "softmax" or name not in OF_SOFTMAX}

    @property
    def gate_rank(self) -> int:
        """The rank of an output gate ``lora``."""
        return self.output_gate_rank or max(32, round(5 * self.hidden_size**0.5 / 32) * 32)

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def query_heads(self) -> int:
        """Heads that q is projected to."""
        return self.num_qk_heads or self.num_heads

    @property
    def key_heads(self) -> int:
        """Heads that k is projected to."""
        return self.num_qk_heads or self.kv_heads

    @property
    def key_dim(self) -> int:
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def v_dim(self) -> int:
        if self.expand is not None:
            return int(self.expand * self.hidden_size) // self.num_heads
        return self.value_dim or self.key_dim


OF_THE_VARIANT = ("hidden_size", "num_heads", "gate", "rotary", "rotary_angles")
PLAIN = {field.name: field.default for field in fields(AttentionConfig) if field.name not in OF_THE_VARIANT}
BLOCKS: Mapping[str, Mapping[str, Any]] = {
    "llama": PLAIN,
    "pro": {**PLAIN, "qk_norm": "rms", "kv_shift": True, "output_norm": "rms", "output_gate": "sigmoid"},
    "gated": {**PLAIN, "conv_size": 4, "output_norm": "rms", "output_gate": "swish"},
    "hgrn2": {
        **PLAIN, "gate": "hgrn2", "feature_map": "silu", "key_feature_map": "identity", "output_norm": "rms",
        "output_norm_groups": 1,
    },
}  # fmt: skip
