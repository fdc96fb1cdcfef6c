"""Text becomes tokens and comes back; a folder of tokens has the same whatever was cut where."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from attnzoo.cli import app
from attnzoo.data.shards import read_shards

tokenizers = pytest.importorskip("tokenizers")

from attnzoo.data import documents  # noqa: E402
from attnzoo.data import tokenizer as module  # noqa: E402
from attnzoo.data.bpe import END, train_bpe  # noqa: E402
from attnzoo.data.tokenizer import (  # noqa: E402
    byte_tokenizer,
    read_tokenizer,
    special_tokens,
    tokenize,
    tokenizer_files,
)

TEXT = "the quick brown fox jumps over the lazy dog\n" * 20 + "naïve 漢字 \t\r\n  x = 'it''s'\n"


BYTEWISE = byte_tokenizer()


@pytest.fixture(scope="module")
def bpe():
    return train_bpe([TEXT], 300)


@pytest.fixture
def folder(tmp_path):
    source = tmp_path / "texts"
    for number in range(12):
        path = source / ("deep" if number % 3 else ".") / f"file{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"line of file {number}\n" * 20)
    return source


def decoded(shards, tokenizer):
    """Each document as text, and whether all end as they should."""
    texts = []
    for shard in shards:
        for start, stop in zip(shard.starts[:-1], shard.starts[1:], strict=True):
            document = shard.tokens[start:stop].tolist()
            assert document[-1] == tokenizer.token_to_id(END)
            texts.append(tokenizer.decode(document[:-1], skip_special_tokens=False))
    return texts


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_comes_back(bpe, text):
    for tokenizer in (bpe, BYTEWISE):
        if "\0" not in text and END not in text:
            assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_training_is_deterministic_and_merges_what_is_frequent(bpe):
    assert train_bpe([TEXT], 300).to_str() == bpe.to_str()
    assert bpe.get_vocab_size() == 300
    assert bpe.token_to_id(END) == 0
    assert len(bpe.encode(" the").ids) == 1
    assert len(bpe.encode("漢").ids) == 3


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["fox", " ", "\n", "\t", "'s", "9", "  dog", "\r\n", "é", "\x1c", "."]), max_size=60))
def test_pieces_have_the_tokens_of_the_whole(bpe, words):
    text = "".join(words)
    pieces = list(module._pieces(text, 8))
    assert "".join(pieces) == text
    assert [token for piece in pieces for token in bpe.encode(piece).ids] == bpe.encode(text).ids


def test_folder_of_texts_becomes_documents_of_two_splits(folder, tmp_path):
    done = tokenize([folder], tmp_path / "tokens", vocab_size=280, heldout_fraction=0.25)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokens" / "tokenizer.json"))
    train, held = (decoded(split, tokenizer) for split in (done.shards.train, done.shards.held_out))
    assert sorted(train + held) == sorted(file.read_text() for file in folder.rglob("*.txt"))
    assert 1 <= len(held) < 12
    assert (done.files, done.bytes) == (12, sum(file.stat().st_size for file in folder.rglob("*.txt")))
    assert done.shards.vocab_size == tokenizer.get_vocab_size()


def test_tokenizer_has_not_seen_what_is_held_out(folder, tmp_path):
    before = tokenize([folder], tmp_path / "a", vocab_size=280).shards
    tokenizer = tokenizers.Tokenizer.from_file(str(before.tokenizer))
    held = decoded(before.held_out, tokenizer)[0]
    (file,) = [file for file in folder.rglob("*.txt") if file.read_text() == held]
    file.write_text("something else that is often repeated " * 50)
    after = tokenize([folder], tmp_path / "b", vocab_size=280).shards
    assert before.tokenizer.read_text() == after.tokenizer.read_text()
    assert before.fingerprint != after.fingerprint


def test_of_a_single_file_the_end_is_held_out(tmp_path):
    (tmp_path / "one.txt").write_text(TEXT)
    shards = tokenize([tmp_path / "one.txt"], tmp_path / "tokens", vocab_size=280, heldout_fraction=0.2).shards
    tokenizer = tokenizers.Tokenizer.from_file(str(shards.tokenizer))
    (train,), (held,) = decoded(shards.train, tokenizer), decoded(shards.held_out, tokenizer)
    assert train + held == TEXT
    assert train.endswith("\n")
    assert 0.2 <= len(held) / len(TEXT) < 0.3
    (tmp_path / "line.txt").write_text("Title\n" + TEXT.replace("\n", " "))
    shards = tokenize([tmp_path / "line.txt"], tmp_path / "line", vocab_size=280, heldout_fraction=0.2).shards
    held = decoded(shards.held_out, tokenizers.Tokenizer.from_file(str(shards.tokenizer)))[0]
    assert 0.19 < len(held) / len(TEXT) < 0.21  # no line starts near


def test_long_texts_and_many_short_ones_are_cut_alike(folder, tmp_path, monkeypatch):
    whole = tokenize([folder], tmp_path / "a", vocab_size=280).shards
    monkeypatch.setattr(module, "LONG", 64)
    monkeypatch.setattr(module._pieces, "__defaults__", (16,))
    assert tokenize([folder], tmp_path / "b", vocab_size=280).shards.fingerprint == whole.fingerprint


def test_a_word_that_looks_like_the_end_of_a_document_is_text(tmp_path):
    (tmp_path / "one.txt").write_text(f"a line with {END} in it\n" * 40)
    shards = tokenize([tmp_path / "one.txt"], tmp_path / "tokens", vocab_size=280).shards
    assert [int((np.asarray(shard.tokens) == 0).sum()) for shard in (*shards.train, *shards.held_out)] == [1, 1]


@pytest.mark.parametrize("given", ["folder", "file"])
def test_a_given_tokenizer_is_taken_and_carried(given, bpe, folder, tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for name, content in tokenizer_files(bpe).items():
        (theirs / name).write_bytes(content)
    path, end = (theirs, None) if given == "folder" else (theirs / "tokenizer.json", END)
    shards = tokenize([folder], tmp_path / "tokens", tokenizer=path, end=end).shards
    assert shards.vocab_size == 300
    assert shards.tokenizer.read_bytes() == (theirs / "tokenizer.json").read_bytes()
    assert json.loads((shards.folder / "tokenizer_config.json").read_text())["eos_token"] == END
    assert len(decoded([*shards.train, *shards.held_out], bpe)) == 12


@pytest.mark.parametrize("settings", [{}, {"eos_token": "</s>"}])
def test_the_token_that_ends_documents_ends_texts_too(settings, bpe, folder, tmp_path):
    theirs, other = tmp_path / "theirs", type(bpe).from_str(bpe.to_str())
    other.add_special_tokens(["</s>"])
    theirs.mkdir()
    (theirs / "tokenizer.json").write_text(other.to_str())
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (theirs / name).write_text(json.dumps({**settings, "unk_token": "?"}))
    tokenize([folder], tmp_path / "tokens", tokenizer=theirs, end=END)
    carried = read_tokenizer(tmp_path / "tokens")
    assert special_tokens(carried)["eos_token_id"] == bpe.token_to_id(END)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        assert json.loads(carried[name]) == {"eos_token": END, "unk_token": "?"}


@pytest.mark.parametrize("limits", ["cuts", "pads"])
def test_a_given_tokenizer_neither_cuts_texts_nor_pads_them(limits, bpe, folder, tmp_path):
    set_to = type(bpe).from_str(bpe.to_str())  # transformers saves what it last cut and padded to
    set_to.enable_truncation(8) if limits == "cuts" else set_to.enable_padding(length=1024)
    (tmp_path / "tokenizer.json").write_text(set_to.to_str())
    shards = tokenize([folder], tmp_path / "tokens", tokenizer=tmp_path / "tokenizer.json", end=END).shards
    texts = sorted(file.read_text() for file in folder.rglob("*.txt"))
    assert sorted(decoded([*shards.train, *shards.held_out], bpe)) == texts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "vocab_size, tokenizer: expected one of the two, got neither"),
        ({"vocab_size": 255}, "vocab_size: expected at least 256"),
        ({"vocab_size": 280, "end": "</s>"}, "end: expected a token .* got '</s>'"),
        ({"vocab_size": 280, "pattern": "*.md"}, r"matches '\*\.md'"),
        ({"vocab_size": 280, "heldout_fraction": 1.0}, "heldout_fraction: .* got 1.0"),
    ],
)
def test_what_cannot_be_done_is_named_and_leaves_nothing(options, message, folder, tmp_path):
    with pytest.raises(ValueError, match=message):
        tokenize([folder], tmp_path / "tokens", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


def test_texts_that_are_none_are_named(folder, tmp_path):
    (folder / "picture.png").write_bytes(b"ab\xff\xfe")
    with pytest.raises(ValueError, match=r"picture\.png' is not UTF-8 at byte 2"):
        tokenize([folder], tmp_path / "tokens", vocab_size=280, heldout_fraction=0.01)
    tokenize([folder], tmp_path / "tokens", vocab_size=280, pattern="*.txt")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        tokenize([folder / "nowhere"], tmp_path / "more", vocab_size=280)
    with pytest.raises(ValueError, match=r"pattern: expected '\*' where no path is a folder, .* got '\*\.txt'"):
        tokenize([folder / "file0.txt"], tmp_path / "more", vocab_size=280, pattern="*.txt")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match=r"empty\.txt': the file is empty"):
        tokenize([tmp_path / "empty.txt"], tmp_path / "more", vocab_size=280)


def test_the_standard_library_is_a_text_too(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(documents, "stdlib_files", lambda: {file.name: file for file in folder.rglob("*.txt")})
    assert tokenize([Path("stdlib")], tmp_path / "tokens", vocab_size=280).files == 12


def test_two_files_of_one_name_are_refused_and_two_folders_are_not(folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "file1.txt").write_text("another\n" * 9)
    done = tokenize([folder, other], tmp_path / "tokens", vocab_size=280)
    assert done.files == 13
    with pytest.raises(ValueError, match=r"would both be called 'file1\.txt'"):
        tokenize([other / "file1.txt", folder / "deep" / "file1.txt"], tmp_path / "more", vocab_size=280)


def test_a_file_under_two_names_is_refused(folder, tmp_path):
    """It could be held out under the one and trained on under the other."""
    inner = folder / "inner"
    inner.mkdir()
    (inner / "more.txt").write_text("more of it")
    (tmp_path / "link.txt").symlink_to(inner / "more.txt")
    for paths in ((folder, inner), (folder, tmp_path / "link.txt")):
        with pytest.raises(ValueError, match=r"'.*more\.txt' and '.*\.txt' are one file: held out under one, it"):
            tokenize(paths, tmp_path / "out", vocab_size=256)
        assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_is_none_is_refused(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer: expected a tokenizer\.json or a folder with one"):
        tokenize([folder], tmp_path / "tokens", tokenizer=folder)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        tokenize([folder], tmp_path / "tokens", tokenizer=tmp_path / "tokenizer.json", end=END)


def test_command_says_what_it_wrote(folder, tmp_path):
    command = ["tokenize", str(folder), "--to", str(tmp_path / "tokens"), "--vocab-size", "5000"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    shards = read_shards(tmp_path / "tokens")
    assert f"the texts give no more than {shards.vocab_size:,} tokens" in done.output
    assert "12 files of 3,640 bytes" in done.output
    assert json.loads((tmp_path / "tokens" / "tokenizer_config.json").read_text())["eos_token"] == END
