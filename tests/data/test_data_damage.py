"""Data that changed, cannot be read or are no tokens: noticed, and named."""

import json
import os

import numpy as np
import pytest

from attnzoo import files
from attnzoo.config import DataConfig
from attnzoo.data import build_data
from attnzoo.data.texts import files_in

LONG = 1_200_000


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "attnzoo" / "digests.json"


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(LONG, dtype=np.uint16) % 1000)
    return path


def data_of(path, **options):
    return build_data(DataConfig(source=str(path), context_length=8, vocab_size=1000, **options))


def change(path, at, value=7):
    """One token of a .npy file."""
    tokens, status = np.load(path, mmap_mode="r+"), path.stat()
    tokens[at] = value
    tokens.flush()
    # a write through a memory map may leave the time as it is, and so does one within a tick of the system's clock
    os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns + 10**9))


@pytest.mark.parametrize("at", [5, LONG // 2, LONG - 30_000])
def test_one_changed_token_of_a_large_file_changes_the_fingerprint(shard, at):
    before = data_of(shard).fingerprint
    assert data_of(shard).fingerprint == before
    change(shard, at)
    assert data_of(shard).fingerprint != before


def test_files_that_are_gone_are_not_remembered(shard, tmp_path, cache):
    data_of(shard)
    other = shard.replace(tmp_path / "other.npy")
    data_of(other)
    assert list(json.loads(cache.read_bytes())) == [str(other.resolve())]


def test_one_changed_byte_of_a_large_text_changes_the_fingerprint(tmp_path):
    text = b"abcdefg\n" * (LONG // 7)
    path = tmp_path / "text.txt"
    path.write_bytes(text)
    config = DataConfig(source=str(path), context_length=8)
    before = build_data(config)
    path.write_bytes(text[: LONG // 2] + b"#" + text[LONG // 2 + 1 :])
    after = build_data(config)
    assert before.fingerprint != after.fingerprint


def test_a_fingerprint_stays_what_runs_are_known_by(tmp_path):
    (tmp_path / "text.txt").write_text("some text " * 100)
    data = build_data(DataConfig(source=str(tmp_path / "text.txt"), context_length=8))
    assert data.fingerprint == "8590e0e75e8208d3a5cdfbfa7f0e78a4"


def test_a_large_file_is_read_once_while_it_stays_as_it_is(shard, cache, monkeypatch):
    read = []
    plain = files.digest
    monkeypatch.setattr(files, "digest", lambda path: read.append(path) or plain(path))
    first = data_of(shard).fingerprint
    assert data_of(shard).fingerprint == first
    assert read == [shard]
    cache.write_text("[no digests]")
    assert data_of(shard).fingerprint == first
    assert len(read) == 2
    ((path, (digest, seal)),) = json.loads(cache.read_text()).items()
    cache.write_text(json.dumps({path: [digest[:9] + ("0" if digest[9] != "0" else "1") + digest[10:], seal]}))
    assert data_of(shard).fingerprint == first
    assert len(read) == 3
    cache.unlink()
    cache.mkdir()
    assert data_of(shard).fingerprint == first  # without a place to remember it, too
    assert data_of(shard).fingerprint == first
    assert len(read) == 5


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    for name in ("open", "closed", ".hidden"):
        (tmp_path / "text" / name).mkdir(parents=True)
        (tmp_path / "text" / name / "file.txt").write_text("some text " * 50)
        (tmp_path / "text" / name / "file2.txt").write_text("some text " * 50)
    refused = []
    scandir = os.scandir

    def locked(path="."):
        if str(path).endswith(tuple(refused) or "\0"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", locked)
    config = DataConfig(source=str(tmp_path / "text"), context_length=8)
    whole = build_data(config)
    refused.append(".hidden")  # nothing in it is read anyway
    assert build_data(config).fingerprint == whole.fingerprint
    refused.append("closed")
    with pytest.raises(PermissionError, match=r"this folder of the data cannot be read.*closed"):
        build_data(config)


def test_a_folder_of_texts_is_walked_once(tmp_path, monkeypatch, caplog):
    """Hidden folders and those of attnzoo too, for the links in them that are not followed."""
    for name in ("deep/er", ".hidden", "run/checkpoints"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file.txt").write_text("some text")
        (tmp_path / name / "link").symlink_to(tmp_path)
    (tmp_path / "run" / "config.yaml").write_text("")
    scandir, read = os.scandir, []
    monkeypatch.setattr(os, "scandir", lambda path=".": read.append(str(path)) or scandir(path))
    found = files_in(tmp_path)
    assert sorted(read) == sorted(map(str, (tmp_path, *(path for path in tmp_path.rglob("[!l]*") if path.is_dir()))))
    assert sorted(found) == [tmp_path / ".hidden" / "file.txt", tmp_path / "deep" / "er" / "file.txt"]
    written, links = caplog.messages
    assert written.endswith("'run' (a run)")
    assert links.endswith("'.hidden/link', 'deep/er/link', 'run/checkpoints/link'")


@pytest.mark.parametrize("bad", [1000, 65535, -1])
def test_heldout_tokens_outside_the_vocabulary_are_refused(tmp_path, bad):
    tokens = np.arange(2000, dtype=np.int32) % 1000
    tokens[-3] = bad
    np.save(tmp_path / "tokens.npy", tokens)
    with pytest.raises(ValueError, match=rf"held-out split of '.*tokens.npy': tokens from .*{bad}.*vocabulary of 1000"):
        data_of(tmp_path / "tokens.npy")
    np.save(tmp_path / "held.npy", tokens)
    np.save(tmp_path / "train.npy", np.zeros(500, dtype=np.int32))
    with pytest.raises(ValueError, match=r"held-out split of '.*held.npy'"):
        data_of(tmp_path / "train.npy", heldout_source=str(tmp_path / "held.npy"))


def test_an_archive_under_the_name_of_an_array_is_refused(tmp_path):
    path = tmp_path / "tokens.npy"
    np.savez(tmp_path / "tokens.npz", np.arange(500))
    (tmp_path / "tokens.npz").rename(path)
    with pytest.raises(ValueError, match=r"tokens.npy' is not a .npy file of integers"):
        data_of(path)


@pytest.mark.parametrize("change", ["shorter", "longer"])
def test_an_array_of_another_length_than_its_header_says_is_refused(tmp_path, change):
    path = tmp_path / "tokens.npy"
    np.save(path, np.zeros(1000, dtype=np.uint16))
    content = path.read_bytes()
    path.write_bytes(content.replace(b"(1000,)", b"(500,) ") if change == "shorter" else content + b"\0\0")
    with pytest.raises(ValueError, match=r"tokens.npy' has \d+ bytes where its header says \d+"):
        data_of(path)


def test_a_folder_under_the_name_of_an_array_is_refused(tmp_path):
    (tmp_path / "tokens.npy").mkdir()
    with pytest.raises(ValueError, match=r"no data in .*tokens.npy'"):
        data_of(tmp_path / "tokens.npy")


@pytest.mark.parametrize("pattern", ["", ".", "/data/*.txt", "../*.txt", "a/../b"])
def test_a_pattern_that_is_no_relative_path_is_refused(pattern):
    with pytest.raises(ValueError, match="pattern: expected a relative path without"):
        DataConfig(pattern=pattern)


@pytest.mark.parametrize("source", ["stdlib", "text.txt", "tokens.npy"])
def test_a_pattern_of_something_that_is_no_folder_is_refused(tmp_path, shard, source):
    (tmp_path / "text.txt").write_text("some text " * 100)
    given = source if source == "stdlib" else str(tmp_path / source)
    with pytest.raises(ValueError, match=r"data.pattern='\*.md' .* is no such folder"):
        build_data(DataConfig(source=given, context_length=8, vocab_size=1000, pattern="*.md"))


def test_texts_beside_a_file_of_tokens_are_read_by_their_pattern(tmp_path, shard):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("some text " * 100)
    with pytest.raises(ValueError, match=r"vocab_size is needed .*other files are read with a data.pattern of theirs"):
        build_data(DataConfig(source=str(tmp_path), context_length=8))
    assert build_data(DataConfig(source=str(tmp_path), context_length=8, pattern="*.txt")).vocab_size == 256
    with pytest.raises(ValueError, match=r"data.pattern='\*.npy' .* is no such folder"):
        build_data(DataConfig(source=str(tmp_path), context_length=8, pattern="*.npy", vocab_size=1000))


@pytest.mark.parametrize(("given", "said"), [
    ({"dtype": "int32"}, r"data.dtype='int32' is of .bin files, and .*text.txt' has none"),
    ({"heldout_source": "held.txt", "heldout_fraction": 0.1}, r"data.heldout_fraction=0.1: all of .*held.txt' is held"),
])  # fmt: skip
def test_settings_that_no_source_reads_are_refused(tmp_path, given, said):
    for name in ("text.txt", "held.txt"):
        (tmp_path / name).write_text(f"some text of {name} " * 100)
    if "heldout_source" in given:
        given = {**given, "heldout_source": str(tmp_path / given["heldout_source"])}
    with pytest.raises(ValueError, match=said):
        build_data(DataConfig(source=str(tmp_path / "text.txt"), context_length=8, **given))


def test_an_empty_source_is_refused():
    with pytest.raises(ValueError, match="source: expected a file, a folder or 'stdlib'"):
        DataConfig(source="")
