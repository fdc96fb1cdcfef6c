"""Import of other libraries' models (peers): their sizes as a :class:`ModelConfig`, their weights under our names.

Each mapping is tested against the peer's own class with random weights. :func:`from_peer` is the entry point, on the
command line `attnzoo import`.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnzoo.errors import unknown
from attnzoo.files import json_object
from attnzoo.models.config import ModelConfig
from attnzoo.models.decoder import LanguageModel
from attnzoo.models.peers.settings import DTYPES, Settings
from attnzoo.models.peers.table import AROUND, PEERS, WITHOUT, unserved
from attnzoo.models.peers.weights import Weights
from attnzoo.models.swap import Unfilled

logger = logging.getLogger(__name__)
OF_IMAGES = tuple(
    f"{outer}{part}." for part in ("visual", "vision_tower", "multi_modal_projector") for outer in ("", "model.")
)


@dataclass(frozen=True)
class Peer:
    """The mapping of one peer's model to ours.

    Args:
        config: the sizes, and the variant of each layer.
        weights: a function from the peer's weights to our names and tensors.
        notes: remarks for the importer, one line each.
    """

    config: ModelConfig
    weights: Callable[[Weights], Iterator[tuple[str, Tensor]]]
    notes: tuple[str, ...] = ()


CAUSAL = "expected a causal language model with its head (of PEFT, what merge_and_unload() gives)"


def from_peer(source: str | Path | nn.Module, *, dtype: torch.dtype | None = None) -> LanguageModel:
    """A peer's model as a :class:`~attnzoo.models.LanguageModel` in evaluation mode.

    Remarks for the importer, such as on an option that reproduces a peculiarity of the peer, are lines of the log.

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
        fields: dict[str, Any] = source.config.to_dict()  # type: ignore[union-attr, operator]
        peer, weights = peer_of(fields), _weights_of(source)
    elif isinstance(source, (str, Path)):
        fields = read_settings(Path(source))
        peer, weights = peer_of(fields), Weights.of_folder(Path(source))
    else:
        raise TypeError(f"source: expected a folder or a model, got {type(source).__name__}")
    for note in peer.notes:
        logger.warning(note)
    return build_peer(peer, weights, dtype, Settings(fields))


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
    kind = kind_of(fields)
    if kind in AROUND:
        inner = peer_of(language_model(fields))

        def text(weights: Weights) -> Iterator[tuple[str, Tensor]]:
            weights.rename(_of_text)
            return inner.weights(weights)

        left = f"{kind}: its language model alone is taken, without what reads images"
        return Peer(inner.config, text, (left, *inner.notes))
    if kind in WITHOUT:
        raise ValueError(f"model_type {kind!r} is not supported: {WITHOUT[kind]}")
    if kind not in PEERS:
        without = unserved(kind, fields)
        error = unknown("model_type", kind, PEERS, see="attnzoo import --list") if without is None else without
        raise ValueError(f"config.json: {error}{_inside(fields)}")
    if "text_config" in Settings(fields):
        raise ValueError(
            f"config.json: text_config: expected none beside model_type {kind!r}, whose fields are outside"
        )
    module, _, name = PEERS[kind].mapping.partition(":")
    make: Callable[[Settings], Peer] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    settings = Settings(fields)
    peer = make(settings)
    return replace(peer, notes=(*peer.notes, *settings.unread()))


def _of_text(name: str) -> str | None:
    """The language model's own name of a weight of a model of text and images; None for what reads images."""
    name = re.sub(r"^language_model\.(?=model\.|lm_head\.)", "", name)  # in the first files of Gemma 3
    return None if name.startswith(OF_IMAGES) else name.replace("model.language_model.", "model.", 1)


