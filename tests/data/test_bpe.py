"""Training a tokenizer takes a bounded time per character, whatever the words are."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_runs import said

from attnzoo.data.bpe import WORD, train_bpe
from attnzoo.data.bpe import _with_bounded_words as bounded

pytest.importorskip("tokenizers")
WORDS = {
    "DNA": lambda rng, n: "".join(rng.choices("acgt", k=n)),
    "one letter": lambda rng, n: "x" * n,
    "digits": lambda rng, n: "0123456789" * (n // 10),
    "signs": lambda rng, n: "_-=" * (n // 3),
    "spaces": lambda rng, n: " " * n,
    "letters of two bytes": lambda rng, n: "é" * n,
}


@pytest.mark.parametrize("kind", WORDS)
def test_one_long_word_takes_time_in_proportion_to_its_length(kind, caplog):
    """A word of 100,000 characters took 12 s and more, twice that four times as long."""
    text = WORDS[kind](random.Random(0), 100_000)
    started = time.process_time()
    train_bpe(["a text", text], 300)
    assert time.process_time() - started < 5
    (line,) = said(caplog)
    assert f"words of {WORD} characters and more, such as {text[:24]!r}" in line


def test_texts_of_shorter_words_are_taken_whole(caplog):
    texts = ["".join(f"line {number} of a text,\n\n" for number in range(300)), "x" * (WORD - 1), ""]
    assert [*bounded(texts)] == texts
    assert not said(caplog)


@given(st.lists(st.sampled_from(["x" * 700, " " * 700, "-" * 700, "word ", "\n"])).map("".join))
def test_no_character_is_lost_where_a_word_is_cut(text):
    assert "".join(bounded([text])) == text
