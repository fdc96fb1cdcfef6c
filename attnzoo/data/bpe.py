"""Byte-level BPE tokenizers, trained on local text; needs tokenizers (`pip install 'attnzoo[hf]'`)."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
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
