"""Mappings of Llama (Touvron et al., 2023) and of decoders like it: softmax attention with rotary angles, as `rope`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from attnzoo.models.config import ModelConfig
from attnzoo.models.peers import Peer
from attnzoo.models.peers.layout import TRANSFORMERS, Layout, common_sizes, decoder, pattern
from attnzoo.models.peers.scaling import rope_settings, rotation
from attnzoo.models.peers.settings import Settings
from attnzoo.models.peers.weights import Weights

# norms behind attention and MLP, in place of those before them
BEHIND = replace(TRANSFORMERS, attention_norm="post_attention_layernorm", mlp_norm="post_feedforward_layernorm")
CENTRED = replace(TRANSFORMERS, centred=True)
BOTH = replace(
    CENTRED, attention_after="post_attention_layernorm", mlp_norm="pre_feedforward_layernorm",
    mlp_after="post_feedforward_layernorm",
)  # fmt: skip
GELU = ("gelu_pytorch_tanh", "gelu_new")  # one formula


def llama(settings: Settings) -> Peer:
    """Llama, and Mistral's dense models: `rope`, with a window where there is one."""
    return _peer(settings, biases=settings.get("attention_bias", False))


def qwen2(settings: Settings) -> Peer:
    """Qwen2: Llama with biases on q, k and v."""
    return _peer(settings, biases=True)


def qwen3(settings: Settings) -> Peer:
    """Qwen3: Llama with a norm on each head of q and k."""
    return _peer(settings, biases=settings.get("attention_bias", False), norm="rms")


def phi3(settings: Settings) -> Peer:
    """Phi-3 and Phi-4: Llama with fewer matrices, of which some models rotate only a share of a head's channels."""
    return _peer(settings, biases=False)


def olmo2(settings: Settings) -> Peer:
    """OLMo 2: norms over all heads of q and k together, and norms behind attention and MLP."""
    return _peer(settings, biases=settings.get("attention_bias", False), norm="rms_full", layout=BEHIND)


def smollm3(settings: Settings) -> Peer:
    """SmolLM3: Llama of which every fourth layer has no rotation."""
    settings.only("use_sliding_window", False)
    return _peer(settings, biases=settings.get("attention_bias", False), tied=True)


def gemma(settings: Settings) -> Peer:
    """Gemma: norms that scale by 1 + w, GeGLU and scaled embeddings."""
    settings.only("hidden_act", "gelu", *GELU)  # written "gelu" in early files and meant as the approximation
    settings.only("hidden_activation", None, *GELU)
    return _gemma(settings, CENTRED, {})


def gemma2(settings: Settings) -> Peer:
    """Gemma 2: also norms behind attention and MLP, windows in every second layer, and softcaps."""
    settings.only("hidden_activation", *GELU)
    settings.read.update(("hidden_act", "sliding_window_size"))  # in its files, and read by nothing
    scale = settings.get("query_pre_attn_scalar", 256) ** -0.5
    cap = settings.optional("attn_logit_softcapping", "float") if settings.says("attn_logit_softcapping") else 50.0
    return _gemma(settings, BOTH, {"scale": scale, "softcap": cap})


def _gemma(settings: Settings, layout: Layout, options: dict[str, Any]) -> Peer:
    settings.only("use_bidirectional_attention", False)
    last = settings.optional("final_logit_softcapping", "float")
    if layout is BOTH and not settings.says("final_logit_softcapping"):
        last = 30.0
    model = {
        "mlp_activation": "gelu_tanh", "embedding_scale": settings["hidden_size"] ** 0.5, "logit_softcap": last,
    }  # fmt: skip
    biases = settings.get("attention_bias", False)
    return _peer(settings, biases=biases, tied=True, layout=layout, options=options, model=model)


