"""Model folders of Hugging Face: written from a run, from another library's model, and read to start a run from."""

from __future__ import annotations

import importlib.util
import logging
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnzoo import __version__
from attnzoo.config import to_yaml
from attnzoo.data.sources import BYTES, DOCUMENT_END
from attnzoo.files import whole_folder
from attnzoo.training.checkpoint import load_run, read_progress, usable_checkpoint
from attnzoo.training.config import TrainConfig
from attnzoo.training.digests import MODEL, SHARDS
from attnzoo.training.sharding import read_shards

if TYPE_CHECKING:
    import torch

    from attnzoo.models import LanguageModel

logger = logging.getLogger(__name__)

END = "<|end|>"
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
RECIPE = "train.yaml"  # in an imported folder: a configuration that trains on from it


def export_run(run: Path, folder: Path) -> Path:
    """Write the newest whole checkpoint of a run as a folder for `AutoModelForCausalLM.from_pretrained`.

    The folder holds the weights (safetensors), the configuration, a model card, and for models of bytes a tokenizer.
    It appears whole or not at all.

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
    checkpoint = usable_checkpoint(run, MODEL)
    model, config = load_run(run, checkpoint=checkpoint)
    step = 0 if checkpoint is None else read_progress(checkpoint).step
    with whole_folder(folder) as part:
        _write(model, config, step, part)
    return folder


def _write(model: LanguageModel, config: TrainConfig, step: int, folder: Path) -> None:
    from attnzoo.models.hf import AttnzooForCausalLM

    bytes_ = model.config.vocab_size == BYTES and config.data.vocab_size is None
    ends = {"eos_token_id": DOCUMENT_END, "pad_token_id": DOCUMENT_END} if bytes_ else {}
    AttnzooForCausalLM.of(model, **ends).save_pretrained(folder)
    if bytes_:
        byte_tokenizer().save_pretrained(folder)
    (folder / "README.md").write_text(_card(model, config, step))


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
    peer = peer_of(fields)
    with whole_folder(folder) as part:
        model = build(peer, Weights.of_folder(source), dtype)
        special = {name: Settings(fields).get(name) for name in SPECIAL}
        AttnzooForCausalLM.of(model, **special).save_pretrained(part)
        for name in TOKENIZER:
            if (source / name).is_file():
                shutil.copyfile(source / name, part / name)
        recipe = TrainConfig(output_dir=f"runs/{folder.name}", start_from=str(folder), model=peer.config)
        (part / RECIPE).write_text(to_yaml(recipe))
    return peer.notes


def start_from(model: LanguageModel, source: str) -> None:
    """Give a model the weights of a run or of a model folder, where it has them too; a line of the log says which.

    What the source has not starts as the model started it, and what only the source has is left: another variant's
    gate, for example.

    Args:
        model: changed in place.
        source: the folder of a run, or one that `attnzoo export` or `attnzoo import` wrote.

    Raises:
        FileNotFoundError: neither is there.
        ValueError: a weight of another shape, or none in common.
    """
    from attnzoo.models.peers import Weights, read_settings

    folder = Path(source)
    if (folder / "config.yaml").is_file():
        checkpoint = usable_checkpoint(folder, MODEL)
        if checkpoint is None:
            raise FileNotFoundError(f"start_from: the run in {source!r} has no checkpoint yet")
        shards = checkpoint / SHARDS
        there = Weights.of_state(read_shards(shards)) if shards.is_dir() else Weights.of_folder(checkpoint)
        prefix = ""
    elif (folder / "config.json").is_file():
        kind = read_settings(folder).get("model_type")
        if kind != "attnzoo":
            raise ValueError(f"start_from: {source!r} holds a model of {kind!r}: `attnzoo import` makes it one of ours")
        there, prefix = Weights.of_folder(folder), "model."
    else:
        raise FileNotFoundError(f"start_from: expected a run or a model folder, got {source!r}")
    state, new = {}, []
    for name, tensor in model.state_dict().items():
        if prefix + name not in there:
            new.append(name)
            continue
        state[name] = there(prefix + name)
        if state[name].shape != tensor.shape:
            raise ValueError(
                f"start_from: {name} has the shape {list(state[name].shape)} in {source!r}, "
                f"and {list(tensor.shape)} in this model"
            )
    if not state:
        raise ValueError(f"start_from: {source!r} and this model have no weight in common")
    model.load_state_dict(state, strict=False)
    if model.config.tie_embeddings:
        new = [name for name in new if name != "head.weight"]
    left = sorted(name.removeprefix(prefix) for name in there.unread)
    logger.warning(
        "%d weights from %s; starting anew: %s; left there: %s",
        len(state), source, _listed(new), _listed(left),
    )  # fmt: skip


def _listed(names: list[str]) -> str:
    """Names with the layers' numbers folded, each once."""
    return ", ".join(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names)) or "none"


def _need_transformers(command: str) -> None:
    if importlib.util.find_spec("transformers") is None:
        raise ModuleNotFoundError(f"{command} needs transformers: pip install 'attnzoo[hf]'", name="transformers")


def byte_tokenizer() -> Any:
    """A tokenizer of transformers that gives text as its UTF-8 bytes; byte 0 is the end of a document."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {END if byte == DOCUMENT_END else _shown(byte): byte for byte in range(BYTES)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END, unk_token=END)


def _shown(byte: int) -> str:
    """The character that the byte-level pre-tokenizer of GPT-2 (Radford et al., 2019) writes for a byte."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(byte if byte in printed else 256 + [b for b in range(BYTES) if b not in printed].index(byte))


def _card(model: LanguageModel, config: TrainConfig, step: int) -> str:
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

Trained by attnzoo {__version__} for {step:,} steps on `{config.data.source}`.

| | |
|---|---|
| attention | {names} |
| parameters | {count:,}, of which {embedding:,} in the embedding |
| hidden size, layers, heads | {sizes.hidden_size}, {sizes.num_layers}, {sizes.num_heads} |
| vocabulary | {sizes.vocab_size:,} |
| training context | {config.data.context_length:,} tokens |

```python
import attnzoo  # registers the model's class
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("FOLDER")
```
"""
