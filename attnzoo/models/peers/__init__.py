"""Other people's models as ours: their sizes as a :class:`ModelConfig`, their weights under our names.

Each mapping is tested against the peer's own class with random weights. :func:`from_peer` is the way in; the command
line has it as `attnzoo import`.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnzoo.errors import unknown
from attnzoo.files import json_object
from attnzoo.models.config import ModelConfig
from attnzoo.models.decoder import LanguageModel
from attnzoo.models.peers.weights import Settings, Weights

logger = logging.getLogger(__name__)

PEERS = {
    "llama": "rotary:llama",
    "mistral": "rotary:llama",
    "qwen2": "rotary:qwen2",
    "qwen3": "rotary:qwen3",
    "qwen3_next": "qwen3_next:qwen3_next",
    "mamba2": "mamba2:mamba2",
    "forgetting_transformer-project_fox": "fox:forgetting_transformer",
    "transformer-project_fox": "fox:transformer",
    "delta_net-project_fox": "fla:delta_net",
    "hgrn2-project_fox": "fox:hgrn2",
    "mamba2-project_fox": "mamba2:mamba2",
    "forgetting_transformer": "fla:forgetting_transformer",
    "path_attn": "fla:path_attn",
    "delta_net": "fla:delta_net",
    "gated_deltanet": "fla:gated_deltanet",
    "gated_deltaproduct": "fla:gated_deltaproduct",
    "kda": "fla:kda",
    "gla": "fla:gla",
    "retnet": "fla:retnet",
    "wall_transformer": "fla:wall_transformer",
}
WITHOUT = {  # kinds of models that stand beside these
    "samba-project_fox": "its Mamba layers, of the first kind, have a decay per channel and state that no variant has",
    "mamba": "its decay per channel and state is one that no variant has",
    "attnzoo": "it is a model of this library already",
}


@dataclass(frozen=True)
class Peer:
    """How one peer's model becomes ours.

    Args:
        config: the sizes, and the variant of each layer.
        weights: our names and tensors, made of the peer's.
        notes: what an importer should know, one line each.
    """

    config: ModelConfig
    weights: Callable[[Weights], Iterator[tuple[str, Tensor]]]
    notes: tuple[str, ...] = ()


CAUSAL = "expected a causal language model with its head (of PEFT, what merge_and_unload() gives)"


def from_peer(source: str | Path | nn.Module, *, dtype: torch.dtype | None = None) -> LanguageModel:
    """A peer's model as a :class:`~attnzoo.models.LanguageModel` in evaluation mode.

    What an importer should know, such as an option that reproduces what the peer does on purpose, is a line of the log.

    Args:
        source: a folder in Hugging Face's layout (`config.json` and safetensors), or a model of transformers or of
            flash-linear-attention.
        dtype: of the weights; None keeps the peer's. Angles, slopes and biases of gates stay in float32.

    Raises:
        FileNotFoundError: no such folder, or no weights in it.
        ValueError: a kind of model that is not known, a setting that has no counterpart, or weights that are missing,
            left over or of another shape, as of a model without its head or inside an adapter.
        TypeError: neither a folder nor a model.
    """
    if isinstance(source, nn.Module):
        if not hasattr(getattr(source, "config", None), "to_dict"):
            raise ValueError(f"source: {CAUSAL}, got {type(source).__name__}")
        peer, weights = peer_of(source.config.to_dict()), _weights_of(source)  # type: ignore[union-attr, operator]
    elif isinstance(source, (str, Path)):
        peer, weights = peer_of(read_settings(Path(source))), Weights.of_folder(Path(source))
    else:
        raise TypeError(f"source: expected a folder or a model, got {type(source).__name__}")
    for note in peer.notes:
        logger.warning(note)
    return build(peer, weights, dtype)


def _weights_of(model: nn.Module) -> Weights:
    weights = model.state_dict()
    if "lm_head.weight" not in weights:
        raise ValueError(f"source: {CAUSAL}, got {type(model).__name__}")
    return Weights.of_state(weights)


def peer_of(fields: dict[str, Any]) -> Peer:
    """The mapping for a configuration, as `config.json` holds it.

    Raises:
        ValueError: an unknown `model_type`, or a setting that has no counterpart.
    """
    kind = fields.get("model_type")
    if kind in WITHOUT:
        raise ValueError(f"model_type {kind!r} is not supported: {WITHOUT[kind]}")
    if kind not in PEERS:
        raise unknown("model_type", str(kind), PEERS)
    module, _, name = PEERS[kind].partition(":")
    make: Callable[[Settings], Peer] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    return make(Settings(fields))


@torch.no_grad()
def build(peer: Peer, weights: Weights, dtype: torch.dtype | None = None) -> LanguageModel:
    """The model, every weight of it taken from the peer's and every one of the peer's used.

    Raises:
        ValueError: weights that are missing, left over or of another shape.
    """
    with torch.device("meta"):
        model = LanguageModel(peer.config)
    there = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    missing = dict(there)
    state = {}
    for name, tensor in peer.weights(weights):
        if name not in there:
            raise ValueError(f"{name}: the model has no such weight")
        if tensor.shape != there[name].shape:
            raise ValueError(f"{name}: expected shape {list(there[name].shape)}, got {list(tensor.shape)}")
        missing.pop(name, None)
        precise = there[name].dtype != torch.float32 or _is_precise(model, name)
        state[name] = tensor.to(there[name].dtype if precise else dtype or tensor.dtype).contiguous()
    kept = model.state_dict().keys()
    if absent := [name for name in missing if name in kept]:
        raise ValueError(f"weights that nothing was found for: {', '.join(absent)}")
    if weights.unread:
        raise ValueError(f"weights that have no place: {', '.join(sorted(weights.unread))}")
    model.load_state_dict(state, assign=True)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    if peer.config.tie_embeddings:
        model.head.weight = model.embedding.weight
    return model.eval()


def _is_precise(model: nn.Module, name: str) -> bool:
    owner, _, own = name.rpartition(".")
    return own in getattr(model.get_submodule(owner), "precise", ())


def read_settings(folder: Path) -> dict[str, Any]:
    """What `config.json` of a folder holds.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it cannot be read, or is no JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        hub = not folder.exists() and len(folder.parts) == 2 and not folder.is_absolute()  # OWNER/NAME
        how = f" (a model of the hub: first `hf download {folder} --local-dir FOLDER`)" if hub else ""
        if (folder / "adapter_config.json").is_file():
            how = " (it is an adapter, which `merge_and_unload` puts into its model)"
        raise FileNotFoundError(f"no model in {str(folder)!r}: there is no config.json{how}")
    return json_object(path.read_bytes(), path)


__all__ = ["PEERS", "Peer", "Settings", "Weights", "build", "from_peer", "peer_of", "read_settings"]
