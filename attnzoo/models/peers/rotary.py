"""Mappings of Llama (Touvron et al., 2023) and of decoders like it: softmax attention with rotary angles, as `rope`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from attnzoo.models.config import ModelConfig
from attnzoo.models.peers import Peer
from attnzoo.models.peers.layout import TRANSFORMERS, Layout, Named, Take, common_sizes, mapped, pattern
from attnzoo.models.peers.scaling import PeerRotation, rope_by_kind, rope_settings, rotation
from attnzoo.models.peers.settings import Settings

# norms behind attention and MLP, in place of those before them
BEHIND = replace(TRANSFORMERS, attention_norm="post_attention_layernorm", mlp_norm="post_feedforward_layernorm")
CENTRED = replace(TRANSFORMERS, centred=True)
BOTH = replace(
    CENTRED, attention_after="post_attention_layernorm", mlp_norm="pre_feedforward_layernorm",
    mlp_after="post_feedforward_layernorm",
)  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
EVERY = {"gemma2": 2, "olmo3": 4, "gemma3_text": 6}  # so many layers one has no window
OLMO3_THETA = 500_000.0
OF_GEMMA3 = {  # what published files leave to the class
    "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6,
}  # fmt: skip
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


def olmo3(settings: Settings) -> Peer:
    """OLMo 3: OLMo 2 with windows in three of four layers, whose angles are never scaled."""
    if settings.says("rope_theta") and settings.raw("rope_theta") not in (None, OLMO3_THETA):
        raise ValueError(
            f"config.json: rope_theta: expected {OLMO3_THETA} or a base for each kind of layers in rope_parameters "
            f"(transformers takes this one for full attention alone), got {settings.raw('rope_theta')!r}"
        )
    bases = dict.fromkeys((FULL, SLIDING), ("rope_theta", OLMO3_THETA))
    biases = settings.get("attention_bias", False)
    return _peer(settings, biases=biases, norm="rms_full", layout=BEHIND, bases=bases)


def smollm3(settings: Settings) -> Peer:
    """SmolLM3: Llama whose every fourth layer has no rotation, and a window where windows are on."""
    return _peer(settings, biases=settings.get("attention_bias", False), tied=True)


def gemma(settings: Settings) -> Peer:
    """Gemma: norms that scale by 1 + w, GeGLU and scaled embeddings."""
    settings.only("hidden_act", "gelu", *GELU)  # written "gelu" in early files and meant as the approximation
    settings.only("hidden_activation", None, *GELU)
    return _gemma(settings, CENTRED, {})


def gemma3(settings: Settings) -> Peer:
    """Gemma 3 without images: norms on each head of q and k, and windows, of angles of their own, in most layers."""
    settings.only("hidden_activation", *GELU)
    settings = settings.beside({name: value for name, value in OF_GEMMA3.items() if name not in settings})
    settings.only("attn_logit_softcapping", None)  # its class in transformers has the field and does not cap
    settings.read.add("hidden_act")
    scale = settings.get("query_pre_attn_scalar", 256) ** -0.5
    bases = {FULL: ("rope_theta", 1_000_000.0), SLIDING: ("rope_local_base_freq", 10_000.0)}
    return _gemma(settings, BOTH, {"scale": scale}, norm="rms", bases=bases)


def gemma2(settings: Settings) -> Peer:
    """Gemma 2: also norms behind attention and MLP, windows in every second layer, and softcaps."""
    settings.only("hidden_activation", *GELU)
    settings.read.update(("hidden_act", "sliding_window_size"))  # in its files, and read by nothing
    scale = settings.get("query_pre_attn_scalar", 256) ** -0.5
    cap = settings.optional("attn_logit_softcapping", "float") if settings.says("attn_logit_softcapping") else 50.0
    last = settings.optional("final_logit_softcapping", "float") if settings.says("final_logit_softcapping") else 30.0
    return _gemma(settings.beside({"final_logit_softcapping": last}), BOTH, {"scale": scale, "softcap": cap})


def _gemma(settings: Settings, layout: Layout, options: dict[str, Any], **more: Any) -> Peer:
    settings.only("use_bidirectional_attention", False)
    last = settings.optional("final_logit_softcapping", "float")
    model = {
        "mlp_activation": "gelu_tanh", "embedding_scale": settings["hidden_size"] ** 0.5, "logit_softcap": last,
    }  # fmt: skip
    biases = settings.get("attention_bias", False)
    return _peer(settings, biases=biases, tied=True, layout=layout, options=options, model=model, **more)


def _peer(
    settings: Settings,
    *,
    biases: bool,
    norm: str = "none",
    tied: bool = False,
    layout: Layout = TRANSFORMERS,
    options: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    bases: Mapping[str, tuple[str, float]] | None = None,
) -> Peer:
    """The mapping shared by all.

    Args:
        settings: the peer's.
        biases: whether q, k and v have them.
        norm: of q and k.
        tied: whether the head is the embedding where the settings do not say.
        layout: the peer's names.
        options: further ones of the layers.
        model: further fields of the model.
        bases: for each kind of layers, where these have angles of their own, the field and the default of their base.
    """
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
    turned, scale = _rotated_layers(settings, L), layers.pop("scale", None)
    windows = _windows(settings, turned)
    read = dict.fromkeys((FULL, SLIDING), settings) if bases is None else rope_by_kind(settings, bases)
    if kind != "phi3":
        for one in read.values():
            rope_settings(one).only("partial_rotary_factor", 1.0)
    rotations = {name: rotation(one, K, scale=scale) for name, one in read.items()}
    turns = [rotations[FULL if window is None else SLIDING] for window in windows]
    decoders["norm"] = "after" if layout is BEHIND else "before" if layout.attention_after is None else "both"
    entries: list[dict[str, Any]] = [
        {
            "name": "rope" if rotated else "nope",
            "options": (turn.options if rotated else {}) | ({} if window is None else {"window": window}),
        }
        for turn, rotated, window in zip(turns, turned, windows, strict=True)
    ]  # fmt: skip
    config = ModelConfig(
        attention=pattern(entries), attention_options=layers, num_heads=H,
        intermediate_size=settings["intermediate_size"], norm_eps=eps, **common_sizes(settings, tied), **decoders,
    )  # fmt: skip

    def attention(take: Take, index: int) -> Named:
        fused = take("qkv_proj.weight").split([H * K, G * K, G * K]) if kind == "phi3" else None
        for number, (name, heads) in enumerate((("q", H), ("k", G), ("v", G))):
            turn = turns[index] if turned[index] and name != "v" else None

            def placed(x: Tensor, count: int = heads, name: str = name, turn: PeerRotation | None = turn) -> Tensor:
                return x if turn is None else turn.queries(x, count) if name == "q" else turn.keys(x, count)

            yield f"{name}_proj.weight", placed(fused[number] if fused else take(f"{name}_proj.weight"))
            if biases:
                yield f"{name}_proj.bias", placed(take(f"{name}_proj.bias"))
            if norm != "none" and name != "v":
                scale = take(f"{name}_norm.weight") + (1 if layout.centred else 0)
                scale = placed(scale, 1) if norm == "rms" else placed(scale).unflatten(0, (heads, K))
                yield f"{name}_norm.weight", scale
        yield "o_proj.weight", take("o_proj.weight")
        if outer:
            yield "o_proj.bias", take("o_proj.bias")
        if turned[index]:
            yield "gate.angle", turns[index].angle.clone()

    # files of early releases have the frequencies as a table
    weights = mapped(config, layout, attention, left_out=lambda name: name.endswith("rotary_emb.inv_freq"))
    rounded = (f"{kind}: norms scale by 1 + w, rounded here to the dtype of the weights",) if layout.centred else ()
    notes = dict.fromkeys(note for turn in rotations.values() for note in turn.notes)
    return Peer(config, weights, (*rounded, *notes))


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


def _windows(settings: Settings, rotated: Sequence[bool]) -> list[int | None]:
    """Each layer's window in tokens; None for all tokens. Defaults are those of the peers' own classes.

    Args:
        rotated: whether each layer rotates queries and keys.
    """
    model, layers = settings.raw("model_type"), len(rotated)
    named = settings.listed("layer_types", "str", layers)
    # null means no window
    window = settings.optional("sliding_window", "int") if settings.says("sliding_window") else 4096
    if model in ("phi3", "smollm3"):
        window = settings.optional("sliding_window", "int")
    if model in EVERY:  # transformers' own default of Gemma 3 is a field of its files
        settings.read.add("_sliding_window_pattern")
        every = settings.get("sliding_window_pattern", EVERY[model]) if model == "gemma3_text" else EVERY[model]
        default, alike = [FULL if (i + 1) % every == 0 else SLIDING for i in range(layers)], True
        if window is None and SLIDING in (named or default):
            raise ValueError(
                "config.json: sliding_window: expected a number beside layers of sliding_attention, got none"
            )
    elif model in ("llama", "mistral", "phi3", "olmo2", "gemma"):
        window = window if model in ("mistral", "phi3") else None
        default = [SLIDING if window else FULL] * layers
        alike = named in (None, default)  # transformers does not read the layer types of these models
    else:
        window = window if settings.get("use_sliding_window", False) else None
        first = settings.get("max_window_layers", 28, least=0)  # used where `layer_types` is missing
        within = [i >= first if model != "smollm3" else not turns for i, turns in enumerate(rotated)]
        default = [SLIDING if window and there else FULL for there in within]
        alike = window is not None or SLIDING not in (named or [])
    if not alike:
        raise ValueError(f"config.json: layer_types = {named} is not supported beside sliding_window = {window}")
    kinds = named or default
    for kind in kinds:
        if kind not in (SLIDING, FULL):
            raise ValueError(f"config.json: layer_types has {kind!r}, which is not supported")
    return [window if kind == SLIDING else None for kind in kinds]
