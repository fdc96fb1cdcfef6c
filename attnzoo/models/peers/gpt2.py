"""GPT-2 (Radford et al., 2019), as `nope` beside a learned vector for each position."""

from __future__ import annotations

from attnzoo.models.config import ModelConfig
from attnzoo.models.peers import Peer
from attnzoo.models.peers.layout import Named, common_sizes, pattern
from attnzoo.models.peers.rotary import head_dim
from attnzoo.models.peers.settings import Settings
from attnzoo.models.peers.weights import Weights

NAMES = {  # our names of the fields -> its own, either of which transformers reads
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}  # fmt: skip
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu": "gelu"}
MASKS = (".attn.bias", ".attn.masked_bias")  # tables in files of early releases, never loaded


def gpt2(settings: Settings) -> Peer:
    """GPT-2, and models with other numbers in its layout, such as DistilGPT-2 and Cerebras-GPT."""
    for ours, theirs in NAMES.items():
        settings.optional(theirs, "int")
        settings.said_once(ours, theirs)
    settings = settings.beside({o: settings.raw(t) for o, t in NAMES.items() if t in settings})
    settings.only("add_cross_attention", False)
    settings.only("reorder_and_upcast_attn", False, True)  # only how the same scores are rounded
    D, H, L = settings["hidden_size"], settings["num_attention_heads"], settings["num_hidden_layers"]
    settings.only("activation_function", *ACTIVATIONS)
    scale = head_dim(settings, D, H) ** -0.5 if settings.get("scale_attn_weights", True) else 1.0
    by_depth = settings.get("scale_attn_by_inverse_layer_idx", False)
    scales = [scale / (index + 1) if by_depth else scale for index in range(L)]
    config = ModelConfig(
        attention=pattern([{"name": "nope", "options": {"scale": one}} for one in scales]),
        attention_options={"qkv_bias": True, "output_bias": True}, num_heads=H, norm_kind="layer",
        norm_eps=settings.get("layer_norm_epsilon", 1e-5), mlp_gated=False, mlp_bias=True,
        mlp_activation=ACTIVATIONS[settings.get("activation_function", "gelu_new")],
        intermediate_size=settings.get("n_inner", 4 * D), learned_positions=settings["max_position_embeddings"],
        **common_sizes(settings, tied=True),
    )  # fmt: skip

    def weights(theirs: Weights) -> Named:
        theirs.rename(lambda name: None if name.endswith(MASKS) else _prefixed(name))

        def norm(ours: str, name: str) -> Named:
            yield from ((f"{ours}.{part}", theirs(f"{name}.{part}")) for part in ("weight", "bias"))

        def maps(name: str, *ours: str) -> Named:
            """A linear map `[in, out]`, cut into several along its outputs."""
            yield from zip((f"{one}.weight" for one in ours), theirs(f"{name}.weight").T.chunk(len(ours)), strict=True)
            yield from zip((f"{one}.bias" for one in ours), theirs(f"{name}.bias").chunk(len(ours)), strict=True)

        embedding = theirs("transformer.wte.weight")
        yield "embedding.weight", embedding
        yield "positions.weight", theirs("transformer.wpe.weight")
        for i in range(L):
            layer, block = f"transformer.h.{i}", f"blocks.{i}"
            yield from norm(f"{block}.attention_norm", f"{layer}.ln_1")
            yield from maps(f"{layer}.attn.c_attn", *(f"{block}.attention.{name}_proj" for name in "qkv"))
            yield from maps(f"{layer}.attn.c_proj", f"{block}.attention.o_proj")
            yield from norm(f"{block}.mlp_norm", f"{layer}.ln_2")
            yield from maps(f"{layer}.mlp.c_fc", f"{block}.mlp.up")
            yield from maps(f"{layer}.mlp.c_proj", f"{block}.mlp.down")
        yield from norm("norm", "transformer.ln_f")
        tied = config.tie_embeddings and "lm_head.weight" not in theirs
        yield "head.weight", embedding if tied else theirs("lm_head.weight")

    return Peer(config, weights)


def _prefixed(name: str) -> str:
    """The name in the model with its head of a weight, which the first files had without it."""
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"
