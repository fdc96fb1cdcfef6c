"""Byte-level BPE tokenizers, trained on local text; needs tokenizers (`pip install 'attnzoo[hf]'`)."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from typing import Any

from attnzoo.data.sources import BYTES

logger = logging.getLogger(__name__)

END = "<|end|>"  # ends each document; token 0
WORD = 1024  # characters; the words of nearly all texts are shorter
LONG_WORD = re.compile(rf"\w{{{WORD}}}|(?:[^\w\s]|_){{{WORD}}}|\s{{{WORD}}}")  # at most what GPT-2 takes for one word


def train_bpe(texts: Iterable[str], vocab_size: int) -> Any:
    """A byte-level BPE tokenizer (Sennrich et al., 2016; on bytes as in GPT-2, Radford et al., 2019), of tokenizers.

    Args:
        texts: taken one after the other; longer words than `WORD` are cut, as training takes the square of that.
        vocab_size: tokens: the end of a document, all bytes, and pairs of tokens, the frequent ones first.

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
    """The texts, cut within words that are too long; a line of the log says so before the training begins."""
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
