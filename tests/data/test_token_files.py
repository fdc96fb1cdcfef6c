"""Files of tokens in the layouts of others are read as what they are, or refused with what to set."""

from __future__ import annotations

import re

import numpy as np
import pytest

from attnzoo.data import build_data
from attnzoo.data.config import DataConfig

TOKENS = np.random.default_rng(0).integers(0, 50257, 5000)


def put(folder, content, name="a.bin"):
    (folder / name).write_bytes(content)
    return str(folder / name)


def header(magic=20240520, version=1, count=5000):
    found = np.zeros(256, "<i4")
    found[:3] = magic, version, count
    return found.tobytes()


def tokens_of(source, vocab_size=50257, **settings):
    data = build_data(DataConfig(source=source, context_length=16, vocab_size=vocab_size, **settings))
    return np.concatenate([np.asarray(data.train.shards[0]), np.asarray(data.heldout)])


@pytest.mark.parametrize(("magic", "version", "dtype"), [(20240520, 1, "uint16"), (20240801, 7, "uint32")])
def test_a_header_is_no_tokens(magic, version, dtype, tmp_path):
    source = put(tmp_path, header(magic, version) + TOKENS.astype(dtype).tobytes())
    np.testing.assert_array_equal(tokens_of(source, dtype=dtype), TOKENS)
    other = {"uint16": "uint32", "uint32": "uint16"}[dtype]
    with pytest.raises(ValueError, match=rf"a\.bin' begins with the header .* of {dtype} .*data.dtype={dtype}, not"):
        tokens_of(source, dtype=other)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (header(version=2) + TOKENS.astype("<u2").tobytes(), "expected version 1, got 2"),
        (header() + TOKENS.astype("<u2").tobytes()[:-2], "expected the 11024 bytes of its 5000 tokens, got 11022"),
        (header(20240801, 7) + TOKENS.astype("<u4").tobytes(), "take data.dtype=uint32, not uint16"),
    ],
)
def test_a_header_that_says_something_else_is_refused(content, said, tmp_path):
    with pytest.raises(ValueError, match=rf"a\.bin' begins with the header of an llm\.c file.*{re.escape(said)}"):
        tokens_of(put(tmp_path, content))


@pytest.mark.parametrize(
    ("wrote", "read", "said", "vocab_size"),
    [
        ("uint32", "uint16", "uint32", 50257),
        ("int32", "uint16", "uint32", 50257),
        ("int64", "uint16", "int64", 50257),
        ("int64", "uint32", "int64", 50257),
        ("int64", "int32", "int64", 50257),
        ("uint32", "uint16", "uint32", 128256),
        ("uint16", "uint8", "uint16", 256),
        ("uint32", "uint8", "uint32", 256),
        ("uint32", "uint8", "uint32", 50257),
    ],
)
def test_tokens_read_as_several_are_refused(wrote, read, said, vocab_size, tmp_path):
    tokens = np.random.default_rng(1).integers(0, vocab_size, 5000)
    source = put(tmp_path, tokens.astype(wrote).tobytes())
    with pytest.raises(ValueError, match=rf"a\.bin'.*every other token 0: take data.dtype={said}$"):
        tokens_of(source, vocab_size, dtype=read)
    np.testing.assert_array_equal(tokens_of(source, vocab_size, dtype=said), tokens)


@pytest.mark.parametrize(("wrote", "read", "vocab_size"), [("uint16", "uint8", 65_536), ("uint16", "uint16", 128_256)])
def test_a_dtype_that_cannot_hold_the_vocabulary_is_refused(wrote, read, vocab_size, tmp_path):
    """Halves of tokens look like tokens of 8 bits, and tokens that were cut to 16 bits like others."""
    tokens = np.random.default_rng(3).integers(0, vocab_size, 5000)
    most = np.iinfo(read).max
    with pytest.raises(ValueError, match=rf"a\.bin': data.dtype='{read}' holds tokens up to {most}, and data.vocab"):
        tokens_of(put(tmp_path, tokens.astype(wrote).tobytes()), vocab_size, dtype=read)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(2, "uint8"), (2, "uint16"), (100, "uint16"), (60_000, "uint32")])
def test_tokens_of_the_dtype_are_read(vocab_size, dtype, tmp_path):
    tokens = np.random.default_rng(2).integers(0, vocab_size, 5000)
    np.testing.assert_array_equal(
        tokens_of(put(tmp_path, tokens.astype(dtype).tobytes()), vocab_size, dtype=dtype), tokens
    )
