"""Tables of documents in the layouts of FineWeb-Edu, SlimPajama and LongCrawl64, from small files of the same kind."""

import bz2
import gzip
import json
import lzma
import sys

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("tokenizers")

from attnzoo.cli import app
from attnzoo.data import build_data
from attnzoo.data.config import DataConfig
from attnzoo.data.documents import rolled
from attnzoo.data.tables import texts_of_rows
from attnzoo.data.tokenizer import parse_tokenizer, tokenize

TEXTS = [f"{n}: a document,\n    with an indent <b> and no tags & more{'.' * n}\n" for n in range(40)]


def fineweb_edu(folder):
    """`data/CC-MAIN-.../000_00000.parquet`, with the columns of its card that matter and some beside."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = folder / "data" / "CC-MAIN-2024-10" / "000_00000.parquet"
    file.parent.mkdir(parents=True)
    columns = {"text": TEXTS, "id": [f"<urn:uuid:{n}>" for n in range(40)], "score": [3.5] * 40, "int_score": [4] * 40}
    parquet.write_table(pa.table(columns), file, row_group_size=7)
    return folder / "data"


def slimpajama(folder):
    """`train/chunk1/example_train_0.jsonl.zst`: a text and where it is from in each line."""
    zstandard = pytest.importorskip("zstandard")
    for chunk, texts in enumerate((TEXTS[:25], TEXTS[25:]), 1):
        lines = [json.dumps({"text": text, "meta": {"redpajama_set_name": "RedPajamaC4"}}) + "\n" for text in texts]
        file = folder / "train" / f"chunk{chunk}" / "example_train_0.jsonl.zst"
        file.parent.mkdir(parents=True)
        halves = ["".join(lines[:9]), "".join(lines[9:])]  # a file may have several frames
        file.write_bytes(b"".join(zstandard.ZstdCompressor().compress(half.encode()) for half in halves))
    return folder / "train"


def lines_of_json(folder):
    (folder / "texts.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps({"text": t}) + "\n" for t in TEXTS).encode())
    )
    return folder / "texts.jsonl.gz"


@pytest.mark.parametrize("layout", [fineweb_edu, slimpajama, lines_of_json])
def test_every_row_of_a_table_is_a_document_as_it_is(layout, tmp_path):
    path = layout(tmp_path)
    words = [str(path), "--to", str(tmp_path / "tokens"), "--text-field", "text", "--vocab-size", "256"]
    ran = CliRunner().invoke(app, ["tokenize", *words, "--heldout-fraction", "0.2"])
    assert ran.exit_code == 0, ran.output
    assert f"40 documents of {sum(len(t.encode()) for t in TEXTS):,} bytes" in ran.output
    data = build_data(DataConfig(source=str(tmp_path / "tokens"), documents="packed", context_length=16))
    held = bytes(np.asarray(data.heldout[:]).astype(np.uint8)).decode().split("\0")[:-1]
    train = b"".join(bytes(np.asarray(s).astype(np.uint8)) for s in data.train.shards).decode().split("\0")[:-1]
    assert sorted(train + held) == sorted(TEXTS)
    assert 0 < len(held) < 16
    assert len(data.heldout_documents) == len(held) + 1


@pytest.mark.parametrize("kind", [".gz", ".xz", ".bz2", ".zst", ".parquet"])
@pytest.mark.parametrize("kept", [0.1, 0.5, 0.99])
def test_a_packed_table_that_ends_too_early_is_refused_by_name(kind, kept, tmp_path):
    """Of a frame, zstandard alone would leave out the end, or all, without a word."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    if kind == ".parquet":
        file = fineweb_edu(tmp_path) / "CC-MAIN-2024-10" / "000_00000.parquet"
        packed = file.read_bytes()
    else:
        pack = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}.get(kind)
        packed = pack(lines) if pack else pytest.importorskip("zstandard").compress(lines)
        (file := tmp_path / f"texts.jsonl{kind}").write_bytes(packed)
        assert list(texts_of_rows(file, "text")) == TEXTS
        packed = (packed if kind == ".zst" else b"") + packed  # a first frame that is whole
    file.write_bytes(packed[: int(len(packed) * (kept if kind != ".zst" else (1 + kept) / 2))])
    with pytest.raises(ValueError, match=f"{file.name}' is (damaged or not whole|not readable as Parquet): "):
        list(texts_of_rows(file, "text"))


@pytest.mark.parametrize(
    ("line", "said"),
    [(b'{"text": "\\ud800"}', "row 1: text is no text in UTF-8"), (b"[" * 10**5, "line 1: expected JSON: maximum rec")],
)
def test_a_line_that_is_no_text_is_refused_by_name(line, said, tmp_path):
    (tmp_path / "texts.jsonl").write_bytes(line)
    with pytest.raises(ValueError, match=rf"texts\.jsonl', {said}"):
        list(texts_of_rows(tmp_path / "texts.jsonl", "text"))


def longcrawl64(folder):
    """`train.zarr` and `heldout.zarr`: sequences of one length, of GPT-2's tokens in 16 bits."""
    zarr = pytest.importorskip("zarr")
    dice = np.random.default_rng(0)
    for name, rows in (("train", 30), ("heldout", 6)):
        array = zarr.create_array(str(folder / f"{name}.zarr"), shape=(rows, 64), chunks=(4, 64), dtype="uint16")
        array[:] = dice.integers(0, 256, (rows, 64))
    return zarr


