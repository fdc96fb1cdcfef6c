"""Data: deterministic windows that leave the held-out text alone, and errors that say what is wrong."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnzoo.config import DataConfig
from attnzoo.data import DOCUMENT_END, TokenWindows, build_data, decode, encode, heldout_windows

SOME_TEXT = "the quick brown fox jumps over the lazy dog. " * 40


@pytest.fixture(scope="module")
def stdlib():
    return build_data(DataConfig(context_length=128))


@pytest.fixture
def folder(tmp_path):
    """Forty files of distinct lines, some in a folder within."""
    for number in range(40):
        path = tmp_path / ("deep" if number % 3 else ".") / f"file{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"line of file {number}\n" * 20)
    return tmp_path


def test_stdlib_is_python_source(stdlib):
    text = decode(stdlib.train.shards[0][:500_000])
    assert "\ndef " in text
    assert "import " in text
    assert stdlib.vocab_size == 256
    assert len(stdlib.train) * 128 > 1_000_000


def test_stdlib_leaves_out_installed_packages_and_tests(stdlib):
    corpus = stdlib.train.shards[0].tobytes() + stdlib.heldout.tobytes()
    assert b"class LanguageModel" not in corpus
    assert b"class TestCase(" in corpus  # unittest itself belongs
    assert b"def test_main(" not in corpus


def test_the_same_config_gives_the_same_data(stdlib):
    again = build_data(DataConfig(context_length=128))
    assert again.fingerprint == stdlib.fingerprint
    np.testing.assert_array_equal(again.train[12345], stdlib.train[12345])
    np.testing.assert_array_equal(again.heldout, stdlib.heldout)


def test_no_file_is_on_both_sides_and_none_is_lost(folder):
    data = build_data(DataConfig(source=str(folder), context_length=8, heldout_fraction=0.2))
    sides = [
        {line for line in decode(tokens).split("\n") if line.strip("\0")}
        for tokens in (data.train.shards[0], data.heldout)
    ]
    train, held = [{line.strip("\0") for line in side} for side in sides]
    assert not train & held
    assert len(train | held) == 40
    assert 1 <= len(held) <= 16


def test_a_file_keeps_its_side_when_another_comes(folder):
    config = DataConfig(source=str(folder), context_length=8, heldout_fraction=0.2)
    before = set(decode(build_data(config).heldout).split("\0"))
    (folder / "a-newcomer.txt").write_text("something else\n" * 20)
    after = set(decode(build_data(config).heldout).split("\0"))
    assert before <= after
    assert build_data(config).fingerprint != build_data(DataConfig(source=str(folder), context_length=8)).fingerprint


def test_documents_are_separated(folder):
    data = build_data(DataConfig(source=str(folder), context_length=8))
    corpus = np.concatenate([data.train.shards[0], data.heldout])
    assert (corpus == DOCUMENT_END).sum() == 40
    assert corpus[-1] == DOCUMENT_END


def test_a_pattern_chooses_the_files(folder):
    (folder / "other.md").write_text("markdown " * 50)
    (folder / "second.md").write_text("markdown " * 50)
    data = build_data(DataConfig(source=str(folder), context_length=8, pattern="*.md"))
    assert "line of file" not in decode(data.train.shards[0])
    assert "markdown" in decode(data.train.shards[0])


def test_of_a_single_file_the_end_is_held_out(tmp_path):
    (tmp_path / "a.txt").write_text(SOME_TEXT)
    data = build_data(DataConfig(source=str(tmp_path / "a.txt"), context_length=16, heldout_fraction=0.25))
    whole = np.concatenate([data.train.shards[0], data.heldout])
    assert decode(whole) == SOME_TEXT + "\0"
    assert len(data.heldout) == int(0.25 * len(whole))


@pytest.mark.parametrize("form", ["npy", "bin"])
def test_pretokenised_shards_are_memory_mapped_and_read_exactly(tmp_path, form):
    for shard in range(3):
        tokens = np.arange(1000, dtype=np.uint16) + 1000 * shard
        path = tmp_path / f"part{shard}.{form}"
        np.save(path, tokens) if form == "npy" else tokens.tofile(path)
    data = build_data(DataConfig(source=str(tmp_path), context_length=10, vocab_size=3000))
    assert all(isinstance(shard, np.memmap) for shard in data.train.shards)
    for index in range(2 * len(data.train)):
        window = data.train[index]
        np.testing.assert_array_equal(window, np.arange(window[0], window[0] + 11))  # consecutive, so within a shard
        assert window[0] // 1000 == window[-1] // 1000
    assert len(data.heldout) == 1000


def test_a_heldout_source_leaves_all_of_the_source_to_training(tmp_path):
    np.save(tmp_path / "train.npy", np.zeros(500, dtype=np.uint16))
    np.save(tmp_path / "held.npy", np.ones(100, dtype=np.uint16))
    config = DataConfig(
        source=str(tmp_path / "train.npy"), heldout_source=str(tmp_path / "held.npy"), context_length=10, vocab_size=2
    )
    data = build_data(config)
    assert len(data.train.shards[0]) == 500
    assert data.heldout.tolist() == [1] * 100


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(12, 400), min_size=1, max_size=4),
    context_length=st.integers(1, 11),
    seed=st.integers(0, 9),
    epoch=st.integers(0, 3),
)
def test_an_epoch_visits_windows_that_do_not_overlap(lengths, context_length, seed, epoch):
    starts = np.cumsum([0, *lengths])
    shards = [np.arange(first, last) for first, last in itertools.pairwise(starts)]
    windows = TokenWindows(shards, context_length, vocab_size=int(starts[-1]), seed=seed)
    seen = [windows[epoch * len(windows) + position] for position in range(len(windows))]
    inputs = np.concatenate([window[:-1] for window in seen])
    assert len(np.unique(inputs)) == len(inputs) == len(windows) * context_length
    for window in seen:
        np.testing.assert_array_equal(np.diff(window), 1)
        assert np.searchsorted(starts, window[0], "right") == np.searchsorted(starts, window[-1], "right")


def test_the_order_differs_between_epochs_and_seeds_and_not_between_access_orders():
    shard = np.arange(2000)
    windows, again = TokenWindows([shard], 10, 2000, seed=1), TokenWindows([shard], 10, 2000, seed=1)
    count = len(windows)
    first = [windows[index][0] for index in range(count)]
    second = [windows[count + index][0] for index in range(count)]
    assert first != second
    assert {start % 10 for start in first} != {start % 10 for start in second}  # cut elsewhere
    backwards = [again[index][0] for index in reversed(range(2 * count))]
    assert backwards[::-1] == first + second
    assert [TokenWindows([shard], 10, 2000, seed=2)[index][0] for index in range(count)] != first


def test_heldout_windows_are_spread_over_all_of_the_heldout_tokens():
    heldout = np.arange(1001)
    windows = heldout_windows(heldout, 10, max_tokens=50)
    assert windows.shape == (5, 11)
    assert windows[:, 0].tolist() == [0, 200, 400, 600, 800]
    everything = heldout_windows(heldout, 10, max_tokens=10**9)
    np.testing.assert_array_equal(everything[:, :-1].ravel(), np.arange(1000))
    assert len(heldout_windows(heldout, 1000, max_tokens=1)) == 1


def test_text_survives_the_tokens():
    assert decode(encode("naïve ∂x")) == "naïve ∂x"


def write(path, tokens, dtype=np.uint16):
    np.save(path, np.asarray(tokens, dtype=dtype))
    return str(path)


def test_no_data_is_refused(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "empty.bin").touch()
    (tmp_path / "nothing").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no data.*'stdlb'.*did you mean 'stdlib'"):
        build_data(DataConfig(source="stdlb"))
    for source, message in [("empty.txt", "empty"), ("empty.bin", "empty"), ("nothing", "no file")]:
        with pytest.raises(ValueError, match=f"no data.*{message}"):
            build_data(DataConfig(source=str(tmp_path / source), vocab_size=256))
    with pytest.raises(ValueError, match=r"no file.*'\*\.md'"):
        build_data(DataConfig(source=str(tmp_path / "nothing"), pattern="*.md"))


def test_files_that_are_no_texts_are_refused_by_name(folder):
    """A zero byte ends a document; files of tokens in a folder within would be read byte by byte."""
    np.save(folder / "deep" / "tokens.npy", np.arange(500, dtype=np.uint16))
    with pytest.raises(ValueError, match=r"deep/tokens\.npy' has a zero byte at \d+, .* data\.pattern"):
        build_data(DataConfig(source=str(folder), context_length=8, vocab_size=500))
    assert build_data(DataConfig(source=str(folder), context_length=8, pattern="*.txt")).vocab_size == 256


def test_files_of_tokens_that_fill_no_row_are_left_out_with_a_line(tmp_path, caplog):
    for name, length in (("a", 90), ("b", 33), ("c", 32), ("d", 5), ("e", 90)):
        np.save(tmp_path / f"{name}.npy", np.arange(length) % 7)
    heldout = tmp_path / "held" / "f.npy"
    heldout.parent.mkdir()
    np.save(heldout, np.arange(90) % 7)
    held = DataConfig(source=str(tmp_path), heldout_source=str(heldout), vocab_size=7, context_length=32)
    build_data(held)
    (record,) = caplog.records
    assert "2 of 5 files, 37 of 250 tokens, are left out: a row of data.context_length=32" in record.getMessage()
    caplog.clear()
    build_data(replace(held, context_length=4))
    assert not caplog.records


def test_what_lies_behind_a_folder_is_left_out_with_a_line(tmp_path, caplog):
    """Links to folders among texts, and files of tokens in folders inside of one."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "tokens" / "more").mkdir(parents=True)
    (tmp_path / "texts" / "a.txt").write_text("abc " * 100)
    (tmp_path / "texts" / "more").symlink_to(tmp_path / "tokens")
    (tmp_path / "texts" / "gone").symlink_to("nowhere")
    for name in ("a.npy", "more/b.npy"):
        np.save(tmp_path / "tokens" / name, np.zeros(500, dtype=np.uint16))
    build_data(DataConfig(source=str(tmp_path / "texts"), context_length=8))
    build_data(DataConfig(source=str(tmp_path / "tokens"), vocab_size=5, context_length=8))
    links, inside = caplog.messages
    assert links.endswith("as links to folders or to nothing are not followed: 'gone', 'more'")
    assert inside.endswith("1 .npy and .bin files in folders inside it are not read, such as 'more/b.npy'")


