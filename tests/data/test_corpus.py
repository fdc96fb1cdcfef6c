"""What packages hold becomes documents: each text once, under its own name, and nothing is left out without a word."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_processes import environment

from attnzoo.cli import app
from attnzoo.data import build_data
from attnzoo.data.config import DataConfig
from attnzoo.data.corpus import collect, tokenize_corpus
from attnzoo.data.lengths import MARKS, document_lengths
from attnzoo.data.shards import read_shards, write_shards
from attnzoo.data.texts import text_files
from attnzoo.data.tokenizer import BYTES, tokenize


def text(name):
    return f"the text of {name}\n".encode()


def tar(members, mode="w:xz"):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
        link = tarfile.TarInfo("link.c")
        link.type, link.linkname = tarfile.SYMTYPE, "nowhere"
        archive.addfile(link)
    return buffer.getvalue()


def packed(members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.mkdir("folder")
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def misplaced(archive):
    """A zip that says of its entries that they are before its first byte."""
    start = int.from_bytes(archive[-6:-2], "little") + 1000
    return archive[:-6] + start.to_bytes(4, "little") + archive[-2:]


@pytest.fixture
def package(tmp_path):
    """A folder with a text in every kind of place, named after it."""
    files = {
        "plain.c": text("plain"),
        "deep/er/plain.c": text("deep"),
        "one.c.gz": gzip.compress(text("gz")),
        "two.c.xz": lzma.compress(text("xz")),
        "three.c.bz2": bz2.compress(text("bz2")),
        "a.tar.xz": tar({"in/tar.c": text("tar"), "in/b.c.gz": gzip.compress(text("gz in tar"))}),
        "b.tgz": tar({"c.c": text("tgz"), "/etc/../../up.c": text("up")}, "w:gz"),
        "c.whl": packed({"d.c": text("wheel"), "../../e.c": text("out")}),
        "D.TAR.GZ": tar({"f.c": text("letters of any size")}, "w:gz"),
        "g.c.GZ": gzip.compress(text("a large gz")),
        "again.c": text("plain"),
        "empty.c": b"",
        "picture.c": b"\x89PNG\0",
        "old.c": "naïve".encode("latin-1"),
        ".git/config.c": text("hidden"),
        "other.h": text("header"),
    }
    for name, content in files.items():
        path = tmp_path / "package" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "package"


def test_every_text_is_a_document_and_what_is_left_out_is_named(package, tmp_path):
    into = tmp_path / "texts"
    into.mkdir()
    found = collect([package], into, patterns=["*.c"])
    written = {path.relative_to(into).as_posix(): path.read_bytes() for path in into.rglob("*") if path.is_file()}
    assert written == {
        "again.c": text("plain"),
        "deep/er/plain.c": text("deep"),
        "one.c": text("gz"),
        "two.c": text("xz"),
        "three.c": text("bz2"),
        "a.tar.xz/in/tar.c": text("tar"),
        "a.tar.xz/in/b.c": text("gz in tar"),
        "b.tgz/c.c": text("tgz"),
        "b.tgz/etc/up.c": text("up"),
        "c.whl/d.c": text("wheel"),
        "c.whl/e.c": text("out"),
        "D.TAR.GZ/f.c": text("letters of any size"),
        "g.c": text("a large gz"),
    }
    assert found.documents == len(written)
    assert found.left_out == {
        "the same as another": ["plain.c"],
        "empty": ["empty.c"],
        "with a zero byte": ["picture.c"],
        "not UTF-8": ["old.c"],
        "hidden": [".git/config.c"],
    }


@pytest.mark.parametrize("pattern", ["", "../*.c"])
def test_a_pattern_that_no_path_can_have_is_refused(package, tmp_path, pattern):
    with pytest.raises(ValueError, match="pattern: expected a relative path without '..', such as"):
        collect([package], tmp_path / "texts", patterns=["*.c", pattern])


def test_several_paths_patterns_and_a_least_length(package, tmp_path):
    into = tmp_path / "texts"
    into.mkdir()
    found = collect([package / "deep", package / "c.whl"], into, patterns=["er/*.c", "e.c"], min_bytes=17)
    assert [path.relative_to(into).as_posix() for path in into.rglob("*.c")] == ["deep/er/plain.c"]
    assert found.left_out == {"shorter than 17 bytes": ["c.whl/e.c"]}


def test_the_texts_under_a_name_of_json(tmp_path):
    described = {
        "documentation": "<p>The <b>first</b> &amp; best.</p><ul><li>one</li><li>two </li></ul>",
        "name": "not this",
        "shapes": [
            {"documentation": "second"},
            {"documentation": {"documentation": "third"}},
            {"documentation": 4},
            {"documentation": ["fourth", 5, {"documentation": "fifth"}, ["not this"]]},
        ],
    }
    into = tmp_path / "texts"
    into.mkdir()
    (tmp_path / "service.json").write_text(json.dumps(described))
    collect([tmp_path / "service.json"], into, json_field="documentation")
    assert (into / "service.json").read_text() == "The first & best.\none\ntwo\nsecond\nthird\nfourth\nfifth"


@pytest.mark.parametrize(
    ("name", "content", "reason", "named"),
    [
        ("x.tar.gz", b"no archive", "cannot be read", "x.tar.gz (truncated header)"),
        ("x.tar.xz", tar({"a": text("a")})[:-60], "cannot be read", "x.tar.xz (Compressed file ended"),
        ("x.tar.zst", b"\x28\xb5\x2f\xfd more", "cannot be read", "x.tar.zst (it is packed by zstandard: unpack it"),
        ("x.zip", packed({"a.c": text("a")})[:-9], "cannot be read", "x.zip (File is not a zip file)"),
        ("x.zip", misplaced(packed({"a.c": text("a")})), "cannot be read", "x.zip"),
        ("x.c.gz", gzip.compress(text("a"))[:-9], "cannot be read", "x.c.gz (Compressed file ended"),
        ("x.c.gz", gzip.compress(text("a"))[:12] + b"\xff" * 9, "cannot be read", "x.c.gz (Compressed file ended"),
        ("x.c.bz2", bz2.compress(text("a") * 999)[:-9], "cannot be read", "x.c.bz2 (Compressed file ended"),
        ("x.json", b"{", "not readable as JSON", "x.json (Expecting property name"),
        ("x.json", b"[" + b"9" * 5000 + b"]", "not readable as JSON", "x.json (Exceeds the limit"),
        ("x.json", b"[" * 200_000, "not readable as JSON", "x.json (maximum recursion depth"),
        ("x.json", b'{"documentation": "half a letter: \\ud83d"}', "not UTF-8", "x.json"),
        ("x.json", b'{"documentation": "an end: \\u0000"}', "with a zero byte", "x.json"),
        ("x.c", b"", "empty", "x.c"),
    ],
    ids=[
        "no tar", "a cut tar", "another packing", "a cut zip", "a misplaced zip", "a cut gzip", "a wrong gzip",
        "a cut bzip2", "no JSON", "a number that Python refuses", "JSON in JSON",
        "half of a surrogate pair", "a zero byte of JSON", "nothing",
    ],  # an archive holds the time: its bytes are no names of tests
)  # fmt: skip
def test_what_cannot_be_read_is_named_and_the_rest_is_taken(tmp_path, name, content, reason, named):
    (tmp_path / "texts").mkdir()
    (tmp_path / name).write_bytes(content)
    (tmp_path / "good.json").write_text(json.dumps({"documentation": "good"}))
    field = "documentation" if name.endswith("json") else None
    with pytest.raises(ValueError, match=re.escape(f"no documents in '{tmp_path / name}': 1 {reason} ({named}")):
        collect([tmp_path / name], tmp_path / "texts", json_field=field)
    found = collect([tmp_path / name, tmp_path / "good.json"], tmp_path / "texts", json_field=field)
    assert found.documents == 1
    assert [*found.left_out] == [reason]
    (told,) = found.left_out[reason]
    assert told.startswith(named)


@pytest.mark.parametrize("second", ["./a.c", "a.c/b"])
def test_of_two_documents_of_one_name_in_an_archive_the_first_is_taken(second, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "x.zip").write_bytes(packed({"a.c": text("a"), second: text("b"), "c.c": text("c")}))
    found = collect([tmp_path / "x.zip"], tmp_path / "texts")
    assert found.documents == 2
    assert found.left_out == {"called as another, or as a folder of others": [f"x.zip/{second.removeprefix('./')}"]}
    assert (tmp_path / "texts" / "x.zip" / "a.c").read_bytes() == text("a")


def test_paths_of_one_name_are_refused(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name / "src").mkdir(parents=True)
        (tmp_path / name / "src" / "x.c").write_bytes(text(name))
    with pytest.raises(ValueError, match=r"a/src' and '.*b/src': two documents would be called so"):
        collect([tmp_path / "a" / "src", tmp_path / "b" / "src"], tmp_path)


def test_the_command_writes_tokens_and_says_what_it_found(package, tmp_path):
    pytest.importorskip("tokenizers")
    to = tmp_path / "tokens"
    words = ["corpus", str(package), "--to", str(to), "--vocab-size", "256", "--pattern", "*.c", "--pattern", "*.h"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "left out, not UTF-8: 1 (old.c)" in done.output
    shards = read_shards(to)
    documents = [
        bytes(shard.tokens[start:stop].tolist())
        for shard in (*shards.train, *shards.held_out)
        for start, stop in zip(shard.starts[:-1], shard.starts[1:], strict=True)
    ]
    assert len(documents) == 14
    assert text("tgz") + b"\0" in documents
    assert sorted(path.name for path in tmp_path.iterdir()) == ["package", "tokens"]
    again = CliRunner().invoke(app, ["data", "lengths", str(to)])
    assert again.output
    assert done.output.endswith(again.output)
    assert isinstance(CliRunner().invoke(app, words).exception, FileExistsError)


@settings(max_examples=12, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 3, 50, *MARKS, MARKS[1] - 1]), min_size=1, max_size=12))
def test_lengths_are_those_of_the_documents(tmp_path_factory, lengths):
    folder = tmp_path_factory.mktemp("tokens")
    shards = write_shards(folder, BYTES, (np.zeros(length, np.int64) for length in lengths), shard_tokens=5000)
    found = document_lengths(shards.train)
    ordered = sorted(lengths)
    assert (found.documents, found.tokens, found.longest) == (len(lengths), sum(lengths), ordered[-1])
    assert found.median == ordered[(len(lengths) - 1) // 2]
    assert sum(length <= found.upper for length in lengths) >= 0.9 * len(lengths)
    assert found.upper in lengths
    assert found.in_longer == tuple(sum(x for x in lengths if x >= mark) / sum(lengths) for mark in MARKS)


@pytest.mark.parametrize("name", ["notes.tar.md", "unpack.tar.sh", "tar"])
def test_a_text_about_archives_is_none(name, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / name).write_bytes(text(name))
    (tmp_path / "into").mkdir()
    assert collect([tmp_path / "texts"], tmp_path / "into").documents == 1
    assert (tmp_path / "into" / name).read_bytes() == text(name)


def test_folders_are_called_as_they_are_wherever_one_stands(tmp_path, monkeypatch):
    for name in ("here/.deep", ".there", "into"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "here" / "a.txt").write_bytes(text("a"))
    (tmp_path / ".there" / "b.txt").write_bytes(text("b"))
    (tmp_path / ".there" / ".c.txt").write_bytes(text("c"))
    monkeypatch.chdir(tmp_path / "here" / ".deep")
    found = collect([Path(".."), Path("../../.there"), Path(".")], tmp_path / "into")
    assert sorted(p.relative_to(tmp_path / "into").as_posix() for p in (tmp_path / "into").rglob("*.txt")) == [
        "here/a.txt", "there/b.txt",
    ]  # fmt: skip
    assert found.left_out == {"hidden": ["there/.c.txt"]}


def test_names_that_are_not_utf8_are_escaped(tmp_path):
    (tmp_path / "texts").mkdir()
    for name in (b"a\xff.txt", b"b.txt"):
        with open(os.fsencode(tmp_path / "texts") + b"/" + name, "wb") as file:
            file.write(200 * text(name.decode(errors="ignore")))
    assert sorted(text_files(tmp_path / "texts")) == ["a\\udcff.txt", "b.txt"]
    build_data(DataConfig(source=str(tmp_path / "texts")))
    done = tokenize([tmp_path / "texts"], tmp_path / "tokens", vocab_size=300)
    assert done.files == 2


def test_texts_that_a_kill_left_go_with_the_next_call(tmp_path):
    (tmp_path / "a").mkdir()
    for name in ("one.txt", "two.txt"):
        (tmp_path / "a" / name).write_bytes(400 * text(name))
    script = "import os; from attnzoo.data import corpus; from pathlib import Path\n"
    script += "corpus.tokenize = lambda *x, **y: os.kill(os.getpid(), 9)\n"
    script += "corpus.tokenize_corpus([Path('a')], Path('tokens'), vocab_size=300)"
    assert subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment()).returncode == -9
    assert len([*tmp_path.rglob("*.txt")]) == 4
    corpus, _ = tokenize_corpus([tmp_path / "a"], tmp_path / "tokens", vocab_size=300)
    assert corpus.documents == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "tokens"]


def test_folders_of_others_beside_the_target_are_left_alone(tmp_path):
    pytest.importorskip("tokenizers")
    for name in ("a/one.txt", "a/two.txt", ".tokens.texts/mine.txt", "home/thesis.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(400 * text(name))
    tokenize_corpus([tmp_path / "a"], tmp_path / "tokens", vocab_size=300)
    assert (tmp_path / ".tokens.texts" / "mine.txt").is_file()
    (tmp_path / ".other.part").symlink_to("home")
    for command in ("corpus", "tokenize"):
        words = [command, str(tmp_path / "a"), "--to", str(tmp_path / "other"), "--vocab-size", "300"]
        assert "leaves it alone" in str(CliRunner().invoke(app, words).exception)
    assert (tmp_path / "home" / "thesis.txt").is_file()
    assert not (tmp_path / "other").exists()
