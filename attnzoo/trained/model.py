"""A model with its tokenizer, from a run, a model folder or fresh weights; and held-out text for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnzoo.data import DOCUMENT_END, build_data
from attnzoo.data.bpe import END
from attnzoo.data.config import DataConfig
from attnzoo.data.shards import TOKENIZER, is_shards
from attnzoo.data.sources import encode as encode_bytes
from attnzoo.data.tasks import Examples
from attnzoo.data.texts import held_out_names, stdlib_files, text_files, text_of
from attnzoo.data.tokenizer import (
    byte_tokens,
    parse_tokenizer,
    prompt_encoder,
    read_tokenizer,
    special_tokens,
    text_of_bytes,
)
from attnzoo.data.unfolding import Decoding
from attnzoo.data.windows import Joined, Tokens
from attnzoo.errors import UnavailableError
from attnzoo.files import json_object
from attnzoo.models.decoder import LanguageModel
from attnzoo.training.checkpoint import identity, read_progress, usable_checkpoint
from attnzoo.training.config import TrainConfig
from attnzoo.training.digests import MODEL
from attnzoo.training.folder import check_data, load_run
from attnzoo.training.model import new_model
from attnzoo.training.small import model_folder, small_models, what_is_there
from attnzoo.training.start import is_bytes, learned_bytes, start_from, tokenizer_of

LONG = 2**24  # most tokens to read of a text


@dataclass(frozen=True)
class TrainedModel:
    """A model, its tokenizer, and its origin.

    Args:
        title: a description of the model.
        model: the model in evaluation mode.
        folder: folder of the run or of the model; None for fresh weights and for a small model.
        config: the training configuration; None for a model folder, which has none.
        checkpoint: the checkpoint that was loaded, for a run.
        files: the tokenizer's files; empty where tokens are bytes or their tokenizer is unknown.
        texts: texts read by :func:`held_out_text`, by name.
    """

    title: str
    model: LanguageModel
    folder: Path | None = None
    config: TrainConfig | None = None
    checkpoint: Path | None = None
    files: dict[str, bytes] = field(default_factory=dict)
    texts: dict[str | None, Tokens | Joined] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """A text that identifies a run's checkpoint; empty where there is no checkpoint."""
        return "" if self.checkpoint is None else identity(self.checkpoint)

    @property
    def context(self) -> int | None:
        """Tokens per training sequence, where that is known."""
        return None if self.config is None else self.config.data.context_length

    @property
    def task(self) -> str | None:
        """The name of the synthetic task that it was trained on, or None."""
        return None if self.config is None else self.config.data.task

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt: with the tokenizer's special tokens before the text, and none after it.

        Raises:
            ValueError: the tokenizer is unknown.
        """
        return byte_tokens(text) if self._bytes else self._prompt(text)

    def document(self, text: str) -> list[int]:
        """The tokens of a document without the token that ends it.

        For a run they are as `attnzoo tokenize` writes training texts: no special token stands before them, and a
        special token's name within the text is plain text. It raises ValueError as :meth:`encode` does.
        """
        if self._bytes:
            return encode_bytes(text)
        if self.config is None:
            return self.encode(text)
        return list(self._plain_tokenizer.encode(text, add_special_tokens=False).ids)

    def rendered(self, text: str) -> list[int]:
        """The tokens of a text that a chat template wrote, which has all special tokens in it by name.

        It raises ValueError as :meth:`encode` does.
        """
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    @cached_property
    def decode(self) -> Decoding:
        """The decoder from tokens to text; raises ValueError as :meth:`encode`."""
        if self._bytes:
            return Decoding(text_of_bytes, {END: DOCUMENT_END})
        return Decoding.of_tokenizer(self._tokenizer)

    @property
    def end(self) -> int | None:
        """The token that ends a document, or None."""
        return DOCUMENT_END if self._bytes else next(iter(self._ends), None)

    @property
    def stop(self) -> frozenset[int]:
        """The tokens that end the model's text: the tokenizer's, and those in a folder's settings."""
        return frozenset([DOCUMENT_END] if self._bytes else self._ends)

    @cached_property
    def _ends(self) -> list[int]:
        return ends_of(self.files, self.folder if self.config is None else None, self.title)

    @cached_property
    def _prompt(self) -> Callable[[str], list[int]]:
        return prompt_encoder(self._tokenizer)

    @property
    def has_text(self) -> bool:
        """Whether the tokenizer is known, so that tokens have a text."""
        return bool(self.files) or self._bytes

    @property
    def _bytes(self) -> bool:
        return self.config is not None and not self.files and is_bytes(self.config.data)

    @cached_property
    def _tokenizer(self) -> Any:
        return self._parsed()

    @cached_property
    def _plain_tokenizer(self) -> Any:
        tokenizer = self._parsed()
        tokenizer.encode_special_tokens = True
        return tokenizer

    def _parsed(self) -> Any:
        if not self.files:
            raise ValueError(f"{self.title} has no tokenizer ({TOKENIZER}): its tokens stand for no text so far")
        return parse_tokenizer(self.files[TOKENIZER], self.title)


