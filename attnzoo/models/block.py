"""A decoder's block: attention and MLP with their norms, of the kinds that a configuration chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo.layer.attention import Attention
from attnzoo.layer.build import build_attention, from_file
from attnzoo.layer.cache import LayerCache
from attnzoo.layer.inplace import FixedCache
from attnzoo.layer.modules import TokenMix
from attnzoo.layer.rows import rows_of_call
from attnzoo.layer.stream import Packing, Stream
from attnzoo.models.config import LayerSpec, ModelConfig
from attnzoo.registry import get

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


def build_norm(config: ModelConfig) -> nn.RMSNorm | nn.LayerNorm:
    """A norm over the hidden size."""
    if config.norm_kind == "rms":
        return nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps)


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)), with SiLU the SwiGLU of Shazeer (2020); down(act(up(x))) without a gate."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        D, width, bias = config.hidden_size, config.mlp_size, config.mlp_bias
        self.gate = nn.Linear(D, width, bias) if config.mlp_gated else None
        self.up = nn.Linear(D, width, bias)
        self.down = nn.Linear(width, D, bias)
        self.activation = ACTIVATIONS[config.mlp_activation]

    def forward(self, x: Tensor) -> Tensor:
        """The MLP's output [..., D] for x [..., D]."""
        if self.gate is None:
            return self.down(self.activation(self.up(x)))  # type: ignore[no-any-return]
        return self.down(self.activation(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class DecoderBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)) where there is an MLP.

    Norms may stand after both instead, or before and after: x + norm(attention(norm(x))).
    """

    def __init__(self, config: ModelConfig, layer: LayerSpec):
        super().__init__()
        self.attention_norm = build_norm(config)
        sizes = {"hidden_size": config.hidden_size, "num_heads": config.num_heads}
        try:
            variant = get(layer.name)
        except ValueError as error:
            raise ValueError(f"attention: {error}") from error
        self.attention = build_attention(layer.name, **{**sizes, **from_file(layer.options)})
        if not variant.causal:
            why = "the model predicts the next token"
            raise ValueError(f"attention: expected causal variants ({why}), got {layer.name!r}")
        wide = config.mlp_size > 0
        self.mlp_norm = build_norm(config) if wide else None
        self.mlp = MLP(config) if wide else None
        self.mlp_mix = TokenMix(config.hidden_size, (1.0,)) if wide and config.mlp_mix else None
        self.before = layer.norm != "after"
        both = layer.norm == "both"
        self.attention_after = build_norm(config) if both else None
        self.mlp_after = build_norm(config) if both and wide else None

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: LayerCache | FixedCache | None = None,
        first: list[Tensor] | None = None,
    ) -> Tensor:
        """The block's output [B, T, D]; `cache` and `first` are those of its attention layer."""
        x, more = self.apart(x, None, cu_seqlens, attention_mask, cache, first)
        return x + more

    def apart(
        self,
        x: Tensor,
        more: Tensor | None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        first: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`forward` of x + more, returned as two summands: torch.compile then fuses their sum with the next norm."""
        x = x if more is None else x + more
        given = self.attention_norm(x) if self.before else x
        # before attention extends the cache
        rows = None if self.mlp_mix is None else self._rows(x, cu_seqlens, attention_mask, cache)
        calls: dict[str, Any] = {"cu_seqlens": cu_seqlens, "attention_mask": attention_mask, "cache": cache}
        attended = self.attention(given, **calls, **({} if first is None else {"first": first}))
        if (after := self.attention_after if self.before else self.attention_norm) is not None:
            attended = after(attended)
        if self.mlp is None or self.mlp_norm is None:
            return x, attended
        x = x + attended
        given = self.mlp_norm(x) if self.before else x
        if self.mlp_mix is not None and rows is not None:
            given = mixed(self.mlp_mix, given, *rows)
        more = self.mlp(given)
        after = self.mlp_after if self.before else self.mlp_norm
        return x, more if after is None else after(more)

    def _rows(
        self, x: Tensor, cu_seqlens: Tensor | None, attention_mask: Tensor | None, cache: Any
    ) -> tuple[Stream, Packing | None]:
        if isinstance(cache, FixedCache):
            return cache.stream(x), None
        return rows_of_call(self.attention, x, cu_seqlens, attention_mask, cache)


def shares_values(specs: Sequence[LayerSpec], layers: Sequence[Attention]) -> bool:
    """Whether layers mix their values with the first one's.

    Raises:
        ValueError: a layer whose values are not as wide as the first one's.
    """
    mixing = [index for index, spec in enumerate(specs) if spec.options.get("value_residual")]
    for index in mixing:
        width, got = (layer.v_proj.out_features for layer in (layers[0], layers[index]))
        if got != width:
            said = f"value_residual of layer {index} ({specs[index].name})"
            raise ValueError(f"{said}: expected values as wide as the first layer's, {width} channels, got {got}")
    return bool(mixing)


def mixed(mix: TokenMix, x: Tensor, stream: Stream, packing: Packing | None) -> Tensor:
    """The mixture of each token of x [B, T, D] with the one before, which the cache of a call's rows keeps."""
    [out] = mix(x if packing is None else packing.unpack(x), stream, "mlp_mix")
    stream.keep()
    return out if packing is None else packing.pack(out, x.shape[1])
