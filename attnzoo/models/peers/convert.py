"""A peer's model folder as one of ours."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from attnzoo.files import whole_folder
from attnzoo.models.hf import AttnzooForCausalLM
from attnzoo.models.peers import Settings, Weights, build, peer_of, read_settings

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


def convert(source: Path, folder: Path, dtype: torch.dtype | None = None) -> tuple[str, ...]:
    """Write a peer's model as a folder for `AutoModelForCausalLM.from_pretrained`, with the peer's tokenizer.

    The folder appears whole or not at all.

    Args:
        source: the peer's folder.
        folder: what to write; it must not exist, or be empty.
        dtype: of the weights; None keeps the peer's.

    Returns:
        What an importer should know, one line each.

    Raises:
        FileNotFoundError, ValueError: as :func:`~attnzoo.models.peers.from_peer`.
        FileExistsError: there is something in `folder`.
    """
    fields = read_settings(source)
    peer = peer_of(fields)
    settings = Settings(fields)
    with whole_folder(folder) as part:
        model = build(peer, Weights.of_folder(source), dtype)
        special = {name: settings.get(name) for name in TOKENS}
        AttnzooForCausalLM.of(model, **special).save_pretrained(part)
        for name in TOKENIZER:
            if (source / name).is_file():
                shutil.copyfile(source / name, part / name)
    return peer.notes