def ends_of(files: Mapping[str, bytes], folder: Path | None, of: str | Path) -> list[int]:
    """The tokens that end a text: the tokenizer's own first, then those of a model folder's settings.

    A chat model's `config.json` and `generation_config.json` name several, of which its tokenizer names one at most.
    """
    from attnzoo.models.peers import Settings

    found = [special_tokens(files, of).get("eos_token_id")]
    for name in ("generation_config.json", "config.json"):
        if folder is not None and (folder / name).is_file():
            fields = json_object((folder / name).read_bytes(), folder / name)
            found += Settings(fields, f"{folder / name}: ").tokens("eos_token_id")
    return list(dict.fromkeys(token for token in found if token is not None))


def load_trained(
    source: str | Path,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    checkpoint: Path | None = None,
    *,
    others: bool = True,
) -> TrainedModel:
    """The model of a run, or of a folder in Hugging Face's layout, ours or another library's.

    Args:
        source: the folder of a run, or one that holds `config.json` and weights, of any kind that `attnzoo import`
            takes; or, where nothing of that path exists, the name of one of the
            :func:`~attnzoo.training.small.small_models`.
        device: the device of the model.
        dtype: the dtype of the weights; None keeps that of the files, and is float32 for a small model.
        checkpoint: the checkpoint of a run to load; None for the newest whole one.
        others: whether models of other libraries are accepted.

    Raises:
        FileNotFoundError: no run or model folder, or no checkpoint.
        ValueError: an unknown kind of model.
        ModuleNotFoundError: transformers, for a folder of ours, is not installed.
    """
    source, name = Path(source), str(source)
    if not source.exists() and name in small_models():
        small = load_trained(model_folder(name), device, dtype or torch.float32)
        return replace(small, title=name, folder=None)  # nothing is written there
    if (source / "config.yaml").is_file():
        checkpoint = checkpoint or usable_checkpoint(source, MODEL)
        model, config = load_run(source, device, checkpoint)
        files = {} if learned_bytes(source, config.data) else tokenizer_of(source, config.data)
        return TrainedModel(f"the run {source}", model.to(dtype), source, config, checkpoint, files)
    if (source / "config.json").is_file():
        model = of_folder(source, device, others).to(dtype).eval()
        files = read_tokenizer(source) if (source / TOKENIZER).is_file() else {}
        return TrainedModel(f"the model in {source}", model, source, files=files)
    raise FileNotFoundError(f"expected a run or a model folder, got {str(source)!r}{what_is_there(source)}")


