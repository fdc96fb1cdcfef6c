"""Model folders of Hugging Face: written from a run, from another library's model, and read to start a run from."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnzoo import __version__
from attnzoo.data.shards import TOKENIZER as TOKENS
from attnzoo.data.shards import is_shards, read_shards
from attnzoo.data.sources import BYTES, is_text
from attnzoo.data.tokenizer import FILES, byte_tokenizer, read_tokenizer, special_tokens, tokenizer_files, unadorned
from attnzoo.files import damaged_name, json_object, whole_folder
from attnzoo.models.config import ModelConfig
from attnzoo.training.checkpoint import load_run, read_progress, usable_checkpoint
from attnzoo.training.config import TrainConfig
from attnzoo.training.digests import MODEL, PARTS
from attnzoo.training.forgetting import config_now
from attnzoo.training.recipe import load_config, to_yaml
from attnzoo.training.sharding import join_parts

if TYPE_CHECKING:
    import torch

    from attnzoo.data.config import DataConfig
    from attnzoo.models import LanguageModel

logger = logging.getLogger(__name__)

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
BYTEWISE = "bytes"
EMBEDDING, HEAD = "embedding.weight", "head.weight"
KEPT = "tokenizer"  # in a run's folder: the files of the tokenizer of its data
CODE = """import attnzoo  # registers the model's class
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER").eval()
"""
SPEAKS = """tokenizer = AutoTokenizer.from_pretrained("FOLDER")
prompt = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=50, do_sample=True)[0]))
"""
RECIPE = "train.yaml"  # in an imported folder: a configuration that trains on from it


def export_run(run: Path, folder: Path) -> Path:
    """Write the newest whole checkpoint of a run as a folder for `AutoModelForCausalLM.from_pretrained`.

    The folder holds the weights (safetensors), the configuration, a model card, and the tokenizer of the run's data,
    where it is known. It appears whole or not at all. Layers that are still learning to forget stay where they stand:
    their share of the teacher is in the configuration.

    Args:
        run: the folder of a run.
        folder: what to write; it must not exist, or be empty.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: no run, or none with a checkpoint.
        FileExistsError: there is something in `folder`.
        ModuleNotFoundError: transformers is not installed.
    """
    _need_transformers("export")
    from attnzoo.models.hf import AttnzooForCausalLM

    checkpoint = usable_checkpoint(run, MODEL)
    model, config = load_run(run, checkpoint=checkpoint)
    step = 0 if checkpoint is None else read_progress(checkpoint).step
    model.config = config_now(model)
    tokenizer = tokenizer_of(run, config.data)
    with whole_folder(folder) as part:
        for name, content in tokenizer.items():
            (part / name).write_bytes(content)
        AttnzooForCausalLM.of(model, **special_tokens(tokenizer)).save_pretrained(part)
        (part / "README.md").write_text(_card(model, config, step, bool(tokenizer)))
    return folder


def keep_tokenizer(data: DataConfig, run: Path, anew: bool) -> None:
    """Copy the tokenizer of a run's data, where its files have one, into the run's folder, once.

    ``anew``: there is no checkpoint, and what an attempt before has left may be of other data; it is set aside then.

    Raises:
        FileExistsError: what has that name in the folder can be no tokenizer of a run.
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


def _content(folder: Path) -> dict[str, bytes | None] | None:
    """The files of a folder by name, None for anything else in it; None for what is no folder."""
    if folder.is_symlink() or not folder.is_dir():
        return None
    return {path.name: path.read_bytes() if path.is_file() else None for path in folder.iterdir()}


def tokenizer_of(run: Path, data: DataConfig) -> dict[str, bytes]:
    """The files of the tokenizer by which a run's data was made; none where nobody said.

    Nothing stands around the documents that a run has learned (``data.tokenize``), so it puts nothing there either.
    """
    if (run / KEPT).is_dir():
        return unadorned(read_tokenizer(run / KEPT))
    return tokenizer_files(byte_tokenizer()) if is_bytes(data) else {}


def is_bytes(data: DataConfig) -> bool:
    """Whether tokens are bytes of a text."""
    numbers = data.vocab_size is not None
    return data.task is None and all(is_text(entry.source, data.pattern, numbers) for entry in data.weighted)


def learned_bytes(run: Path, data: DataConfig) -> bool:
    """Whether a run's tokens are bytes: its data may be gone, and then what it kept no tokenizer of was bytes."""
    return is_bytes(data) and not (run / KEPT).is_dir()


