"""Tokenizers (bytes, byte-level BPE trained on local text, or existing ones), and texts as folders of tokens.

All but bytes need the package tokenizers (`pip install 'attnzoo[hf]'`).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attnzoo.data.bpe import END, GPT2_END, gpt2_files, gpt2_tokenizer, shown_byte, train_bpe
from attnzoo.data.config import check_pattern
from attnzoo.data.documents import Documents, rolled
from attnzoo.data.shards import TOKENIZER, TokenShards, write_shards
from attnzoo.data.sources import BYTES, DOCUMENT_END, decode, encode
from attnzoo.data.windows import Tokens
from attnzoo.files import json_object

logger = logging.getLogger(__name__)

SETTINGS = "tokenizer_config.json"
NAMING = (SETTINGS, "special_tokens_map.json")  # files that name special tokens
FILES = (TOKENIZER, *NAMING, "added_tokens.json", "chat_template.jinja")
LONG = 2**20  # characters to encode at once, which bounds the memory


@dataclass(frozen=True)
class Tokenized:
    """The result of :func:`tokenize`.

    Args:
        shards: the folder of tokens.
        files: number of texts read.
        bytes: bytes of all texts, in UTF-8.
    """

    shards: TokenShards
    files: int
    bytes: int


def tokenize(
    paths: Sequence[Path],
    folder: Path,
    *,
    vocab_size: int | None = None,
    tokenizer: Path | None = None,
    end: str | None = None,
    pattern: str = "*",
    heldout_fraction: float = 0.05,
    text_field: str | None = None,
    roll: int | None = None,
) -> Tokenized:
    """Write texts as a folder of tokens with its tokenizer, which appears whole or not at all.

    Each file is a document and is held out or not as a whole, by its name; of a single file the end is held out, from
    the start of a line, where that is at most twice the share. With `text_field`, and of Zarr arrays, each row is a
    document, held out or not by its file and number. A tokenizer is trained on the training split alone.

    Args:
        paths: text files (UTF-8) and folders of them, or `stdlib`, the Python standard library's own source; or Zarr
            arrays of tokens, with the tokenizer that made them.
        folder: what to write; it must not exist, or be empty.
        vocab_size: number of tokens of a byte-level BPE tokenizer to train; short texts may give fewer. With 256 each
            byte is a token, and the zero byte ends a document.
        tokenizer: an existing tokenizer instead: a `tokenizer.json`, or a folder that holds one.
        end: the token that ends a document; None for the end of sequence of the given tokenizer's settings.
        pattern: which files of folders, at any depth.
        heldout_fraction: share of the files that is held out.
        text_field: the files are tables, and their documents the rows' texts under this name
            (:func:`attnzoo.data.tables.texts_of_rows`).
        roll: cut documents into sequences of so many tokens, each rolled by a random number of them, which takes from
            a position what it says about the text (FoX paper, appendix C); what is left over is left out.

    Raises:
        FileNotFoundError: a path or a tokenizer does not exist.
        FileExistsError: `folder` is not empty.
        ValueError: both or none of `vocab_size` and `tokenizer`, a text that is not UTF-8, names that are not
            different, one file under two names, or no token that ends a document.
        ModuleNotFoundError: tokenizers is not installed.
    """
    check_options(vocab_size, tokenizer, heldout_fraction)
    check_pattern(pattern)
    if pattern != "*" and not any(path.is_dir() for path in paths):
        raise ValueError(f"pattern: expected '*' where no path is a folder, for it chooses files, got {pattern!r}")
    if roll is not None and roll < 2:
        raise ValueError(f"roll: expected at least 2 tokens, got {roll}")
    source = Documents.of(paths, pattern, heldout_fraction, text_field, may_hold_zero=vocab_size != BYTES)
    if source.arrays and tokenizer is None:
        raise ValueError(f"tokenizer: expected the one that made the tokens of {str(paths[0])!r}, got none")
    if tokenizer is None:
        assert vocab_size is not None
        made, end = byte_tokenizer() if vocab_size == BYTES else train_bpe(source.texts(0), vocab_size), end or END
        own = tokenizer_files(made)
    else:
        own = read_tokenizer(tokenizer)
        made = parse_tokenizer(own[TOKENIZER], tokenizer)
        end = end or special_name(own, "eos_token", tokenizer)
        own.setdefault(SETTINGS, _settings(end))
    token = made.token_to_id(end) if end else None
    if token is None:
        raise ValueError(f"end: expected a token of the tokenizer that ends documents, got {end!r}")
    if special_name(own, "eos_token") != end:  # generation must stop at the token that ended documents
        named = {name: {**json_object(own[name], name), "eos_token": end} for name in NAMING if name in own}
        own |= {name: json.dumps(settings, indent=1).encode() for name, settings in named.items()}

    def split(side: int) -> Iterator[Tokens]:
        found = source.rows_of_tokens(side) if source.arrays else _documents(made, token, source.texts(side))
        return found if roll is None else rolled(found, roll, str(side))

    vocab = max(made.get_vocab(with_added_tokens=True).values()) + 1
    source.read = 0, 0  # the training of a tokenizer reads too
    shards = write_shards(folder, vocab, split(0), split(1), tokenizer=own)
    texts, size = source.read
    return Tokenized(shards, texts if source.rows else len(source.files), size)


def check_options(vocab_size: int | None, tokenizer: Path | None, heldout_fraction: float) -> None:
    """Raise for options that :func:`tokenize` refuses, before any text is read.

    Raises:
        ValueError: see there.
    """
    if (vocab_size is None) == (tokenizer is None):
        given = "neither" if vocab_size is None else "both"
        raise ValueError(f"vocab_size, tokenizer: expected one of the two, got {given}")
    if vocab_size is not None and vocab_size < BYTES:
        raise ValueError(f"vocab_size: expected at least {BYTES}, for all bytes, got {vocab_size}")
    if not 0 < heldout_fraction < 1:
        raise ValueError(f"heldout_fraction: expected a number between 0 and 1, got {heldout_fraction}")


def byte_tokenizer() -> Any:
    """The `tokenizers.Tokenizer` whose tokens are UTF-8 bytes; byte 0 ends a document.

    Raises:
        ModuleNotFoundError: tokenizers is not installed.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {END if byte == DOCUMENT_END else shown_byte(byte): byte for byte in range(BYTES)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=END))
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_tokens(text: str) -> list[int]:
    """The tokens that :func:`byte_tokenizer` makes of a text, without the package tokenizers."""
    tokens: list[int] = []
    for number, piece in enumerate(text.split(END)):
        tokens += [DOCUMENT_END] * (number > 0) + encode(piece)
    return tokens


