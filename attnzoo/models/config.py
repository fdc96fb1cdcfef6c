"""The configuration of a model: sizes, and the attention of each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from attnzoo.errors import WIDEST, above, at_least, check_kinds, unknown

DEEPEST = 10_000  # layers, of which no model has so many: a number beyond is a mistake

NORMS = ("before", "after", "both")
WORDS = {"norm_kind": ("rms", "layer"), "mlp_activation": ("silu", "gelu", "gelu_tanh", "relu2")}
KEYS = ("name", "repeat", "options", "norm")  # of an entry of `attention`
THEIRS = {  # our field -> its name in Hugging Face's configurations
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "tie_embeddings": "tie_word_embeddings",
}


@dataclass(frozen=True)
class LayerSpec:
    """One layer's attention.

    Args:
        name: the variant's name.
        options: keyword options of `build_attention`.
        norm: whether the norms of its block stand `before` attention and MLP, `after` them, or `both`.
    """

    name: str
    options: dict[str, Any]
    norm: str = "before"


@dataclass
class ModelConfig:
    """A decoder of blocks of attention and MLP; by default with RMSNorm and SwiGLU.

    `attention` is one of

    - a name, for every layer: `fox`;
    - a list that is repeated until the layers are filled: `[mamba2, mamba2, fox]`. A list as long as the
      model is thus a per-layer list. The number of layers must be a multiple of the list's length.

    An entry of the list (or the whole of `attention`) may also be a mapping `{name: fox, repeat: 2, options:
    {acp: true}}`: `repeat` stands for that many equal entries, and `options` are added to `attention_options`
    for those layers only, and `norm` takes the place of the model's for their blocks.

    Args:
        attention: the variant of each layer, as above.
        attention_options: keyword options of `build_attention` for every layer, such as `{window: 512}`; `acp` may be
            the mapping `{eps: 1e-4, bound: tail}`.
        hidden_size: D.
        num_layers: blocks.
        num_heads: H, query heads per layer.
        intermediate_size: width inside the MLP; None for 8/3 of `hidden_size`, rounded up to a multiple of 64;
            0 for blocks without one, as Mamba-2's.
        mlp_activation: `silu`, `gelu`, `gelu_tanh` (by its approximation) or `relu2` (the square of ReLU).
        mlp_gated: whether the activation gates a second projection, as in SwiGLU and GeGLU.
        mlp_bias: learned biases in the MLP.
        mlp_mix: the MLP's input is a mixture of each token with the one before, by learned weights per channel (RWKV's
            channel mixing).
        vocab_size: 256 for bytes.
        tie_embeddings: one matrix for the embedding and the head.
        norm_kind: `rms`, or `layer` for LayerNorm with a bias, of all norms around attention and MLP and the last.
        norm_eps: added to mean squares in these norms.
        embedding_norm: a norm of the embeddings, before the first block (RWKV, BLOOM).
        embedding_scale: factor of the token embeddings, not of a head that is tied to them (Gemma).
        learned_positions: the number of learned vectors, one for each position, that are added to the embeddings
            (GPT-2); no text can be longer. None for none.
        logit_softcap: `softcap tanh(l / softcap)` takes the place of each logit l (Gemma 2); None for none.
        initializer_range: standard deviation of the initial linear and embedding weights.
        norm: where the norms of a block stand whose entry of `attention` does not say it: `before` attention and MLP,
            `after` them (OLMo 2), or `both` (Gemma 2); or a list of these, repeated until the layers are filled, which
            stays where another `attention` comes (OLMo Hybrid).

    Raises:
        ValueError: a size below 1 or beyond every model's, an option that is the model's, or layers that the list of
            `attention` does not fill evenly.
    """

    attention: Any = "fox"
    attention_options: dict[str, Any] = field(default_factory=dict)
    hidden_size: int = 256
    num_layers: int = 4
    num_heads: int = 4
    intermediate_size: int | None = None
    vocab_size: int = 256
    tie_embeddings: bool = False
    norm_eps: float = 1e-6
    norm_kind: str = "rms"
    mlp_activation: str = "silu"
    mlp_gated: bool = True
    mlp_bias: bool = False
    mlp_mix: bool = False
    embedding_norm: bool = False
    embedding_scale: float = 1.0
    learned_positions: int | None = None
    logit_softcap: float | None = None
    initializer_range: float = 0.02
    norm: Any = "before"

    def __post_init__(self) -> None:
        check_kinds(vars(self), ModelConfig.__annotations__, WORDS)
        if not isinstance(self.attention_options, Mapping):
            raise ValueError(f"attention_options: expected a mapping, got {self.attention_options!r}")
        at_least(self, 1, "vocab_size", below=2**31)
        at_least(self, 1, "num_layers", below=DEEPEST)
        at_least(self, 1, "hidden_size", "num_heads", below=WIDEST)
        if self.intermediate_size is not None:
            at_least(self, 0, "intermediate_size", below=WIDEST)
        if self.learned_positions is not None:
            at_least(self, 1, "learned_positions", below=2**31)
        above(self, 0.0, "norm_eps", "initializer_range", "embedding_scale")
        if self.logit_softcap is not None:
            above(self, 0.0, "logit_softcap")
        self.layers()

    @classmethod
    def of_folder(cls, settings: Mapping[str, Any]) -> Self:
        """The configuration that the fields of a `config.json` of ours hold, some of them under other names.

        Raises:
            ValueError: sizes or patterns that no model has, or no `attention`, which every file of ours has.
        """
        if "attention" not in settings:
            raise ValueError("attention: expected the variant of each layer, found no such field")
        names = {field.name: THEIRS.get(field.name, field.name) for field in fields(cls)}
        return cls(**{ours: settings[name] for ours, name in names.items() if name in settings})

    @property
    def mlp_size(self) -> int:
        """The width inside the MLP."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        return -(-8 * self.hidden_size // (3 * 64)) * 64

    def layers(self) -> list[LayerSpec]:
        """The variant and options of each of the `num_layers` layers.

        Raises:
            ValueError: an entry is neither a name nor a mapping with a name, or the list does not fill the
                layers evenly.
        """
        entries = self.attention if isinstance(self.attention, list | tuple) else [self.attention]
        pattern = [spec for entry in entries for spec in self._layer_specs(entry)]
        if not pattern:
            raise ValueError("attention: expected a name or a list of names, got an empty list")
        if self.num_layers % len(pattern):
            raise ValueError(
                f"attention: a pattern of {len(pattern)} layers ({', '.join(spec.name for spec in pattern)}) "
                f"does not fill num_layers={self.num_layers} evenly"
            )
        norms = self._norms()
        specs = pattern * (self.num_layers // len(pattern))
        # the first layer has no earlier values to mix with
        specs[0] = replace(specs[0], options={n: x for n, x in specs[0].options.items() if n != "value_residual"})
        return [replace(spec, norm=spec.norm or norms[i % len(norms)]) for i, spec in enumerate(specs)]

    def _norms(self) -> list[str]:
        """The places of norms in blocks whose entries name none, a pattern that fills the layers evenly."""
        norms = [self.norm] if isinstance(self.norm, str) else self.norm
        if not isinstance(norms, list | tuple) or not norms:
            raise ValueError(f"norm: expected one of {', '.join(NORMS)}, or a list of them, got {self.norm!r}")
        for norm in norms:
            if norm not in NORMS:
                raise unknown("norm", norm, NORMS)
        if self.num_layers % len(norms):
            raise ValueError(f"norm: a pattern of {len(norms)} does not fill num_layers={self.num_layers} evenly")
        return list(norms)

    def _layer_specs(self, entry: object) -> list[LayerSpec]:
        if isinstance(entry, str):
            entry = {"name": entry}
        if not isinstance(entry, Mapping):
            raise ValueError(f"attention: expected a name or a mapping with a name, got {entry!r}")
        for key in entry:
            if key not in KEYS:
                raise ValueError(f"attention: {unknown('key', key, KEYS)}")
        name, repeat, options = entry.get("name"), entry.get("repeat", 1), entry.get("options") or {}
        if not isinstance(name, str):
            raise ValueError(f"attention: expected a mapping with a name, got {dict(entry)!r}")
        if not isinstance(repeat, int) or isinstance(repeat, bool) or repeat < 1:
            raise ValueError(f"attention: expected a whole number of at least 1 as repeat of {name}, got {repeat!r}")
        if repeat > self.num_layers:
            raise ValueError(f"attention: repeat={repeat} of {name} is more than num_layers={self.num_layers}")
        if not isinstance(options, Mapping):
            raise ValueError(f"attention: expected a mapping as options of {name}, got {options!r}")
        options = {**self.attention_options, **options}
        for option in options:
            if not isinstance(option, str):
                raise ValueError(f"attention_options: expected names of options, got {option!r}")
        for option in ("name", "hidden_size"):
            if option in options:
                raise ValueError(f"attention_options: {option} is the model's, and no option of its layers")
        norm = entry.get("norm", "")
        if "norm" in entry and norm not in NORMS:
            raise ValueError(f"attention: {unknown('norm', norm, NORMS, of=name)}")
        return [LayerSpec(name, options, norm)] * repeat
