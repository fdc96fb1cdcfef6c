"""Folders of tokens: what is written is what is read, and a folder that is not as it says is refused by name."""

import json
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnzoo.data.shards import is_shards, read_shards, write_shards

DOCUMENTS = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), min_size=1, max_size=12)


def documents(shards):
    return [
        shard.tokens[start:end].tolist()
        for shard in shards
        for start, end in zip(shard.starts[:-1], shard.starts[1:], strict=True)
    ]


def arrays(lists):
    return [np.array(one) for one in lists]


@pytest.fixture
def folder(tmp_path):
    write_shards(tmp_path / "tokens", 100, arrays([[1, 2, 3], [4], [5, 6]]), arrays([[7, 8]]), shard_tokens=3)
    return tmp_path / "tokens"


@settings(max_examples=12, deadline=None)
@given(train=DOCUMENTS, held_out=DOCUMENTS, shard_tokens=st.integers(3, 30))
def test_documents_come_back(tmp_path_factory, train, held_out, shard_tokens):
    folder = tmp_path_factory.mktemp("shards") / "tokens"
    shards = write_shards(folder, 100, arrays(train), arrays(held_out), shard_tokens=shard_tokens)
    assert documents(shards.train) == train
    assert documents(shards.held_out) == held_out
    assert all(shard.count - len(shard.tokens[shard.starts[-2] :]) < shard_tokens for shard in shards.train)
    shards.check()


@pytest.mark.parametrize(("vocab_size", "dtype"), [(2**16, "uint16"), (2**16 + 1, "uint32")])
def test_tokens_take_as_many_bytes_as_they_need(vocab_size, dtype, tmp_path):
    shards = write_shards(tmp_path / "tokens", vocab_size, [np.array([vocab_size - 1, 0])])
    assert shards.train[0].tokens.dtype == np.dtype(dtype)
    assert shards.train[0].tokens.tolist() == [vocab_size - 1, 0]
    assert (tmp_path / "tokens" / "train-00000.bin").stat().st_size == 2 * np.dtype(dtype).itemsize


def test_tokens_are_not_read_into_memory(folder):
    assert isinstance(read_shards(folder).train[0].tokens, np.memmap)


def test_fingerprint_tells_tokens_borders_and_splits(tmp_path):
    cases = [
        (100, [[1, 2, 3]], [[4]]), (101, [[1, 2, 3]], [[4]]), (100, [[1, 2, 4]], [[4]]), (100, [[1], [2, 3]], [[4]]),
        (100, [[4]], [[1, 2, 3]]),
    ]  # fmt: skip
    made = [
        write_shards(tmp_path / str(n), vocab_size, arrays(train), arrays(held)).fingerprint
        for n, (vocab_size, train, held) in enumerate([*cases, cases[0]])
    ]
    assert len(set(made)) == len(cases)
    assert made[0] == made[-1]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([100], "from 100 to 100, outside the vocabulary of 100"),
        ([-1, 3], "from -1 to 3"),
        ([], "at least one"),
        ([[1]], r"shape \(1, 1\)"),
        ([0.5], "integers"),
    ],
)
def test_what_is_no_document_is_refused_and_nothing_is_left(document, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        write_shards(tmp_path / "tokens", 100, [np.array([1]), np.array(document)])
    assert not list(tmp_path.iterdir())
    assert not is_shards(tmp_path / "tokens")


def test_a_split_to_train_on_is_needed(tmp_path):
    with pytest.raises(ValueError, match="train: expected at least one document"):
        write_shards(tmp_path / "tokens", 100, [], [np.array([1])])


def test_a_folder_without_tokens_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no shards\.json"):
        read_shards(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 1"),
        ({"dtype": "uint61"}, "unknown dtype 'uint61'.*did you mean 'uint16'"),
        ({"splits": {"train": []}}, "held_out is missing"),
        ({"vocab_size": "many"}, "number vocab_size"),
        ({"splits": {"train": [{"file": "../x.bin", "tokens": 1, "documents": 1}], "held_out": []}}, "of this folder"),
        (
            {"splits": {"train": [{"file": "x.bin", "tokens": 0, "documents": 0}], "held_out": []}},
            "x.bin: expected 1 <= documents",
        ),
        ({"splits": {"train": 3, "held_out": []}}, r"shards\.json"),
    ],
)
def test_an_index_that_cannot_be_understood_is_refused(change, message, folder):
    index = json.loads((folder / "shards.json").read_text())
    (folder / "shards.json").write_text(json.dumps({**index, **change}))
    with pytest.raises(ValueError, match=message):
        read_shards(folder)


