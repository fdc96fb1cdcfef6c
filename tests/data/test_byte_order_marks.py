"""A byte order mark before a text is no part of it, wherever it is read."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_runs import config_of

from attnzoo.data import build_data
from attnzoo.data.config import DataConfig
from attnzoo.data.corpus import tokenize_corpus
from attnzoo.data.shards import read_shards
from attnzoo.data.tokenizer import tokenize
from attnzoo.trained.model import held_out_text, load_trained
from attnzoo.training import train

MARK = b"\xef\xbb\xbf"
TEXT = b"a line of text\n" * 40


@pytest.fixture
def folders(tmp_path):
    """The same three texts with and without the mark."""
    for name, mark in (("with", MARK), ("without", b"")):
        (tmp_path / name).mkdir()
        for number in range(3):
            (tmp_path / name / f"{number}.txt").write_bytes(mark + f"{number}: ".encode() + TEXT)
    return tmp_path / "with", tmp_path / "without"


def test_texts_read_byte_by_byte(folders):
    first, second = (build_data(DataConfig(source=str(folder), context_length=16)) for folder in folders)
    assert first.fingerprint == second.fingerprint


@pytest.mark.parametrize("make", [tokenize, tokenize_corpus])
def test_texts_written_as_tokens(make, folders, tmp_path):
    for folder in folders:
        make([folder], tmp_path / f"{folder.name}-tokens", vocab_size=300)
    found = [read_shards(tmp_path / f"{folder.name}-tokens") for folder in folders]
    assert found[0].fingerprint == found[1].fingerprint


def test_a_text_to_be_evaluated_on(folders, tmp_path):
    (tmp_path / "text.txt").write_bytes(TEXT)
    subject = load_trained(train(config_of(tmp_path)))
    assert np.array_equal(*(held_out_text(subject, folder) for folder in folders))
