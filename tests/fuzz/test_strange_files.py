"""Archives, token files and run folders as others make or leave them: all that is right in them, the rest by name."""

import bz2
import gzip
import io
import json
import lzma
import os
import shutil
import tarfile
import zipfile

import numpy as np
import pytest
from rule import answer
from tiny_runs import config_of, outcome, write_text

from attnzoo.data import archives, build_data
from attnzoo.data.config import DataConfig
from attnzoo.data.corpus import collect
from attnzoo.training import train

NAMES = [
    "a.txt", "b/c.txt", ".", "..", "../up.txt", "/etc/x", "a.txt/inside", ".hidden", "a\nb", "\x1b[31m", "é", "\udcff",
    "x" * 300, "/".join("d" * 200), "a.json", "b.JSONL", "c.ndjson.gz", "d.txt.bz2", "e.xz", "f.tar", "", "\\\\host\\c",
]  # fmt: skip
CONTENTS = [
    *(b"", b"text\n", b"text\n" * 3000, b"\0" * 3000, b"\xff\xfe", b"\xef\xbb\xbfmarked", b"letters " * 90_000),
    *(b'{"text": "one"}', b'{"text": 1}', b'{"text": "one"}\n{"text": "<b>two"}\n\n[1]\n{', b"[" * 5000),
    *(b'{"text": "' + b"<a x=" * 3000 + b'"}', gzip.compress(b"packed\n" * 90), bz2.compress(b"packed\n" * 9)),
    lzma.compress(b'{"text": "packed"}'),
]
KINDS = [tarfile.REGTYPE] * 4 + [tarfile.SYMTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE]
SPARSE = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "s", "GNU.sparse.realsize": "9" * 12}
HEADERS = [{"path": "x\0y"}, {"size": "99999999999"}, {"size": "-512"}, {"mtime": "nan"}, SPARSE]
GOOD = '{"text": "this one is good"}'