def test_token_arrays_become_folders_with_the_tokenizer_that_made_them(tmp_path):
    zarr = longcrawl64(tmp_path)
    (tmp_path / "a.txt").write_text("some text")
    tokenize([tmp_path / "a.txt"], tmp_path / "bytes", vocab_size=256)
    for name in ("train", "heldout"):
        words = ["tokenize", str(tmp_path / f"{name}.zarr"), "--to", str(tmp_path / name)]
        ran = CliRunner().invoke(app, [*words, "--tokenizer", str(tmp_path / "bytes")])
        assert ran.exit_code == 0, ran.output
        assert "bytes per token" not in ran.output
    assert parse_tokenizer((tmp_path / "train" / "tokenizer.json").read_bytes()).get_vocab_size() == 256
    config = DataConfig(source=str(tmp_path / "train"), heldout_source=str(tmp_path / "heldout"), context_length=16)
    data = build_data(config)
    for split, name in ((np.concatenate(data.train.shards), "train"), (data.heldout[:], "heldout")):
        expected = zarr.open_array(str(tmp_path / f"{name}.zarr"), mode="r")[:]
        assert sorted(map(tuple, np.asarray(split).reshape(-1, 64))) == sorted(map(tuple, expected))
    zarr.create_array(str(tmp_path / "flat.zarr"), shape=(4,), dtype="float32")
    refused = [
        (["train.zarr", "--vocab-size", "256"], "tokenizer: expected the one that made the tokens"),
        (["train.zarr", "a.txt", "--tokenizer", str(tmp_path / "bytes")], "Zarr arrays with different names alone"),
        (
            ["flat.zarr", "--tokenizer", str(tmp_path / "bytes")],
            r"expected integers \[documents, tokens\], got float32",
        ),
    ]
    for (path, *words), message in refused:
        paths = [str(tmp_path / word) if word.endswith("txt") else word for word in words]
        ran = CliRunner().invoke(app, ["tokenize", str(tmp_path / path), "--to", str(tmp_path / "none"), *paths])
        with pytest.raises(ValueError, match=message):
            raise ran.exception


def test_sequences_are_rolled_by_shifts_that_differ_and_come_again():
    documents = [np.arange(100) + 1000 * n for n in range(9)] + [np.arange(31)]
    found = list(rolled(documents, 32, "0"))
    assert len(found) == 27
    shifts = []
    for number, sequence in enumerate(found):
        first = 1000 * (number // 3) + 32 * (number % 3)
        shift = int(np.argmin(sequence))
        assert np.array_equal(sequence, np.roll(np.arange(first, first + 32), shift))
        shifts.append(shift)
    assert len(set(shifts)) > 10
    assert all(map(np.array_equal, found, rolled(documents, 32, "0")))
    assert not all(map(np.array_equal, found, rolled(documents, 32, "1")))


def test_a_rolled_corpus_holds_the_sequences_and_nothing_else(tmp_path):
    path = lines_of_json(tmp_path)
    done = tokenize([path], tmp_path / "tokens", vocab_size=256, text_field="text", roll=20, heldout_fraction=0.2)
    assert all(np.all(np.diff(shard.starts) == 20) for shard in (*done.shards.train, *done.shards.held_out))
    assert sum(shard.documents for shard in (*done.shards.train, *done.shards.held_out)) == sum(
        (len(text) + 1) // 20 for text in TEXTS
    )
    with pytest.raises(ValueError, match="roll: expected at least 2 tokens, got 1"):
        tokenize([path], tmp_path / "more", vocab_size=256, roll=1)


def test_rows_without_the_text_are_named(tmp_path):
    def read(content: str, field: str = "text", name: str = "a.jsonl"):
        (tmp_path / name).write_text(content)
        return list(texts_of_rows(tmp_path / name, field, False))

    assert read('{"text": "a"}\n{"text": ""}\n{"text": "b"}\n') == ["a", "b"]
    assert read('\n{"text": "a"}\r\n\r\n \t\n{"text": "b"}\n\n') == ["a", "b"]
    for content, message in (
        ('{"text": "a"}\n{"test": "b"}\n', "unknown text_field 'text' of line 2 of .*did you mean 'test'"),
        ('{"text": 5}\n', "row 1: text: expected a text, got 5"),
        ('{"text": "a"}\n{"tex', "line 2: expected JSON"),
        ("[1]\n", "line 1: expected a JSON object"),
        ('{"text": "a"}\n\n{"text": 5}\n', "row 3: text: expected a text, got 5"),
        ('{"text": "a\\u0000b"}\n', "row 1: text has a zero byte"),
    ):
        with pytest.raises(ValueError, match=message):
            read(content)
    with pytest.raises(ValueError, match=r"expected \.parquet, \.jsonl or \.ndjson files"):
        read("a", name="a.txt")


def test_a_package_that_is_missing_is_named_with_its_extra(tmp_path, monkeypatch, capsys):
    from attnzoo.cli import main

    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    words = ["tokenize", str(tmp_path / "a.parquet"), "--to", str(tmp_path / "x"), "--text-field", "text"]
    monkeypatch.setattr(sys, "argv", ["attnzoo", *words, "--vocab-size", "256"])
    with pytest.raises(SystemExit):
        main()
    assert "pip install 'attnzoo[tables]'" in capsys.readouterr().err
