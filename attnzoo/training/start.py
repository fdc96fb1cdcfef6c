"""The start of a run: a copy of its data's tokenizer, and weights of another run or of a model folder."""

from __future__ import annotations

import logging
import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnzoo.data.shards import TOKENIZER, is_shards, read_shards
from attnzoo.data.sources import BYTES, is_text
from attnzoo.data.tokenizer import FILES, byte_tokenizer, read_tokenizer, tokenizer_files, unadorned
from attnzoo.files import damaged_name, json_object, whole_folder
from attnzoo.models.config import ModelConfig
from attnzoo.training.checkpoint import step_of, usable_checkpoint
from attnzoo.training.digests import MODEL, PARTS
from attnzoo.training.recipe import load_config
from attnzoo.training.sharding import join_parts
from attnzoo.training.small import model_folder, what_is_there

if TYPE_CHECKING:
    from attnzoo.data.config import DataConfig
    from attnzoo.models import LanguageModel

logger = logging.getLogger(__name__)

BYTEWISE = "bytes"
EMBEDDING, HEAD = "embedding.weight", "head.weight"
KEPT = "tokenizer"  # in a run's folder: the files of the tokenizer of its data


def keep_tokenizer(data: DataConfig, run: Path, anew: bool) -> None:
    """Copy the tokenizer of a run's data, where its files have one, into the run's folder, once.

    With ``anew`` (no checkpoint exists) a tokenizer that an earlier attempt left is set aside, as its data may differ.
    Else it stays, and a line of the log says where that of the data is another by now. The fingerprint of the data, by
    which a run knows its tokens again, has no part in it: that of every run so far was made of the tokens alone.

    Raises:
        FileExistsError: something else with that name is in the folder.
    """
    kept, sources = run / KEPT, [Path(entry.source) for entry in data.weighted if is_shards(entry.source)]
    files: dict[str, bytes] = next((read_tokenizer(source) for source in sources if read_shards(source).tokenizer), {})
    found: Mapping[str, bytes | None] | None = _content(kept) if anew and os.path.lexists(kept) else files
    if found is None or not {*found} <= {*FILES}:
        raise FileExistsError(f"output_dir: expected no {str(kept)!r}, where a run keeps the tokenizer of its data")
    if found != files:
        aside = damaged_name(kept, "without-checkpoint-")
        os.replace(kept, aside)
        logger.warning("%s is not of the tokenizer of this run's data; it is kept as %s", kept, aside.name)
    if files and not kept.exists():
        with whole_folder(kept) as part:
            for name, content in files.items():
                (part / name).write_bytes(content)
    elif files and (own := kept / TOKENIZER).is_file() and own.read_bytes() != files[TOKENIZER]:
        logger.warning("%s of the data is not the one that this run began with, which stays: %s", TOKENIZER, kept)


def _content(folder: Path) -> dict[str, bytes | None] | None:
    """The contents of a folder's files by name, None for entries that are no files; None where it is no folder."""
    if folder.is_symlink() or not folder.is_dir():
        return None
    return {path.name: path.read_bytes() if path.is_file() else None for path in folder.iterdir()}


def tokenizer_of(run: Path, data: DataConfig) -> dict[str, bytes]:
    """The files of the tokenizer by which a run's data was made, by name; empty where it is unknown.

    The special tokens that it would put around a text are removed, as a run's documents have none (``data.tokenize``).
    """
    if (run / KEPT).is_dir():
        return unadorned(read_tokenizer(run / KEPT))
    return tokenizer_files(byte_tokenizer()) if is_bytes(data) else {}


def is_bytes(data: DataConfig) -> bool:
    """Whether the data's tokens are bytes."""
    numbers = data.vocab_size is not None
    return data.task is None and all(is_text(entry.source, data.pattern, numbers) for entry in data.weighted)


def learned_bytes(run: Path, data: DataConfig) -> bool:
    """Whether a run's tokens are bytes; where its data no longer exists, they are if it has no copy of a tokenizer."""
    return is_bytes(data) and not (run / KEPT).is_dir()


def start_from(model: LanguageModel, source: str, data: DataConfig) -> None:
    """Copy the weights that a model shares with a run or a model folder, in place; a line of the log lists the others.

    Weights that the source lacks keep their initial values, and weights that only the source has (another variant's
    gate) are not used. A gate projection is recognised alone and among several: FoX's forget gate starts PaTH-FoX's.

    Args:
        model: the model, changed in place.
        source: the folder of a run, or one that `attnzoo export` or `attnzoo import` wrote; or a small model's name.
        data: the data that the model will be trained on.

    Raises:
        FileNotFoundError: neither a run nor a model folder.
        ValueError: a weight of another shape, no common weights, data of another tokenizer, or an untied head for a
            model with tied embeddings.
    """
    state, new, left = weights_for(model, source, data)
    model.load_state_dict(state, strict=False)
    logger.warning("%s", transferred(state, new, left, source))


def transferred(state: Collection[str], new: Sequence[str], left: Sequence[str], source: str) -> str:
    """A line about the weights that :func:`weights_for` found."""
    return f"{len(state)} weights from {source}; starting anew: {_listed(new)}; left there: {_listed(left)}"


