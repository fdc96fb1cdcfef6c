"""Byte-level BPE tokenizers, trained on local text; needs tokenizers (`pip install 'attnzoo[hf]'`)."""

from __future__ import annotations

import base64
import logging
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from attnzoo.data.sources import BYTES

logger = logging.getLogger(__name__)

END = "<|end|>"  # the token that ends each document, number 0
WORD = 1024  # most characters of a word in training
LONG_WORD = re.compile(rf"\w{{{WORD}}}|(?:[^\w\s]|_){{{WORD}}}|\s{{{WORD}}}")  # part of one word of GPT-2


def train_bpe(texts: Iterable[str], vocab_size: int) -> Any:
    """A byte-level BPE tokenizer (Sennrich et al., 2016; on bytes as in GPT-2, Radford et al., 2019), of tokenizers.

    Args:
        texts: the training texts; words longer than `WORD` are cut, as time grows with the square of a word's length.
        vocab_size: number of tokens: the end of a document, all bytes, and merged pairs, the frequent ones first.

    Raises:
        ValueError: a vocabulary without room for all bytes.
        ModuleNotFoundError: tokenizers is not installed.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size <= BYTES:
        raise ValueError(f"vocab_size: expected more than {BYTES}, for all bytes and {END}, got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_with_bounded_words(texts), trainer)
    return tokenizer


def _with_bounded_words(texts: Iterable[str]) -> Iterator[str]:
    """The texts with words that are too long cut in pieces, which is logged before training."""
    cuts, first = 0, ""
    for text in texts:
        start = 0
        for word in LONG_WORD.finditer(text):
            cuts, first = cuts + 1, first or word[0]
            yield text[start : word.end()]
            start = word.end()
        yield text[start:]
    if cuts:
        text = "words of %d characters and more, such as %r...: the tokenizer is trained on %d parts of them"
        logger.warning(text, WORD, first[:24], cuts)


GPT2_END = "<|endoftext|>"  # of GPT-2's files, the last token
GPT2_SIZE = 50_257
GPT2_FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))  # names in transformers, and the authors'


def gpt2_files(path: Path) -> tuple[Path, Path] | None:
    """The files of a vocabulary and its merges in a folder, as GPT-2 is published; None where there are none."""
    pairs = [(path / vocabulary, path / merges) for vocabulary, merges in GPT2_FILES]
    return next((pair for pair in pairs if pair[0].is_file() and pair[1].is_file()), None)


def gpt2_tokenizer(path: Path) -> Any:
    """GPT-2's tokenizer, of tokenizers, from a folder with its two files, or from a file of tiktoken (`r50k_base`).

    Raises:
        ValueError: a file that cannot be read, or holds more tokens than GPT-2 has, and so another way to cut words.
        ModuleNotFoundError: tokenizers is not installed.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    try:
        if path.is_file():
            model = models.BPE(*_of_ranks(_ranks(path)))
        else:
            vocabulary, merges = (str(file) for file in gpt2_files(path) or ())
            model = models.BPE.from_file(vocabulary, merges)
    except Exception as error:  # tokenizers has no error class
        raise ValueError(f"tokenizer: {str(path)!r} cannot be read: {error}") from error
    tokenizer = Tokenizer(model)
    if (count := tokenizer.get_vocab_size()) > GPT2_SIZE:
        raise ValueError(
            f"tokenizer: expected GPT-2's {GPT2_SIZE} tokens or fewer, got {count} in {str(path)!r}, "
            "whose words are cut otherwise; its tokenizer.json says how"
        )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(GPT2_END, special=True, normalized=False)])
    return tokenizer


def _ranks(path: Path) -> dict[bytes, int]:
    """Tokens and their numbers, of a file of tiktoken: a line for each, with the token in base 64."""
    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def _of_ranks(ranks: dict[bytes, int]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The vocabulary and the merges of tiktoken's tokens, of which each joins the two that its bytes come to before."""

    def shown(token: bytes) -> str:
        return "".join(map(shown_byte, token))

    merges = []
    for token, rank in sorted(ranks.items(), key=lambda pair: pair[1]):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            joined = [ranks.get(a + b, rank) for a, b in pairwise(parts)]
            at = min(range(len(joined)), key=joined.__getitem__)
            if joined[at] >= rank:
                raise ValueError(f"token {rank} is no two tokens of smaller numbers")
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append((shown(parts[0]), shown(parts[1])))
    return {shown(token): rank for token, rank in ranks.items()}, merges


def shown_byte(byte: int) -> str:
    """The character for a byte in GPT-2's byte-level pre-tokenizer."""
    return _SHOWN[byte]


_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(BYTES) if byte not in _PRINTED]
_SHOWN = [chr(byte if byte in _PRINTED else 256 + _OTHERS.index(byte)) for byte in range(BYTES)]