def fresh_model(name: str, config: TrainConfig, device: str = "cpu", dtype: torch.dtype | None = None) -> TrainedModel:
    """A model as at the start of its training: with random weights, or those that `start_from` names.

    Args:
        name: the name of the configuration.
        config: the training configuration.
        device: the device of the model.
        dtype: the dtype of the weights; None keeps that of the training.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(config.seed)
        model = new_model(config)
    weights = "fresh weights"
    if config.start_from is not None:
        start_from(model, config.start_from, config.data)
        weights = f"the weights of {config.start_from}"
    return TrainedModel(f"{name} with {weights}", model.to(device=device, dtype=dtype).eval(), None, config)


def device_named(name: str) -> str:
    """The device of an option `--device`: cpu, cuda, or auto for a GPU where there is one.

    Raises:
        UnavailableError: cuda without a GPU.
    """
    found = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" != found:
        raise UnavailableError("--device: expected a CUDA GPU, found none; `--device cpu` needs none")
    return found if name == "auto" else name


def of_folder(folder: Path, device: str, others: bool = False) -> LanguageModel:
    """The model of a folder that `attnzoo export` or `attnzoo import` wrote, in evaluation mode.

    Args:
        folder: in Hugging Face's layout.
        device: the device of the model.
        others: whether models of other libraries are accepted.

    Raises:
        ValueError: a model of another library, or of a kind that is not known; or weights that cannot be read, are
            missing, left over or of another shape.
    """
    from attnzoo.models.peers import Peer, Settings, Weights, build_peer, from_peer, kind_of, read_settings

    fields = read_settings(folder)
    kind = kind_of(fields)
    if kind != "attnzoo" and others:
        return from_peer(folder).to(device)
    if kind != "attnzoo":
        raise ValueError(f"{str(folder)!r} holds a model of {kind!r}: `attnzoo import` makes it one of ours")
    from attnzoo.models.hf import AttnzooConfig

    config = AttnzooConfig.read(fields)

    def own_names(weights: Any) -> Iterator[tuple[str, Tensor]]:
        """The decoder's names and tensors from those of Hugging Face's class; a tied matrix, stored once, is given
        twice."""
        for name in sorted(weights.names):
            yield name.removeprefix("model."), weights(name)
        for one, other in (("head", "embedding"), ("embedding", "head")):
            if config.tie_embeddings and f"model.{one}.weight" not in weights:
                yield f"{one}.weight", weights(f"model.{other}.weight")

    return build_peer(Peer(config, own_names), Weights.of_folder(folder), settings=Settings(fields)).to(device)


def held_out_text(subject: TrainedModel, text: str | Path | None = None) -> Tokens | Joined:
    """The tokens, 1-D, of a text that the model was not trained on.

    Args:
        subject: the model.
        text: a text file, a folder of them, or `stdlib` (the files of the standard library that training on it holds
            out); of a long one the first 2^24 tokens. None: the held-out split of the model's own data.

    Raises:
        FileNotFoundError: no such file.
        CheckpointError: a run's data have changed since.
        ValueError: an empty text, an unknown tokenizer, or a model of a task.
    """
    if subject.task is not None:
        given = "" if text is None else f", got {str(text)!r}"
        raise ValueError(
            f"text: {subject.title} is of {subject.task!r}, whose tokens stand for no text{given}; such a run can be "
            f"evaluated on {subject.task}, lengths, pruning, context and maps, without a text"
        )
    name = None if text is None else str(text)
    if name not in subject.texts:
        subject.texts[name] = _own_text(subject) if name is None else _tokens(subject, name)
    return subject.texts[name]


def _own_text(subject: TrainedModel) -> Tokens | Joined:
    if subject.config is None:
        raise ValueError(f"text: expected a file, a folder or 'stdlib', for {subject.title} names no data of its own")
    small = subject.folder is None and subject.checkpoint is not None
    if small and not Path(subject.config.data.source).exists():
        raise ValueError(f"text: expected a file, a folder or 'stdlib', for what {subject.title} held out is not here")
    data = build_data(subject.config.data)
    if subject.checkpoint is not None:
        folder = subject.folder or subject.checkpoint.parents[1]
        check_data(folder, subject.config, read_progress(subject.checkpoint), data)
    assert not isinstance(data.heldout, Examples)
    return data.heldout


def _tokens(subject: TrainedModel, text: str) -> Tokens:
    found: list[int] = []
    end = [] if subject.end is None else [subject.end]
    for file in _files(subject, text):
        try:
            words = text_of(file.read_bytes())
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8 text: {error}") from error
        if subject._bytes and "\0" in words:
            raise ValueError(f"{str(file)!r} has a zero byte, which would end a document")
        found += [*subject.document(words), *end]
        if len(found) >= LONG:
            break
    largest = max(found, default=0)
    if largest >= subject.model.config.vocab_size:
        raise ValueError(f"{subject.title}: expected tokens below {subject.model.config.vocab_size}, got {largest}")
    return np.array(found[:LONG], dtype=np.int64)


def _held_share(subject: TrainedModel) -> float:
    """The share of the standard library that was held out of the model's training.

    Raises:
        ValueError: nothing was held out.
    """
    if subject.config is None:
        return DataConfig.heldout_fraction
    data = subject.config.data
    seen = any(entry.source == "stdlib" for entry in data.weighted)
    if seen and data.heldout_source is not None:
        raise ValueError(
            f"text: expected another text than 'stdlib', on all of which {subject.title} was trained (data."
            f"heldout_source={data.heldout_source!r})"
        )
    return data.heldout_fraction if seen else DataConfig.heldout_fraction


def _files(subject: TrainedModel, text: str) -> Iterable[Path]:
    if text == "stdlib":
        files = stdlib_files()
        held = held_out_names(list(files), _held_share(subject))
        return [files[name] for name in files if name in held]
    path = Path(text)
    if is_shards(path):
        raise ValueError(f"text: expected a text file, a folder of them or 'stdlib', got the tokens {text!r}")
    if not path.exists():
        raise FileNotFoundError(f"text: expected a text file, a folder of them or 'stdlib', got {text!r}")
    return text_files(path, "*").values() if path.is_dir() else [path]
