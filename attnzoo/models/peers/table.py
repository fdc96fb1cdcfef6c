"""The kinds of other libraries' models that load, what they become and what differs; and known ones that do not.

A new kind is a row of :data:`PEERS` and the function that it names. `attnzoo import --list` shows the table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

NORMS = "norms scale by 1 + w, rounded to the dtype of the weights"
ANGLES = "where angles change with the length, those of the original context are kept"


class Loads(NamedTuple):
    """One kind of model.

    Args:
        mapping: ``"module:function"`` of this package.
        becomes: the variants of its layers.
        differs: what differs from the peer, if anything.
    """

    mapping: str
    becomes: str
    differs: str = ""


PEERS = {
    "llama": Loads("rotary:llama", "rope", ANGLES),
    "mistral": Loads("rotary:llama", "rope with a window"),
    "qwen2": Loads("rotary:qwen2", "rope"),
    "qwen3": Loads("rotary:qwen3", "rope"),
    "phi3": Loads("rotary:phi3", "rope", ANGLES),
    "olmo2": Loads("rotary:olmo2", "rope with norms after"),
    "olmo3": Loads("rotary:olmo3", "rope with norms after, three in four with a window", ANGLES),
    "smollm3": Loads("rotary:smollm3", "rope, nope"),
    "gemma": Loads("rotary:gemma", "rope", NORMS),
    "gemma2": Loads("rotary:gemma2", "rope, in turn with a window, softcap and norms around", NORMS),
    "gemma3_text": Loads("rotary:gemma3", "rope, five in six with a window", NORMS),
    "gpt2": Loads("gpt2:gpt2", "nope with learned positions"),
    "qwen3_next": Loads("qwen3_next:qwen3_next", "gated_deltanet, rope", NORMS),
    "qwen3_5_text": Loads("qwen3_next:qwen3_next", "gated_deltanet, rope", NORMS),
    "olmo_hybrid": Loads("olmo_hybrid:olmo_hybrid", "gated_deltanet, rope or nope"),
    "kimi_linear": Loads("kimi_linear:kimi_linear", "kda, nope with latent keys", "without layers of experts"),
    "mamba2": Loads("mamba2:mamba2", "mamba2", "several groups are normed as in its authors' kernels"),
    "mamba3": Loads("mamba3:mamba3", "mamba3", "one input per step, by the trapezoidal rule"),
    "forgetting_transformer-project_fox": Loads("fox:forgetting_transformer", "fox"),
    "transformer-project_fox": Loads("fox:transformer", "rope"),
    "delta_net-project_fox": Loads("fla:delta_net", "deltanet"),
    "hgrn2-project_fox": Loads("fox:hgrn2", "gla"),
    "mamba2-project_fox": Loads("mamba2:mamba2", "mamba2"),
    "forgetting_transformer": Loads("fla:forgetting_transformer", "fox"),
    "path_attn": Loads("fla:path_attn", "path, path_fox", "the log gate is multiplied by K^(-1/2), as there"),
    "delta_net": Loads("fla:delta_net", "deltanet"),
    "gated_deltanet": Loads("fla:gated_deltanet", "gated_deltanet"),
    "gated_deltaproduct": Loads("fla:gated_deltaproduct", "deltanet, gated_deltanet"),
    "comba": Loads("fla:comba", "gated_deltanet", "no decay of the erasing key, which its kernels norm away"),
    "kda": Loads("fla:kda", "kda"),
    "gla": Loads("fla:gla", "gla"),
    "retnet": Loads("fla:retnet", "retnet"),
    "wall_transformer": Loads("fla:wall_transformer", "wall, gated_wall"),
    "rwkv7": Loads("rwkv7:rwkv7", "rwkv7"),
}
# models of text and images -> the kind of their language model
AROUND = {"qwen3_5": "qwen3_5_text", "gemma3": "gemma3_text"}
EXPERTS = "its layers have experts, for which the decoder has no place"
IMAGES = "it reads images, for which nothing here has a place"
SENSES = {"vision_config": "images", "audio_config": "sounds"}
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # of experts
WITHOUT = {  # known kinds of models that have no mapping
    "samba-project_fox": "its Mamba layers, of the first kind, have a decay per channel and state that no variant has",
    "mamba": "its decay per channel and state is one that no variant has; 'mamba2' loads",
    **dict.fromkeys(
        ("gdn2", "gated_deltanet2"),
        "it erases by a gate per channel of the key, which no gate projection makes; 'gated_deltanet', 'kda' and "
        "'rwkv7' load",
    ),
    "granite": "it scales what each layer adds, for which the decoder has no place; 'llama' loads",
    "qwen2_moe": f"{EXPERTS}; 'qwen2' loads",
    "qwen3_moe": f"{EXPERTS}; 'qwen3' loads",
    **dict.fromkeys(
        ("qwen3_5_moe", "qwen3_5_moe_text"), f"{EXPERTS}; dense models of the family load ('qwen3_5', 'qwen3_5_text')"
    ),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), f"{IMAGES}; 'qwen2' loads"),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), f"{IMAGES}; 'qwen3' and 'qwen3_5' load"),
    "mixtral": f"{EXPERTS}; 'mistral' loads",
    "mistral3": f"{IMAGES}; 'mistral' loads",
    "olmoe": f"{EXPERTS}; 'olmo2' loads",
    "phimoe": f"{EXPERTS}; 'phi3' loads",
    "phi3_v": f"{IMAGES}; 'phi3' loads",
    "phi4_multimodal": "it reads images and sounds, for which nothing here has a place; 'phi3' loads",
    "attnzoo": "it is a model of this library already; `attnzoo generate FOLDER` reads it, start_from=FOLDER trains on",
}


def readers_table() -> dict[str, tuple[str, str]]:
    """The table for readers: what each kind becomes, and what differs or why it does not load."""
    found: dict[str, tuple[str, str]] = {}
    for kind, row in PEERS.items():
        for outer in (outer for outer, inner in AROUND.items() if inner == kind):
            found[outer] = row.becomes, f"without images; {row.differs}" if row.differs else "without images"
        found[kind] = row.becomes, row.differs
    return found | {kind: ("-", why) for kind, why in WITHOUT.items()}


def unserved(kind: str, fields: Mapping[str, Any]) -> str | None:
    """The reason why a model of an unknown kind cannot load (experts, images, sounds), and the kinds of its family that
    do; None where nothing in its fields speaks against it."""
    inside = [fields]
    for one in inside:
        inside += [value for value in one.values() if isinstance(value, Mapping)]
    every = {name: value for one in inside for name, value in one.items()}
    read = [what for name, what in SENSES.items() if every.get(name)]
    has = [f"it reads {' and '.join(read)}, for which nothing here has a place"] if read else []
    if any(isinstance(count := every.get(name), int) and count > 1 for name in COUNTS):
        has.append(EXPERTS)
    if not has:
        return None
    words = set(re.findall("[a-z]+", kind))
    family = ", ".join(repr(name) for name in (*PEERS, *AROUND) if words & set(re.findall("^[a-z]+", name)))
    return f"model_type {kind!r} is not supported: {', and '.join(has)}" + (
        f"; of its family load {family}" if family else ""
    )