def text_of_bytes(tokens: Iterable[int]) -> str:
    """The text of byte tokens, without ends of documents and tokens that are no bytes."""
    return decode(token for token in tokens if token != DOCUMENT_END and token < BYTES)


def tokenizer_files(tokenizer: Any) -> dict[str, bytes]:
    """The files from which `AutoTokenizer` loads a trained tokenizer, whose documents end in `END`."""
    return {TOKENIZER: tokenizer.to_str(pretty=True).encode(), SETTINGS: _settings(END)}


def _settings(end: str | None) -> bytes:
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "pad_token": end,
        "padding_side": "left",
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }
    return json.dumps(settings, indent=1).encode()


def read_tokenizer(path: Path) -> dict[str, bytes]:
    """The files of a tokenizer.

    Args:
        path: a `tokenizer.json`, or a folder that holds one and perhaps its settings; or GPT-2's, as a folder with
            `vocab.json` and `merges.txt`, or as tiktoken's file.

    Raises:
        FileNotFoundError: no tokenizer.
        ValueError: a file that is no JSON object.
    """
    if path.suffix == ".tiktoken" or (not (path / TOKENIZER).is_file() and gpt2_files(path)):
        made = gpt2_tokenizer(path)
        return {TOKENIZER: made.to_str(pretty=True).encode(), SETTINGS: _settings(GPT2_END)}
    if path.is_file():
        return {TOKENIZER: path.read_bytes()}
    if not (path / TOKENIZER).is_file():
        fills = f"; `tokenizer.save_pretrained({str(path)!r})` writes one" if (path / "config.json").is_file() else ""
        raise FileNotFoundError(f"tokenizer: expected a {TOKENIZER} or a folder with one, got {str(path)!r}{fills}")
    found = {name: (path / name).read_bytes() for name in FILES if (path / name).is_file()}
    for name in (name for name in found if name.endswith(".json")):
        json_object(found[name], path / name)
    return found


def parse_tokenizer(content: bytes, of: str | Path = "") -> Any:
    """The `tokenizers.Tokenizer` of a `tokenizer.json`, without truncation and padding that transformers may have
    saved.

    Args:
        content: of the file.
        of: whose it is, for the error.

    Raises:
        ValueError: the content cannot be read.
        ModuleNotFoundError: tokenizers is not installed.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # tokenizers has no error class
        raise ValueError(f"tokenizer: {TOKENIZER}{f' of {of}' if of else ''} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def opening(tokenizer: Any) -> list[int]:
    """The special tokens that a tokenizer puts before every text, with which a prompt begins.

    The special tokens after a text would end a prompt, and are left out.
    """
    if tokenizer.post_processor is None:
        return []
    for number in range(-1, tokenizer.get_vocab_size()):
        text = "a" if number < 0 else tokenizer.decode([number])
        if tokenizer.encode(text, add_special_tokens=False).ids:
            whole = tokenizer.encode(text)
            return list(whole.ids[: whole.special_tokens_mask.index(0)])
    return []


def prompt_encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """A function from a text to the tokens of a prompt: the :func:`opening` and the text's tokens."""
    before = opening(tokenizer)
    return lambda text: [*before, *tokenizer.encode(text, add_special_tokens=False).ids]


