"""No archive ends a corpus, fills the memory or takes for ever: what is hostile in it is named, the rest is taken."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import tarfile
import time
import zipfile

import pytest
from click.testing import CliRunner

from attnzoo.cli import app
from attnzoo.data import archives
from attnzoo.data.corpus import collect
from attnzoo.data.markup import plain

TEXT = b"some text\n" * 50
SPARSE = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "s.txt"}


def tar(*members, mode="w"):
    """An archive of (name, content, fields of its header) each."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode, format=tarfile.PAX_FORMAT) as archive:
        for name, content, fields in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            for field, value in fields.items():
                setattr(entry, field, value)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def sized(archive, size):
    """The archive with another size in the header of its first member."""
    content = bytearray(archive)
    content[124:136] = size
    content[148:156] = b" " * 8
    content[148:156] = b"%06o\0 " % sum(content[:512])
    return bytes(content)


def zipped(**members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def wrong(content, at):
    content = bytearray(content)
    content[at] ^= 0xFF
    return bytes(content)


OK = ("ok", TEXT, {})
SPARSE_MAP = b"1\n0\n5\n".ljust(512, b"\0") + b"hello".ljust(512, b"\0")
HOSTILE = {  # file -> content, the reason, what is named, whether the archive's other member is taken
    "sparse.tar": (
        tar(("s.txt", SPARSE_MAP, {"pax_headers": {**SPARSE, "GNU.sparse.realsize": str(100 << 30)}}), OK),
        "with a zero byte", "sparse.tar/s.txt", True,
    ),
    "nul.tar": (
        tar(("a", TEXT, {"pax_headers": {"path": "x\0y"}}), OK),
        "with a zero byte in its name", r"'nul.tar/x\x00y'", True,
    ),
    "deep.tar": (tar(("/".join("d" * 2000), TEXT, {}), OK), "in more than 100 folders", "deep.tar/d/...", True),
    "long.tar": (tar(("x" * 300, TEXT, {}), OK), "with too long a name", "long.tar/xxx", True),
    "up.tar": (tar(("..", TEXT, {}), OK), "without a name", "up.tar/..", True),
    "here.tar": (tar((".", TEXT, {}), OK), "without a name", "here.tar/.", True),
    "zip.zip": (zipped(ok=TEXT, **{"../..": TEXT[1:]}), "without a name", "zip.zip/../..", True),
    "none.zip": (
        zipped(qqqq=TEXT[1:], ok=TEXT).replace(b"qqqq", b"\0qqq"), "without a name", "none.zip/", True,
    ),
    "huge.tar": (
        sized(tar(OK, OK), b"\x80\0\0\0" + b"\x7f" + b"\xff" * 7),
        "cannot be read", "huge.tar ('ok' would have 9,223,372,036,854,775,807 bytes", False,
    ),
    "less.tar": (
        sized(tar(OK, OK), b"\xff" * 10 + b"\xfe\0"), "cannot be read", "less.tar ('ok' would have -512", False,
    ),
    "header.tar": (wrong(tar(OK, ("b", TEXT[1:], {})), 1024 + 3), "cannot be read", "header.tar (bad checksum)", True),
    "short.tar": (
        tar(("b", TEXT[1:] * 99, {}), OK)[:9000], "cannot be read", "short.tar ('b' would have 49,401", False,
    ),
    "ends.tar": (
        tar(OK, ("b", TEXT[1:], {}))[:1024], "cannot be read", "ends.tar (the archive ends without the zeros", True,
    ),
    "check.zip": (wrong(zipped(b=TEXT[1:], ok=TEXT), 40), "cannot be read", "check.zip/b (", True),
    "cut.txt.bz2": (bz2.compress(TEXT * 100)[:-10], "cannot be read", "cut.txt.bz2 (Compressed file ended", False),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_hostile_is_named_and_the_rest_is_taken(name, tmp_path):
    content, reason, named, other = HOSTILE[name]
    (tmp_path / "texts").mkdir()
    (tmp_path / name).write_bytes(content)
    (tmp_path / "good.txt").write_bytes(b"good")
    found = collect([tmp_path / name, tmp_path / "good.txt"], tmp_path / "texts")
    assert found.documents == 1 + other
    (told,) = found.left_out[reason]
    assert told.startswith(named)
    assert [*found.left_out] == [reason]


BOMBS = {
    "a.tar": lambda text: tar(("b", text, {})),
    "a.tar.gz": lambda text: tar(("b", text, {}), mode="w:gz"),
    "a.zip": lambda text: zipped(b=text),
    "a.txt.gz": gzip.compress,
    "a.txt": bytes,
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_document_is_read_to_a_bound(name, tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "LARGEST", 2_000_000)
    (tmp_path / "texts").mkdir()
    (tmp_path / name).write_bytes(BOMBS[name](b"a letter " * 1_000_000))
    (tmp_path / "good.txt").write_bytes(b"good" * 500_000)
    read = []
    taken = archives.check
    monkeypatch.setattr(archives, "check", lambda content, zero=True: [read.append(len(content)), taken(content, zero)])
    found = collect([tmp_path / name, tmp_path / "good.txt"], tmp_path / "texts")
    assert found.documents == 1
    assert [*found.left_out] in (["larger than 2,000,000 bytes"], ["cannot be read"])
    assert max(read) <= 2_000_000 + archives.CHUNK


@pytest.mark.parametrize("name", ["a.tar.gz", "a.zip", "a.jsonl.gz"])
def test_all_that_an_archive_unpacks_to_is_bounded(name, tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "LARGEST", 2_000_000)
    monkeypatch.setattr(archives, "TIMES", 2)
    (tmp_path / "texts").mkdir()
    texts = [b'{"text": "%06d' % number + b"a" * 1_000_000 + b'"}\n' for number in range(8)]
    members = {f"m{number}": text for number, text in enumerate(texts)}
    packed = {
        "a.tar.gz": lambda: tar(*((key, text, {}) for key, text in members.items()), mode="w:gz"),
        "a.zip": lambda: zipped(**members),
        "a.jsonl.gz": lambda: gzip.compress(b"".join(texts)),
    }
    (tmp_path / name).write_bytes(packed[name]())
    found = collect([tmp_path / name], tmp_path / "texts", json_field="text" if "json" in name else None)
    assert found.documents in (1, 2)
    assert "it unpacks to more than 2 times its size" in found.left_out["cannot be read"][0]


def test_names_that_would_steer_a_terminal_are_written_out(tmp_path):
    (tmp_path / "a.tar").write_bytes(tar(("red\x1b[31m", b"", {}), OK, ("more", TEXT[1:], {})))
    done = CliRunner().invoke(
        app, ["corpus", str(tmp_path / "a.tar"), "--to", str(tmp_path / "to"), "--vocab-size=256"]
    )
    assert r"left out, empty: 1 ('a.tar/red\x1b[31m')" in done.output


@pytest.mark.parametrize(
    "text",
    ["<a x=" * 200_000, "<&" * 200_000, '<a ="' * 200_000, "<!--" * 200_000, "<script>" * 200_000, "&#" + "9" * 200_000,
     "<a " + "= " * 400_000, "</" * 400_000, "<a '\"" * 200_000],
)  # fmt: skip
def test_html_takes_time_in_proportion_to_its_length(text):
    started = time.process_time()
    plain(text)
    assert time.process_time() - started < 5


def test_each_line_of_json_is_a_document(tmp_path):
    rows = [{"text": f"number {number}", "meta": {"id": number}} for number in range(4)]
    lines = "\n".join(map(json.dumps, rows)).encode()
    for name in ("a.jsonl", "b.NDJSON"):
        (tmp_path / "j").mkdir(exist_ok=True)
        (tmp_path / "j" / name).write_bytes(lines.replace(b"number", name.encode()) + b"\n\n{bad\n \t\r\n")
    (tmp_path / "j" / "c.jsonl.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + lines))
    (tmp_path / "j" / "d.JSON").write_text(json.dumps(rows[:2]).replace("number", "d"))
    (tmp_path / "j" / "e.json.gz").write_bytes(gzip.compress(b'{"text": "<p>e"}'))
    (tmp_path / "texts").mkdir()
    found = collect([tmp_path / "j"], tmp_path / "texts", json_field="text")
    written = {str(path.relative_to(tmp_path / "texts")): path for path in (tmp_path / "texts").rglob("*0*")}
    assert sorted(written) == [
        f"{name}/{line:08d}" for name in ("a.jsonl", "b.NDJSON", "c.jsonl") for line in (1, 2, 3, 4)
    ]
    assert written["c.jsonl/00000001"].read_text() == "number 0"
    assert (tmp_path / "texts" / "d.JSON").read_text() == "d 0\nd 1"
    assert (tmp_path / "texts" / "e.json").read_text() == "e"
    assert [name.partition(" ")[0] for name in found.left_out["not readable as JSON"]] == [
        "a.jsonl/00000006", "b.NDJSON/00000006",
    ]  # fmt: skip
    assert found.left_out["empty"] == [f"{name}/{line:08d}" for name in ("a.jsonl", "b.NDJSON") for line in (5, 7)]


def test_a_field_that_reads_nothing_is_refused(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "a.txt").write_bytes(TEXT)
    with pytest.raises(ValueError, match=r"json_field='text': expected files called \.json, \.jsonl or \.ndjson, got"):
        collect([tmp_path / "a.txt"], tmp_path / "texts", json_field="text")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    with pytest.raises(ValueError, match=r"json_field='txt': expected a text .* in 2 documents; did you mean 'text'?"):
        collect([tmp_path / "a.jsonl", tmp_path / "a.txt"], tmp_path / "texts", json_field="txt")