def weights_for(
    model: LanguageModel, source: str, data: DataConfig, argument: str = "start_from"
) -> tuple[dict[str, Any], list[str], list[str]]:
    """The weights that :func:`start_from` copies, the names that keep initial values, and the source's unused names.

    Messages begin with the name of the ``argument``.
    """
    import torch

    from attnzoo.models.peers import Settings, Weights, check_plain, read_settings
    from attnzoo.models.swap import by_projection, projection_of

    folder = model_folder(source)
    if (folder / "config.yaml").is_file():
        checkpoint = usable_checkpoint(folder, MODEL)
        if checkpoint is None:
            raise FileNotFoundError(f"{argument}: the run in {source!r} has no checkpoint yet")
        if step_of(checkpoint) < (steps := load_config(folder / "config.yaml").steps):
            logger.warning("%s: the run in %r is at step %d of %d", argument, source, step_of(checkpoint), steps)
        parts = checkpoint / PARTS
        there = Weights.of_state(join_parts(parts)) if parts.is_dir() else Weights.of_folder(checkpoint)
        prefix, tied = "", True
    else:
        check_ours(folder, argument)
        there, prefix = Weights.of_folder(folder), "model."
        settings = Settings(read_settings(folder))
        check_plain(there, settings)
        tied = settings.get("tie_word_embeddings", ModelConfig.tie_embeddings)
    _check_tokenizer(folder, data, argument)
    state, new, ours = {}, [], model.state_dict()
    once, homes = by_projection([prefix + name for name in ours]), by_projection(there.names)
    for name, tensor in ours.items():
        home = prefix + name
        if name == HEAD and tied and home not in there:  # a tied model's files hold the matrix once
            home = prefix + EMBEDDING
        if home not in there and projection_of(home) in once:
            home = homes.get(projection_of(home), home)
        if home not in there or (home != prefix + name and there.read(home).shape != tensor.shape):
            new.append(name)
            continue
        state[name] = there(home)
        if state[name].shape != tensor.shape:
            raise ValueError(
                f"{argument}: {name} has the shape {list(state[name].shape)} in {source!r}, "
                f"and {list(tensor.shape)} in this model"
            )
    if not state:
        raise ValueError(f"{argument}: {source!r} and this model have no weight in common")
    if model.config.tie_embeddings:
        if {EMBEDDING, HEAD} <= state.keys() and not torch.equal(state[EMBEDDING], state[HEAD]):
            raise ValueError(
                f"{argument}: the head of {source!r} is not its embedding, and model.tie_embeddings=true has one "
                "matrix for both"
            )
        new = [name for name in new if name != HEAD]
    return state, new, sorted(name.removeprefix(prefix) for name in there.unread)


def config_in(source: str, argument: str) -> ModelConfig:
    """The model's configuration in the folder of a run or a model.

    Raises:
        FileNotFoundError: neither.
        ValueError: another library's model; messages begin with the name of the ``argument``.
    """
    from attnzoo.models.peers import read_settings

    folder = model_folder(source)
    if (folder / "config.yaml").is_file():
        return load_config(folder / "config.yaml").model
    check_ours(folder, argument)
    return ModelConfig.of_folder(read_settings(folder))


def check_ours(folder: Path, argument: str) -> None:
    """Raise FileNotFoundError for no model folder, and ValueError for another library's."""
    from attnzoo.models.peers import kind_of, read_settings

    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{argument}: expected a run or a model folder, got {str(folder)!r}{what_is_there(folder)}"
        )
    kind = kind_of(read_settings(folder))
    if kind != "attnzoo":
        raise ValueError(
            f"{argument}: {str(folder)!r} holds a model of {kind!r}: `attnzoo import` makes it one of ours"
        )


def _check_tokenizer(folder: Path, data: DataConfig, argument: str) -> None:
    """Raise where the data's tokenizer differs from that of a run or a model folder, if both are known."""
    known = next((path for path in (folder / KEPT / TOKENIZER, folder / TOKENIZER) if path.is_file()), None)
    if known is not None:
        expected = _vocabulary(known)
    elif (folder / "config.yaml").is_file() and is_bytes(load_config(folder / "config.yaml").data):
        expected = BYTEWISE
    else:
        return
    for entry in data.weighted:
        tokenizer = read_shards(entry.source).tokenizer if is_shards(entry.source) else None
        if tokenizer is None and not is_bytes(data):
            continue
        if (BYTEWISE if tokenizer is None else _vocabulary(tokenizer)) != expected:
            found = "is read byte by byte" if tokenizer is None else "has tokens of another one"
            how = "bytes are"
            if known is not None:
                how = f"`attnzoo tokenize --tokenizer {shlex.quote(str(known.parent))}` writes"
            raise ValueError(
                f"{argument}: data.source={entry.source!r} {found}, and {str(folder)!r} has a tokenizer of its own: "
                f"{how} what it understands"
            )


def _vocabulary(tokenizer: Path) -> Any:
    """The texts of a tokenizer's token numbers."""
    model = json_object(tokenizer.read_bytes(), tokenizer).get("model")
    found = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(found, dict | list):
        raise ValueError(f"{tokenizer}: expected a vocabulary in model.vocab, got {type(found).__name__}")
    return BYTEWISE if len(found) == BYTES else found


def _listed(names: Sequence[str]) -> str:
    """The names, for a message, with all layers' numbers folded into one."""
    return ", ".join(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names)) or "none"