def language_model(fields: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the language model: the fields themselves, or those within a model of text and images."""
    kind = AROUND.get(str(fields.get("model_type")))
    if kind is None:
        return fields
    outer: dict[str, Any] = {name: fields[name] for name in ("tie_word_embeddings", "dtype") if name in fields}
    return {**outer, **Settings(fields).within("text_config").fields, "model_type": kind}


def kind_of(fields: dict[str, Any]) -> str:
    """The `model_type` of a configuration.

    Raises:
        ValueError: it is missing.
    """
    kind = str(Settings(fields).get("model_type", ""))
    if not kind:
        raise ValueError(f"config.json: expected a model_type, one of {', '.join(PEERS)}, found none{_inside(fields)}")
    return kind


def _inside(fields: dict[str, Any]) -> str:
    """A remark, for an error, on the language model inside a configuration for several kinds of input; or ""."""
    kind = Settings(fields).within("text_config").fields.get("model_type")
    return f" (the language model within it, in text_config, is of {kind!r})" if kind else ""


@torch.no_grad()
def build_peer(
    peer: Peer, weights: Weights, dtype: torch.dtype | None = None, settings: Settings | None = None
) -> LanguageModel:
    """The model with the peer's weights, after a check that each weight of both is used.

    As in transformers, weights of several dtypes are cast to the configuration's dtype, or else to that of the first
    weight, and a head that differs from the embedding is untied whatever the configuration says. Either is logged.

    Args:
        peer: the mapping.
        weights: the peer's weights.
        dtype: the model's dtype; None keeps that of the weights. Precise parameters stay in at least float32.
        settings: the peer's configuration, read for its dtype; None for none.

    Raises:
        ValueError: weights that are missing, left over, of another shape or quantised.
    """
    settings = Settings({}) if settings is None else settings
    check_plain(weights, settings)
    said = settings.dtype()
    if peer.config.num_layers > len(weights.names):
        raise ValueError(
            f"{settings.place}num_hidden_layers: expected one that fits the {len(weights.names)} weights, got "
            f"{peer.config.num_layers}"
        )
    try:
        with torch.device("meta"), Unfilled():
            model = LanguageModel(peer.config)
    except ValueError as error:
        raise ValueError(f"{settings.place}{error}") from error
    there = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    missing, state = dict(there), dict[str, Tensor]()
    for name, tensor in _shaped(peer, weights, settings):
        if name not in there:
            raise ValueError(f"{name}: the model has no such weight{weights.place}")
        if tensor.shape != there[name].shape:
            expected, got = list(there[name].shape), list(tensor.shape)
            raise ValueError(f"{name}: expected shape {expected}, got {got}{weights.place}")
        missing.pop(name, None)
        state[name] = tensor
    kept = model.state_dict().keys()
    if absent := [name for name in missing if name in kept]:
        raise ValueError(f"weights that nothing was found for: {', '.join(absent)}{weights.place}")
    if weights.unread:
        raise ValueError(f"weights that have no place: {', '.join(sorted(weights.unread))}{weights.place}")
    precise = {name for name in state if _is_precise(model, name)}
    dtype = dtype or _one_dtype({name: x for name, x in state.items() if name not in precise}, weights, said)
    for name, x in state.items():
        least = torch.promote_types(x.dtype, there[name].dtype) if name in precise else dtype
        state[name] = x.to(least).contiguous()
    if peer.config.tie_embeddings and not torch.equal(state["head.weight"], state["embedding.weight"]):
        logger.warning("config.json says that the head is the embedding, but the file's is another: it is taken")
        model.untie(state["head.weight"])
    model.load_state_dict(state, assign=True)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return model.eval()


def _shaped(peer: Peer, weights: Weights, settings: Settings) -> Iterator[tuple[str, Tensor]]:
    """The peer's weights under our names.

    Raises:
        ValueError: one cannot be cut as the sizes of the configuration say; the message names it.
    """
    try:
        yield from peer.weights(weights)
    except RuntimeError as error:
        raise ValueError(f"{settings.place}its sizes are not those of the weight {weights.last!r}: {error}") from error


def check_plain(weights: Weights, settings: Settings) -> None:
    """Raise for weights of a quantised model.

    Raises:
        ValueError: a dtype that is not computed in; the message names the quantisation if the configuration does.
    """
    others = {name: kind for name in weights.names if (kind := weights.dtype(name)) not in DTYPES}
    how = settings.quantisation()
    if others:
        name, kind = next(iter(others.items()))
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise ValueError(
            f"{settings.place if how else ''}{f'{how}: ' if how else ''}expected weights of {', '.join(DTYPES)}, got "
            f"{kind} ({name}{more}): take the model of which they were quantised, or what dequantises them (in "
            "transformers `dequantize()` before `save_pretrained`, in MLX `mlx_lm.convert -d`)"
        )
    if how:
        logger.warning("%s%s counts for nothing: the weights are not quantised", settings.place, how)


def _one_dtype(state: dict[str, Tensor], weights: Weights, said: torch.dtype | None) -> torch.dtype:
    """The dtype of all tensors, or the one that different ones are cast to, which is logged."""
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name, x in state.items():
        by_dtype.setdefault(x.dtype, []).append(name)
    if len(by_dtype) == 1:
        return next(iter(by_dtype))
    found = said or DTYPES[weights.dtype(next(iter(weights.names)))]
    changed = [name for dtype, names in by_dtype.items() if dtype != found for name in names]
    listed = ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
    why = "as config.json says" if said else "as the file's first weight is"
    logger.warning("weights of %s all become %s, %s: %s", ", ".join(map(str, by_dtype)), found, why, listed)
    return found


def _is_precise(model: nn.Module, name: str) -> bool:
    owner, _, own = name.rpartition(".")
    return own in getattr(model.get_submodule(owner), "precise", ())


def read_settings(folder: Path) -> dict[str, Any]:
    """The fields of a folder's `config.json`.

    Raises:
        FileNotFoundError: the file does not exist.
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


__all__ = [
    "PEERS",
    "Peer",
    "Settings",
    "Weights",
    "build",
    "check_plain",
    "from_peer",
    "kind_of",
    "peer_of",
    "read_settings",
]
