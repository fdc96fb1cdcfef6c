"""Export and import: Hugging Face model folders written from a run or from another library's model."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from attnzoo import __version__
from attnzoo.data.tokenizer import special_tokens
from attnzoo.files import whole_folder
from attnzoo.training.checkpoint import read_progress, usable_checkpoint
from attnzoo.training.config import TrainConfig
from attnzoo.training.digests import MODEL, WEIGHTS, write_digests
from attnzoo.training.folder import load_run
from attnzoo.training.forgetting import config_now
from attnzoo.training.metrics import FILE as METRICS
from attnzoo.training.recipe import load_config, to_yaml
from attnzoo.training.small import model_folder
from attnzoo.training.start import KEPT, check_ours, tokenizer_of

if TYPE_CHECKING:
    import torch

    from attnzoo.models import LanguageModel

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
CODE = """import attnzoo  # registers the model's class
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER").eval()
"""
SPEAKS = """tokenizer = AutoTokenizer.from_pretrained("FOLDER")
prompt = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=50, do_sample=True)[0]))
"""
RECIPE = "train.yaml"  # in an imported folder: a configuration that continues training from it


def export_run(run: Path, folder: Path) -> Path:
    """Write the newest whole checkpoint of a run as a folder for `AutoModelForCausalLM.from_pretrained`.

    The folder holds the weights (safetensors), the configuration, a model card, and the tokenizer of the run's data,
    where it is known. It is written whole or not at all. Layers in the middle of learning One-Pass Forgetting keep
    their present schedule values, which are written to the configuration.

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
        AttnzooForCausalLM.of(model, **special_tokens(tokenizer, run)).save_pretrained(part)
        (part / "README.md").write_text(_card(model, config, step, bool(tokenizer)))
    return folder


def bare_run(run: Path, folder: Path) -> Path:
    """Write a run's metrics and its newest whole checkpoint alone, without the optimizer's state and in bfloat16.

    `generate`, `evaluate`, `maps` and all else that reads a run's model read the folder, without transformers; training
    does not go on from it, but may start from its weights. Parameters that are never rounded stay in float32.

    Args:
        run: the folder of a run.
        folder: what to write; it must not exist, or be empty.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: no run, or none with a checkpoint.
        FileExistsError: there is something in `folder`.
    """
    import torch
    from safetensors.torch import save_file

    checkpoint = usable_checkpoint(run, MODEL)
    model, config = load_run(run, checkpoint=checkpoint)
    assert checkpoint is not None  # or it was not loaded
    state = model.to(torch.bfloat16).state_dict()
    if config.model.tie_embeddings:
        del state["head.weight"]
    with whole_folder(folder) as part:
        to = part / checkpoint.relative_to(run)
        to.mkdir(parents=True)
        save_file(state, to / WEIGHTS)
        shutil.copyfile(checkpoint / "progress.json", to / "progress.json")
        write_digests(to)
        (part / "config.yaml").write_text(to_yaml(config))
        if (run / METRICS).is_file():
            shutil.copyfile(run / METRICS, part / METRICS)
        if (run / KEPT).is_dir():
            shutil.copytree(run / KEPT, part / KEPT)
    return folder


def import_model(source: Path, folder: Path, dtype: torch.dtype | None = None) -> tuple[str, ...]:
    """Write another library's model as a folder for `AutoModelForCausalLM.from_pretrained`, with its tokenizer.

    The folder also holds `train.yaml`, a training configuration that starts from it. It is written whole or not at all.

    Args:
        source: the peer's folder, as :func:`~attnzoo.models.peers.from_peer` takes it.
        folder: what to write; it must not exist, or be empty.
        dtype: of the weights; None keeps the peer's.

    Returns:
        Remarks for the importer, one line each.

    Raises:
        FileNotFoundError, ValueError: as :func:`~attnzoo.models.peers.from_peer`.
        FileExistsError: there is something in `folder`.
        ModuleNotFoundError: transformers is not installed.
    """
    _need_transformers("import")
    from attnzoo.models.hf import AttnzooForCausalLM
    from attnzoo.models.peers import Settings, Weights, build_peer, language_model, peer_of, read_settings

    fields = read_settings(source)
    peer, settings = peer_of(fields), Settings(fields)
    said = Settings({**language_model(fields), **fields})
    special = {name: said.tokens(name) for name in SPECIAL}
    for name, tokens in special.items():
        if len(tokens) > 1 and name != "eos_token_id":
            raise ValueError(f"config.json: {name}: expected one token, got {tokens}")
    with whole_folder(folder) as part:
        model = build_peer(peer, Weights.of_folder(source), dtype, settings)
        alone = {name: tokens if len(tokens) > 1 else next(iter(tokens), None) for name, tokens in special.items()}
        context = {**language_model(fields), **fields}.get("max_position_embeddings")
        alone |= {} if context is None else {"max_position_embeddings": context}
        AttnzooForCausalLM.of(model, **alone).save_pretrained(part)
        for name in TOKENIZER:
            if (source / name).is_file():
                shutil.copyfile(source / name, part / name)
        recipe = TrainConfig(output_dir=f"runs/{folder.name}", start_from=str(folder), model=model.config)
        (part / RECIPE).write_text(to_yaml(recipe))
    return peer.notes


def recipe_of(folder: str | Path) -> TrainConfig:
    """The configuration of a run, or one that continues training from a model folder.

    Args:
        folder: a run's folder, a small trained model by its name, or a folder that `attnzoo export` or `attnzoo import`
            wrote. For the latter two only the model is known; optimizer and data have their defaults.

    Raises:
        FileNotFoundError: neither a run nor a model folder.
        ValueError: a model of another library.
        ModuleNotFoundError: transformers, for a model folder, is not installed.
    """
    folder = model_folder(folder)
    if (folder / "config.yaml").is_file():
        return replace(load_config(folder / "config.yaml"), output_dir=str(folder))
    check_ours(folder, "folder")
    from attnzoo.models.hf import AttnzooConfig
    from attnzoo.models.peers import read_settings

    model = AttnzooConfig.read(read_settings(folder))
    return TrainConfig(output_dir=f"runs/{folder.name}", start_from=str(folder), model=model)


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