def _peer(
    settings: Settings,
    *,
    biases: bool,
    norm: str = "none",
    tied: bool = False,
    layout: Layout = TRANSFORMERS,
    options: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
) -> Peer:
    """The mapping shared by all; `options` are further ones of the layers, and `model` of the model."""
    kind, decoders = settings.raw("model_type"), dict(model or {})
    settings.only("use_mrope", False)
    if "mlp_activation" not in decoders:
        settings.only("hidden_act", "silu", "swish")
    if kind in ("llama", "smollm3"):
        decoders["mlp_bias"] = settings.get("mlp_bias", False)
    else:
        settings.only("mlp_bias", False)
    D, H, L = settings["hidden_size"], settings["num_attention_heads"], settings["num_hidden_layers"]
    G, K, eps = settings.get("num_key_value_heads", H), head_dim(settings, D, H), norm_eps(settings)
    # in these the output projection has a bias too
    outer = biases and kind not in ("qwen2", "mistral")
    layers = {"num_kv_heads": G, "head_dim": K, "qkv_bias": biases, "output_bias": outer, **(options or {})}
    if norm != "none":
        layers |= {"qk_norm": norm, "qk_norm_shared": norm == "rms", "qk_norm_eps": eps}
    if kind != "phi3":
        rope_settings(settings).only("partial_rotary_factor", 1.0)
    turn = rotation(settings, K, scale=layers.pop("scale", None))
    windows, turned = _windows(settings, L), _rotated_layers(settings, L)
    decoders["norm"] = "after" if layout is BEHIND else "before" if layout.attention_after is None else "both"
    entries: list[dict[str, Any]] = [
        {
            "name": "rope" if rotated else "nope",
            "options": (turn.options if rotated else {}) | ({} if window is None else {"window": window}),
        }
        for rotated, window in zip(turned, windows, strict=True)
    ]  # fmt: skip
    config = ModelConfig(
        attention=pattern(entries), attention_options=layers, num_heads=H,
        intermediate_size=settings["intermediate_size"], norm_eps=eps, **common_sizes(settings, tied), **decoders,
    )  # fmt: skip

    def attention(take: Callable[[str], Tensor], index: int) -> Iterator[tuple[str, Tensor]]:
        fused = take("qkv_proj.weight").split([H * K, G * K, G * K]) if kind == "phi3" else None
        for number, (name, heads) in enumerate((("q", H), ("k", G), ("v", G))):
            turns = turned[index] and name != "v"

            def placed(x: Tensor, count: int = heads, name: str = name, turns: bool = turns) -> Tensor:
                return x if not turns else turn.queries(x, count) if name == "q" else turn.keys(x, count)

            yield f"{name}_proj.weight", placed(fused[number] if fused else take(f"{name}_proj.weight"))
            if biases:
                yield f"{name}_proj.bias", placed(take(f"{name}_proj.bias"))
            if norm != "none" and name != "v":
                scale = take(f"{name}_norm.weight")
                yield (
                    f"{name}_norm.weight",
                    placed(scale, 1) if norm == "rms" else placed(scale).unflatten(0, (heads, K)),
                )
        yield "o_proj.weight", take("o_proj.weight")
        if outer:
            yield "o_proj.bias", take("o_proj.bias")
        if turned[index]:
            yield "gate.angle", turn.angle.clone()

    def weights(theirs: Weights) -> Iterator[tuple[str, Tensor]]:
        for name in theirs.names:
            if name.endswith("rotary_emb.inv_freq"):  # a table in files of early releases, never loaded
                theirs.skip(name)
        return decoder(theirs, layout, L, attention, config.tie_embeddings)

    rounded = (f"{kind}: norms scale by 1 + w, rounded here to the dtype of the weights",) if layout.centred else ()
    return Peer(config, weights, (*rounded, *turn.notes))


def _rotated_layers(settings: Settings, layers: int) -> list[bool]:
    """Which layers rotate their queries and keys."""
    if settings.raw("model_type") != "smollm3":
        return [True] * layers
    every = settings.get("no_rope_layer_interval", 4)
    named = settings.listed("no_rope_layers", "int", layers)
    return [bool(on) for on in named] if named else [(i + 1) % every != 0 for i in range(layers)]


def head_dim(settings: Settings, hidden_size: int, heads: int) -> int:
    """Channels per head, which the heads share out where nothing is said.

    Raises:
        ValueError: there are more heads than channels.
    """
    if "head_dim" not in settings and heads > hidden_size:
        raise ValueError(f"config.json: num_attention_heads: expected at most hidden_size = {hidden_size}, got {heads}")
    return int(settings.get("head_dim", hidden_size // heads))


def norm_eps(settings: Settings) -> float:
    """The number that norms add to mean squares."""
    return float(settings.required("rms_norm_eps", "float"))


def _windows(settings: Settings, layers: int) -> list[int | None]:
    """Each layer's window in tokens; None for all tokens. Defaults are those of the peers' own classes."""
    model = settings.raw("model_type")
    named = settings.listed("layer_types", "str", layers)
    # null means no window
    window = settings.optional("sliding_window", "int") if settings.says("sliding_window") else 4096
    if model == "phi3":
        window = settings.optional("sliding_window", "int")
    if model == "gemma2":
        default, alike = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)], True
        if window is None and "sliding_attention" in (named or default):
            raise ValueError(
                "config.json: sliding_window: expected a number beside layers of sliding_attention, got none"
            )
    elif model in ("llama", "mistral", "phi3", "olmo2", "smollm3", "gemma"):
        window = window if model in ("mistral", "phi3") else None
        default = ["sliding_attention" if window else "full_attention"] * layers
        alike = named in (None, default)  # transformers does not read the layer types of these models
    else:
        window = window if settings.get("use_sliding_window", False) else None
        first = settings.get("max_window_layers", 28, least=0)  # used where `layer_types` is missing
        default = ["sliding_attention" if window and i >= first else "full_attention" for i in range(layers)]
        alike = window is not None or "sliding_attention" not in (named or [])
    if not alike:
        raise ValueError(f"config.json: layer_types = {named} is not supported beside sliding_window = {window}")
    kinds = named or default
    for kind in kinds:
        if kind not in ("sliding_attention", "full_attention"):
            raise ValueError(f"config.json: layer_types has {kind!r}, which is not supported")
    return [window if kind == "sliding_attention" else None for kind in kinds]