@pytest.mark.parametrize("file", ["train-00000.bin", "train-00001.idx", "held_out-00000.bin"])
def test_a_file_that_was_cut_is_refused(file, folder):
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content[:-1])
    with pytest.raises(
        ValueError, match=rf"{file}' has {len(content) - 1} bytes where shards.json says {len(content)}"
    ):
        read_shards(folder)
    (folder / file).unlink()
    with pytest.raises(FileNotFoundError, match=file):
        read_shards(folder)


def test_borders_that_do_not_fill_the_file_are_refused(folder):
    (folder / "train-00000.idx").write_bytes(np.array([0, 2], "<i8").tobytes())
    with pytest.raises(ValueError, match=r"train-00000.idx'.*from 0 to 3, got 0 to 2"):
        read_shards(folder)


def test_changed_tokens_are_found(folder):
    (folder / "train-00000.bin").write_bytes(np.array([1, 2, 4], "<u2").tobytes())
    with pytest.raises(ValueError, match="not those of which shards.json"):
        read_shards(folder).check()


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index["splits"].update(train=index["splits"]["held_out"], held_out=index["splits"]["train"]),
        lambda index: index["splits"].update(held_out=index["splits"]["train"]),
        lambda index: index.update(vocab_size=301),
        lambda index: index["splits"]["train"].pop(),
        lambda index: index["splits"]["train"][0].update({".bin": "0" * 64}),
        lambda index: index.update(fingerprint="0" * 32),
    ],
    ids=["splits exchanged", "one split twice", "a vocabulary", "a file less", "a digest", "a fingerprint"],
)
def test_a_changed_index_is_found_though_its_time_is_old(change, folder):
    path = folder / "shards.json"
    status, index = path.stat(), json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(ValueError, match=r"shards\.json': what it says is not what its fingerprint was made of"):
        read_shards(folder)


def test_borders_that_do_not_rise_are_found_though_their_time_is_old(tmp_path):
    folder = tmp_path / "tokens"
    write_shards(folder, 300, [np.arange(4)] * 3)
    path = folder / "train-00000.idx"
    status = path.stat()
    for inner, at in (([10**9, 8], 1), ([4, 4], 1), ([-1, 8], 0)):
        path.write_bytes(np.array([0, *inner, 12], "<i8").tobytes())
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        with pytest.raises(ValueError, match=rf"train-00000\.idx': expected starts that rise, got .* at {at}$"):
            read_shards(folder)


def test_an_index_nested_too_deeply_is_named(folder):
    (folder / "shards.json").write_text('{"version":' + "[" * 200_000)
    with pytest.raises(ValueError, match=r"shards\.json': it is not readable as JSON: maximum recursion"):
        read_shards(folder)


def test_a_folder_of_a_version_without_digests_has_the_same_fingerprint(folder):
    path = folder / "shards.json"
    index = json.loads(path.read_text())
    for entry in (entry for split in index["splits"].values() for entry in split):
        del entry[".bin"], entry[".idx"]
    path.write_text(json.dumps(index))
    shards = read_shards(folder)
    shards.check()
    assert shards.fingerprint == index["fingerprint"]


def test_a_changed_token_is_found_though_its_time_is_old(folder):
    path, index = next(folder.glob("train-*.bin")), folder / "shards.json"
    read_shards(folder).check_newer()
    status, content = path.stat(), bytearray(path.read_bytes())
    content[0] ^= 1
    while path.stat().st_ctime_ns <= index.stat().st_ctime_ns:  # a clock may tick more seldom than this test writes
        path.write_bytes(content)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(ValueError, match=r"the tokens are not those of which shards\.json holds the fingerprint"):
        read_shards(folder).check_newer()