def import_model(source: Path, folder: Path, dtype: torch.dtype | None = None) -> tuple[str, ...]:
    """Write another library's model as a folder for `AutoModelForCausalLM.from_pretrained`, with its tokenizer.

    The folder also holds `train.yaml`, a configuration that starts from it. It appears whole or not at all.

    Args:
        source: the peer's folder, as :func:`~attnzoo.models.peers.from_peer` takes it.
        folder: what to write; it must not exist, or be empty.
        dtype: of the weights; None keeps the peer's.

    Returns:
        What an importer should know, one line each.

    Raises:
        FileNotFoundError, ValueError: as :func:`~attnzoo.models.peers.from_peer`.
        FileExistsError: there is something in `folder`.
        ModuleNotFoundError: transformers is not installed.
    """
    _need_transformers("import")
    from attnzoo.models.hf import AttnzooForCausalLM
    from attnzoo.models.peers import Settings, Weights, build, peer_of, read_settings

    fields = read_settings(source)
    peer, settings = peer_of(fields), Settings(fields)
    special = {name: settings.tokens(name) for name in SPECIAL}
    for name, tokens in special.items():
        if len(tokens) > 1 and name != "eos_token_id":
            raise ValueError(f"config.json: {name}: expected one token, got {tokens}")
    with whole_folder(folder) as part:
        model = build(peer, Weights.of_folder(source), dtype, settings)
        alone = {name: tokens if len(tokens) > 1 else next(iter(tokens), None) for name, tokens in special.items()}
        AttnzooForCausalLM.of(model, **alone).save_pretrained(part)
        for name in TOKENIZER:
            if (source / name).is_file():
                shutil.copyfile(source / name, part / name)
        recipe = TrainConfig(output_dir=f"runs/{folder.name}", start_from=str(folder), model=model.config)
        (part / RECIPE).write_text(to_yaml(recipe))
    return peer.notes


def recipe_of(folder: str | Path) -> TrainConfig:
    """The configuration by which a run was trained, or one that trains on from a model folder.

    Args:
        folder: of a run, or one that `attnzoo export` or `attnzoo import` wrote. Of the latter two only the model is
            known; how it is trained, and on what, is left at the defaults.

    Raises:
        FileNotFoundError: neither is there.
        ValueError: a model of another library.
        ModuleNotFoundError: transformers, for a model folder, is not installed.
    """
    folder = Path(folder)
    if (folder / "config.yaml").is_file():
        return replace(load_config(folder / "config.yaml"), output_dir=str(folder))
    _check_ours(folder, "folder")
    from attnzoo.models.hf import AttnzooConfig
    from attnzoo.models.peers import read_settings

    model = AttnzooConfig.read(read_settings(folder))
    return TrainConfig(output_dir=f"runs/{folder.name}", start_from=str(folder), model=model)


def _check_ours(folder: Path, argument: str) -> None:
    """FileNotFoundError: no model folder; ValueError: one of another library."""
    from attnzoo.models.peers import kind_of, read_settings

    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{argument}: expected a run or a model folder, got {str(folder)!r}")
    kind = kind_of(read_settings(folder))
    if kind != "attnzoo":
        raise ValueError(
            f"{argument}: {str(folder)!r} holds a model of {kind!r}: `attnzoo import` makes it one of ours"
        )


def start_from(model: LanguageModel, source: str, data: DataConfig) -> None:
    """Give a model the weights of a run or of a model folder, where it has them too; a line of the log says which.

    What the source has not starts as the model started it, and what only the source has is left: another variant's
    gate, for example. What one gate projection has goes along when it comes to stand beside others, or alone: FoX's
    forget gate into PaTH-FoX.

    Args:
        model: changed in place.
        source: the folder of a run, or one that `attnzoo export` or `attnzoo import` wrote.
        data: what the model is going to be trained on.

    Raises:
        FileNotFoundError: neither is there.
        ValueError: a weight of another shape, or none in common, or data by another tokenizer; or a head of its own,
            and a model without one.
    """
    state, new, left = weights_for(model, source, data)
    model.load_state_dict(state, strict=False)
    logger.warning(
        "%d weights from %s; starting anew: %s; left there: %s",
        len(state), source, _listed(new), _listed(left),
    )  # fmt: skip