def packed(rng):
    """The name and the content of an archive, some of them damaged."""
    members = [(rng.choice(NAMES), rng.choice(CONTENTS)) for _ in range(rng.choice([1, 2, 5]))]
    buffer, kind = io.BytesIO(), rng.choice(["zip", "tar", "tar", "tar.gz", "tar.xz", "tar.bz2", "one"])
    if kind == "zip":
        with zipfile.ZipFile(buffer, "w", rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as archive:
            for name, content in members:
                archive.writestr(name.encode(errors="replace").decode() or "q", content)
    elif kind == "one":
        kind = rng.choice(["txt", "gz", "bz2", "xz", "jsonl", "jsonl.gz", "json"])
        buffer.write(members[0][1])
    else:
        style = rng.choice([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
        with tarfile.open(fileobj=buffer, mode=f"w:{kind[4:]}", format=style) as archive:
            for name, content in members:
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                entry.type = rng.choice(
                    [tarfile.REGTYPE, tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE]
                )
                if style == tarfile.PAX_FORMAT and rng.random() < 0.3:
                    entry.pax_headers = rng.choice(HEADERS)
                archive.addfile(entry, io.BytesIO(content) if entry.isreg() else None)
    content = bytearray(buffer.getvalue())
    for _ in range(rng.choice([0, 0, 1, 3])):
        at = rng.randrange(len(content) + 1)
        how = rng.choice(["flip", "cut", "append", "noise"])
        if how == "cut":
            del content[at:]
        elif how == "append":
            content += rng.randbytes(20)
        else:
            content[at : at + (16 if how == "noise" else 1)] = rng.randbytes(16 if how == "noise" else 1)
    return f"a.{kind}", bytes(content), [name for name, _ in members]


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_what_is_strange_in_an_archive_is_named_and_the_rest_is_taken(fuzz, tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "LARGEST", 500_000)
    (tmp_path / "good.json").write_text(GOOD)
    for rng in fuzz(75):
        name, content, story = packed(rng)
        (tmp_path / name).write_bytes(content)
        (tmp_path / "in" / "texts").mkdir(parents=True)
        field = rng.choice([None, "text"])
        found = collect([tmp_path / name, tmp_path / "good.json"], tmp_path / "in" / "texts", json_field=field)
        written = [path for path in (tmp_path / "in").rglob("*") if path.is_file()]
        assert found.documents == len(written) >= 1, story
        assert all(path.is_relative_to(tmp_path / "in" / "texts") for path in written), story
        good = tmp_path / "in" / "texts" / "good.json"
        assert good.read_text() == (json.loads(GOOD)["text"] if field else GOOD), story
        assert all(told.isprintable() for names in found.left_out.values() for told in names), (story, found.left_out)
        shutil.rmtree(tmp_path / "in")
        (tmp_path / name).unlink()


def test_a_file_of_tokens_is_read_as_what_it_is_or_refused(fuzz, tmp_path):
    for rng in fuzz(30):
        vocab_size, count = rng.choice([1000, 50257, 65536, 128256]), rng.randrange(400, 3000)
        tokens = np.random.default_rng(rng.randrange(2**32)).integers(0, vocab_size, count)
        wrote = rng.choice(
            ["uint16", "uint32", "int32", "int64"] if vocab_size <= 65536 else ["uint32", "int32", "int64"]
        )
        reads = rng.choice(["uint8", "uint16", "uint32", "int32", "int64", wrote])
        header = np.zeros(256, "<i4")
        if headed := rng.random() < 0.4:
            header[:3] = rng.choice([20240520, 20240801]), rng.choice([1, 7, 2]), rng.choice([count, count + 1])
        path = tmp_path / "tokens.bin"
        path.write_bytes((header.tobytes() if headed else b"") + tokens.astype(wrote).tobytes())
        story = (fuzz.seed, vocab_size, count, wrote, reads, header[:3] if headed else None)
        config = DataConfig(source=str(path), context_length=8, vocab_size=vocab_size, dtype=reads)

        def read(config=config):
            data = build_data(config)
            return np.concatenate([np.asarray(shard) for shard in data.train.shards] + [np.asarray(data.heldout)])

        found = answer(read, ["tokens.bin", str(path)], story)
        assert found is None or np.array_equal(found, tokens), story
        assert found is not None or headed or reads != wrote, story


STRAYS = [
    ".step-x", ".step-mine", ".step-00000004.tmp", ".step-00000002.old", ".step-00000099.part", ".step-00000006.part",
    "step-1", "step-00000004 copy", "step-", "notes.txt", ".removed", "damaged-step-00000004",
]  # fmt: skip


def stray(path, rng, home):
    """Something of a user's in a place where the trainer works."""
    kind = rng.choice(["file", "folder", "empty file", "link to a folder", "link to a file", "link to nothing"])
    if kind == "folder":
        path.mkdir()
        (path / "mine").write_text("mine")
    elif kind.startswith("link"):
        path.symlink_to({"link to a folder": home, "link to a file": home / "thesis"}.get(kind, "nowhere"))
    else:
        path.write_text("mine" if kind == "file" else "")
    return f"{kind} {path.name}"


def kept(path):
    """What is told of a path without following it."""
    if path.is_symlink():
        return os.readlink(path)
    return sorted(map(str, path.rglob("*"))) if path.is_dir() else path.read_bytes()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A folder with a finished run, `whole`, and the same as a kill after step 4 leaves it, `killed`."""
    folder = tmp_path_factory.mktemp("strays")
    write_text(folder)
    train(config_of(folder, "whole", "keep_checkpoints=3", "eval_every=0"))
    shutil.copytree(folder / "whole", folder / "killed")
    for step in (6, 8):
        shutil.rmtree(folder / "killed" / "checkpoints" / f"step-{step:08d}")
    return folder


def test_strays_among_the_checkpoints_stay_and_change_no_bit(fuzz, stopped, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis").write_text("years of work")
    expected = outcome(stopped / "whole")
    for rng in fuzz(5):
        run = tmp_path / f"run{fuzz.seed}"
        shutil.copytree(stopped / "killed", run)
        names = rng.sample(STRAYS, rng.choice([1, 2, 4]))
        story = [stray(run / "checkpoints" / name, rng, home) for name in names]
        before = {name: kept(run / "checkpoints" / name) for name in names}
        config = config_of(stopped, "whole", "keep_checkpoints=3", "eval_every=0")
        config.output_dir = str(run)
        if answer(lambda config=config: train(config), [".step-00000006.part'"], story) is not None:
            assert outcome(run) == expected, story
        assert {name: kept(run / "checkpoints" / name) for name in names} == before, story
        assert (home / "thesis").read_text() == "years of work", story
        shutil.rmtree(run)
