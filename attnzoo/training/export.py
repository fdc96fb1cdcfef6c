"""A run as a model folder of Hugging Face."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnzoo import __version__
from attnzoo.data.sources import BYTES, DOCUMENT_END
from attnzoo.files import whole_folder
from attnzoo.training.checkpoint import load_run, read_progress, usable_checkpoint

if TYPE_CHECKING:
    from attnzoo.models import LanguageModel
    from attnzoo.training.config import TrainConfig

END = "<|end|>"


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
    if importlib.util.find_spec("transformers") is None:
        raise ModuleNotFoundError("export needs transformers: pip install 'attnzoo[hf]'", name="transformers")
    checkpoint = usable_checkpoint(run)
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