def test_too_short_for_the_context_is_refused_with_both_numbers(tmp_path):
    (tmp_path / "short.txt").write_text("x" * 99)
    with pytest.raises(ValueError, match=r"short\.txt.*95 tokens.*data.context_length=256 needs at least 257"):
        build_data(DataConfig(source=str(tmp_path / "short.txt"), context_length=256))
    with pytest.raises(ValueError, match=r"held-out split.*5 tokens.*at least 51"):
        build_data(DataConfig(source=str(tmp_path / "short.txt"), context_length=50))
    with pytest.raises(ValueError, match="held-out split has 5 tokens"):
        heldout_windows(np.zeros(5, dtype=np.int64), 10, 100)


def test_what_is_no_shard_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"1-D integer array, got float64"):
        build_data(DataConfig(source=write(tmp_path / "f.npy", [0.5] * 9, np.float64), vocab_size=5))
    with pytest.raises(ValueError, match=r"got uint16 of shape \[?\(?3, 3"):
        build_data(DataConfig(source=write(tmp_path / "m.npy", np.zeros((3, 3))), vocab_size=5))
    (tmp_path / "odd.bin").write_bytes(b"123")
    with pytest.raises(ValueError, match="not a whole number of uint16 tokens"):
        build_data(DataConfig(source=str(tmp_path / "odd.bin"), vocab_size=5))
    (tmp_path / "text.npy").write_text("no array")
    with pytest.raises(ValueError, match=r"not a \.npy file"):
        build_data(DataConfig(source=str(tmp_path / "text.npy"), vocab_size=5))


def test_a_vocabulary_that_does_not_hold_the_tokens_is_refused(tmp_path):
    source = write(tmp_path / "t.npy", [7] * 500)
    with pytest.raises(ValueError, match=r"data\.vocab_size is needed"):
        build_data(DataConfig(source=source, context_length=8))
    with pytest.raises(ValueError, match=r"tokens from 7 to 7.*vocabulary of 7"):
        build_data(DataConfig(source=source, context_length=8, vocab_size=7)).train[0]
    with pytest.raises(ValueError, match="byte by byte and needs 256"):
        build_data(DataConfig(vocab_size=100))


def test_a_token_that_is_no_byte_shows_as_a_replacement_character() -> None:
    assert decode([*encode("né"), 256, 2999, 255, *encode("x")]) == "né\ufffd\ufffd\ufffdx"