def weights_for(model: LanguageModel, source: str, data: DataConfig) -> tuple[dict[str, Any], list[str], list[str]]:
    """What :func:`start_from` gives a model, which stays as it is; what starts anew, and what is left at the source."""
    import torch

    from attnzoo.models.peers import Settings, Weights, check_plain, read_settings

    folder = Path(source)
    if (folder / "config.yaml").is_file():
        checkpoint = usable_checkpoint(folder, MODEL)
        if checkpoint is None:
            raise FileNotFoundError(f"start_from: the run in {source!r} has no checkpoint yet")
        parts = checkpoint / PARTS
        there = Weights.of_state(join_parts(parts)) if parts.is_dir() else Weights.of_folder(checkpoint)
        prefix, tied = "", True
    else:
        _check_ours(folder, "start_from")
        there, prefix = Weights.of_folder(folder), "model."
        settings = Settings(read_settings(folder))
        check_plain(there, settings)
        tied = settings.get("tie_word_embeddings", ModelConfig.tie_embeddings)
    _check_tokenizer(folder, data)
    state, new, ours = {}, [], model.state_dict()
    once, homes = _by_projection([prefix + name for name in ours]), _by_projection(there.names)
    for name, tensor in ours.items():
        home = prefix + name
        if name == HEAD and tied and home not in there:  # a tied model's files hold it once
            home = prefix + EMBEDDING
        if home not in there and _projection(home) in once:
            home = homes.get(_projection(home), home)
        if home not in there or (home != prefix + name and there.read(home).shape != tensor.shape):
            new.append(name)
            continue
        state[name] = there(home)
        if state[name].shape != tensor.shape:
            raise ValueError(
                f"start_from: {name} has the shape {list(state[name].shape)} in {source!r}, "
                f"and {list(tensor.shape)} in this model"
            )
    if not state:
        raise ValueError(f"start_from: {source!r} and this model have no weight in common")
    if model.config.tie_embeddings:
        if {EMBEDDING, HEAD} <= state.keys() and not torch.equal(state[EMBEDDING], state[HEAD]):
            raise ValueError(
                f"start_from: the head of {source!r} is not its embedding, and model.tie_embeddings=true has one "
                "matrix for both"
            )
        new = [name for name in new if name != HEAD]
    return state, new, sorted(name.removeprefix(prefix) for name in there.unread)


def _projection(name: str) -> str:
    """A weight's name as it is where its gate projection stands alone."""
    return re.sub(r"\.gate\.members\.\d+\.", ".gate.", name)


def _by_projection(names: Collection[str]) -> dict[str, str]:
    """The names by `_projection`, of those that no two have."""
    times = Counter(map(_projection, names))
    return {_projection(name): name for name in names if times[_projection(name)] == 1}


def _check_tokenizer(folder: Path, data: DataConfig) -> None:
    """Refuse data by another tokenizer than that of a run or of a model folder, where both are known."""
    known = next((path for path in (folder / KEPT / TOKENS, folder / TOKENS) if path.is_file()), None)
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
                f"start_from: data.source={entry.source!r} {found}, and {str(folder)!r} has a tokenizer of its own: "
                f"{how} what it understands"
            )


def _vocabulary(tokenizer: Path) -> Any:
    """What the numbers stand for."""
    model = json_object(tokenizer.read_bytes(), tokenizer).get("model")
    found = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(found, dict | list):
        raise ValueError(f"{tokenizer}: expected a vocabulary in model.vocab, got {type(found).__name__}")
    return BYTEWISE if len(found) == BYTES else found


def _listed(names: list[str]) -> str:
    """Names with the layers' numbers folded, each once."""
    return ", ".join(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names)) or "none"


def _need_transformers(command: str) -> None:
    if importlib.util.find_spec("transformers") is None:
        raise ModuleNotFoundError(f"{command} needs transformers: pip install 'attnzoo[hf]'", name="transformers")


def _card(model: LanguageModel, config: TrainConfig, step: int, speaks: bool) -> str:
    sizes = model.config
    names = ", ".join(dict.fromkeys(layer.name for layer in sizes.layers()))
    count = sum(parameter.numel() for parameter in model.parameters())
    embedding = model.embedding.weight.numel()
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [attnzoo]
---

# A decoder with {names}

Trained by attnzoo {__version__} for {step:,} steps on `{config.data.title}`.

| | |
|---|---|
| attention | {names} |
| parameters | {count:,}, of which {embedding:,} in the embedding |
| hidden size, layers, heads | {sizes.hidden_size}, {sizes.num_layers}, {sizes.num_heads} |
| vocabulary | {sizes.vocab_size:,} |
| training context | {config.data.context_length:,} tokens |

```python
{CODE + SPEAKS if speaks else CODE}```
"""