def unadorned(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The tokenizer's files changed so that it adds no special tokens to texts, as :func:`tokenize` writes them."""
    content = json_object(files[TOKENIZER], TOKENIZER)
    after = content.get("post_processor") or {}
    if not isinstance(after, dict):
        raise ValueError(f"{TOKENIZER}: post_processor: expected a mapping, got {after!r}")
    if after.get("type") in (None, "ByteLevel"):  # adds no special tokens
        return dict(files)
    found = {**files, TOKENIZER: json.dumps({**content, "post_processor": None}, ensure_ascii=False, indent=2).encode()}
    if SETTINGS in files:  # transformers may rebuild the post-processor from it
        settings = json_object(files[SETTINGS], SETTINGS)
        adds = {name: False for name in ("add_bos_token", "add_eos_token") if settings.get(name)}
        found[SETTINGS] = json.dumps({**settings, **adds}, indent=1).encode() if adds else files[SETTINGS]
    return found


def special_tokens(files: Mapping[str, bytes], of: str | Path = "") -> dict[str, int]:
    """The numbers of the special tokens in a tokenizer's settings, such as `eos_token_id`; missing tokens are logged.

    Args:
        files: of the tokenizer, by name.
        of: whose it is, for errors.

    Raises:
        ValueError: settings that cannot be read or are malformed.
    """
    named = {kind: special_name(files, f"{kind}_token", of) for kind in ("bos", "eos", "pad")}
    if not any(named.values()):
        return {}
    tokenizer = parse_tokenizer(files[TOKENIZER], of)
    found = {}
    for kind, name in named.items():
        token = tokenizer.token_to_id(name) if name else None
        if token is not None:
            found[f"{kind}_token_id"] = token
        elif name:
            logger.warning("%s_token: the tokenizer's settings name %r, which is no token of %s", kind, name, TOKENIZER)
    return found


def special_name(files: Mapping[str, bytes], kind: str, of: str | Path = "") -> str | None:
    """The text of the special token `kind`, such as `eos_token`, in a tokenizer's settings; None where none is named.

    Raises:
        ValueError: settings that cannot be read or are malformed.
    """
    for name in NAMING:
        where = f"{name} of {of}" if of else name
        token = json_object(files.get(name, b"{}"), where).get(kind)
        text = token.get("content") if isinstance(token, dict) else token
        if (text is not None and not isinstance(text, str)) or (isinstance(token, dict) and text is None):
            raise ValueError(f"{where}: {kind}: expected the text of a token, got {token!r}")
        if text:
            return text
    return None


def _documents(tokenizer: Any, end: int, texts: Iterable[str]) -> Iterator[Tokens]:
    """Yield each text's tokens with the ending token; the name of a special token within a text is plain text."""
    tokenizer.encode_special_tokens = True
    cut = _pieces if _cuts_at_lines(tokenizer) else lambda text: [text]
    pieces = ((piece, number) for number, text in enumerate(texts) for piece in cut(text))
    document: list[Tokens] = []
    current = 0
    for batch in _batches(pieces):
        encodings = tokenizer.encode_batch_fast([piece for piece, _ in batch], add_special_tokens=False)
        for (_, number), encoding in zip(batch, encodings, strict=True):
            if number > current:
                yield np.concatenate([*document, [end]])
                document, current = [], number
            document.append(np.array(encoding.ids, dtype=np.int64))
    if document:
        yield np.concatenate([*document, [end]])


def _batches(pieces: Iterable[tuple[str, int]]) -> Iterator[list[tuple[str, int]]]:
    """Yield batches of pieces, which tokenizers encodes in parallel."""
    batch: list[tuple[str, int]] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[0])
        if size >= LONG:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _cuts_at_lines(tokenizer: Any) -> bool:
    from tokenizers.pre_tokenizers import ByteLevel

    splitter = tokenizer.pre_tokenizer
    plain = isinstance(splitter, ByteLevel) and splitter.use_regex and not splitter.add_prefix_space
    return plain and tokenizer.normalizer is None


def _pieces(text: str, size: int = LONG // 4) -> Iterator[str]:
    """Yield pieces of a text, cut between two lines with words, where GPT-2's pre-tokenizer always cuts.

    Encoded one by one the pieces have the same tokens as the whole text.
    """
    start = 0
    border = re.compile(r"(?<=\S\n)(?=\S)")
    while len(text) - start > size and (found := border.search(text, start + size)):
        yield text[start : found.start()]
        start = found.start()
    yield text[start:]
