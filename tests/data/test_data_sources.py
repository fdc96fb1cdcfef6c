"""Several sources and folders of tokens: an order by index alone, weights that are met, borders, changes that show."""

import itertools
import json
import os
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnzoo.config import DataConfig, WeightedSource, load_config
from attnzoo.data import Mixture, TokenWindows, build_data, decode, heldout_windows, shards
from attnzoo.data.order import permuted, shares_of, turn
from attnzoo.data.shards import write_shards
from attnzoo.data.windows import Joined


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def documents(seed, count=40):
    """Of tokens below 499 behind a first 499."""
    rng = np.random.default_rng(seed)
    return [np.append(499, rng.integers(0, 499, int(rng.integers(0, 60)))) for _ in range(count)]


def folder(path, seed=0, tokenizer=None, **options):
    files = {"tokenizer.json": tokenizer} if tokenizer else None
    write_shards(path, 500, documents(seed), documents(seed + 100, 20), tokenizer=files, **options)
    return str(path)


@settings(deadline=None, max_examples=60)
@given(size=st.integers(1, 700), key=st.text(max_size=5))
def test_a_keyed_order_visits_everything_once(size, key):
    assert sorted(permuted(index, size, key) for index in range(size)) == list(range(size))


def test_keyed_orders_are_as_good_as_shuffled():
    """Of 2400 keys, each permutation of four things comes about equally often; of many things few stay beside each
    other."""
    found = Counter(tuple(permuted(index, 4, str(key)) for index in range(4)) for key in range(2400))
    assert len(found) == 24
    assert sum((count - 100) ** 2 / 100 for count in found.values()) < 49.7  # chi-square, 23 degrees, p = 0.001
    order = [permuted(index, 10**12, "a") for index in range(2000)]
    assert abs(np.mean(order) / 10**12 - 0.5) < 3 / np.sqrt(12 * 2000)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.08


@settings(deadline=None, max_examples=60)
@given(weights=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=5), factor=st.sampled_from([1.0, 0.5, 2.0**20]))
def test_turns_are_counted_without_gaps_and_meet_the_weights(weights, factor):
    shares = shares_of(weights)
    had = [0] * len(weights)
    for index in range(300):
        number, before = turn(index, shares)
        assert before == had[number]
        had[number] += 1
        for other, weight in enumerate(weights):
            assert abs(had[other] - weight / sum(weights) * (index + 1)) <= (other + 1) / 2 + 1e-9
    assert [turn(index, shares_of([w * factor for w in weights])) for index in range(300)] == [
        turn(index, shares) for index in range(300)
    ]


def test_a_mixture_gives_what_each_source_gives_by_itself():
    sources = [TokenWindows([np.arange(300) + 1000 * n], 10, 5000, seed=3, table=False) for n in range(3)]
    mixture = Mixture(sources, [5, 3, 2])
    rows = mixture.batch(range(200))
    for number, share in enumerate([0.5, 0.3, 0.2]):
        own = rows[rows[:, 0] // 1000 == number]
        assert len(own) == 200 * share
        np.testing.assert_array_equal(own, sources[number].batch(range(len(own))))
    np.testing.assert_array_equal(mixture.batch(range(150, 160)), rows[150:160])


def test_windows_by_a_keyed_order_visit_an_epoch_once_and_differ_by_epoch_and_seed():
    lengths = [64, 35, 200]
    starts = np.cumsum([0, *lengths])
    pieces = [np.arange(a, b) for a, b in itertools.pairwise(starts)]
    windows = TokenWindows(pieces, 8, 999, seed=1, table=False)
    epochs = [[windows[epoch * len(windows) + i] for i in range(len(windows))] for epoch in range(6)]
    for seen in epochs:
        inputs = np.concatenate([window[:-1] for window in seen])
        assert len(np.unique(inputs)) == len(inputs) == len(windows) * 8
        for window in seen:
            np.testing.assert_array_equal(np.diff(window), 1)
    firsts = [[window[0] for window in seen] for seen in epochs]
    assert len({tuple(first) for first in firsts}) == 6
    assert len({first[0] % 8 for first in map(sorted, firsts)}) > 2  # cut elsewhere
    assert TokenWindows(pieces, 8, 999, seed=2, table=False)[0][0] != epochs[0][0][0]


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 9), length=st.integers(1, 30), index=st.integers(0, 300))
def test_begins_are_where_documents_begin(seed, length, index):
    lengths = np.random.default_rng(seed).integers(1, 20, 40)
    starts = np.cumsum([0, *lengths])
    number = np.repeat(np.arange(40), lengths)  # of each token's document
    windows = TokenWindows([number], length, 40, starts=[starts], table=bool(seed % 2))
    np.testing.assert_array_equal(windows.begins(index), np.flatnonzero(np.diff(windows[index])) + 1)


def test_a_folder_of_tokens_is_mapped_and_nothing_of_it_read(tmp_path, monkeypatch):
    """As large as a corpus, in files that take no room on the disk."""
    tokens = 2**34
    splits = {"train": [("a.bin", tokens), ("b.bin", tokens)], "held_out": [("c.bin", tokens), ("d.bin", tokens)]}
    for name, size in (entry for split in splits.values() for entry in split):
        with open(tmp_path / name, "wb") as file:
            file.truncate(2 * size)
        (tmp_path / name).with_suffix(".idx").write_bytes(np.array([0, size], dtype="<i8").tobytes())
    listed = {
        split: [{"file": name, "tokens": size, "documents": 1} for name, size in files]
        for split, files in splits.items()
    }
    index = {"version": 1, "dtype": "uint16", "vocab_size": 9, "fingerprint": "of zeros", "splits": listed}
    (tmp_path / "shards.json").write_text(json.dumps(index))
    monkeypatch.setattr(shards, "digest", lambda path: pytest.fail(f"read {path}"))
    tracemalloc.start()
    data = build_data(DataConfig(source=str(tmp_path), context_length=128))
    assert len(data.train) > 2**27
    assert data.train.batch(range(5)).sum() == 0
    assert heldout_windows(data.heldout, 128, 1280).shape == (10, 129)
    assert tracemalloc.get_traced_memory()[1] < 2**23
    tracemalloc.stop()


def test_joined_maps_read_as_one():
    whole = np.arange(100)
    joined = Joined([whole[:30], whole[30:31], whole[31:]])
    assert len(joined) == 100
    for start, stop in [(0, 100), (29, 32), (30, 31), (31, 99), (5, 10), (100, 132), (7, 7)]:
        np.testing.assert_array_equal(joined[start:stop], whole[start:stop])


def test_a_folder_of_tokens_keeps_its_split_and_its_borders(tmp_path):
    source = folder(tmp_path / "a", shard_tokens=200)
    data = build_data(DataConfig(source=source, context_length=16, documents="packed"))
    assert data.vocab_size == 500
    assert len(data.train.shards) > 2
    held = documents(100, 20)
    np.testing.assert_array_equal(data.heldout[:], np.concatenate(held))
    np.testing.assert_array_equal(data.heldout_documents, np.cumsum([0, *map(len, held)]))
    for index in range(2 * len(data.train)):
        np.testing.assert_array_equal(data.train.begins(index), np.flatnonzero(data.train[index][1:] == 499) + 1)


def test_without_a_held_out_split_the_end_is_held_out_with_its_borders(tmp_path):
    write_shards(tmp_path / "a", 500, documents(0))
    config = DataConfig(source=str(tmp_path / "a"), context_length=16, documents="packed", heldout_fraction=0.2)
    data = build_data(config)
    whole = np.concatenate(documents(0))
    cut = len(whole) - len(data.heldout)
    np.testing.assert_array_equal(data.heldout, whole[cut:])
    borders = np.cumsum([0, *map(len, documents(0))])
    np.testing.assert_array_equal(data.heldout_documents, [0, *(borders[borders > cut] - cut)])
    np.testing.assert_array_equal(data.train.starts[0], [*borders[borders < cut], cut])


def test_texts_are_documents(tmp_path):
    for name in "abcdef":
        (tmp_path / f"{name}.txt").write_text(name * 40)
    data = build_data(DataConfig(source=str(tmp_path), context_length=12, documents="packed"))
    for index in range(20):
        np.testing.assert_array_equal(data.train.begins(index), np.flatnonzero(data.train[index][:-1] == 0) + 1)


def test_several_sources_are_mixed_and_held_out_together(tmp_path):
    for name, letter in [("one", "a"), ("two", "b")]:
        (tmp_path / f"{name}.txt").write_text(letter * 4000)
    entries = [WeightedSource(str(tmp_path / "one.txt"), 3), WeightedSource(str(tmp_path / "two.txt"))]
    data = build_data(DataConfig(sources=entries, context_length=16))
    letters = [chr(data.train[index][0]) for index in range(80)]
    assert (letters.count("a"), letters.count("b")) == (60, 20)
    assert decode(data.heldout) == "a" * 199 + "\0" + "b" * 199 + "\0"


def test_what_one_source_holds_out_no_other_trains_on(tmp_path):
    inner = tmp_path / "all" / "inner"
    inner.mkdir(parents=True)
    for number in range(20):
        (inner / f"{number}.txt").write_text(f"{number:03d}" * 40)
        (tmp_path / "all" / f"{number}.txt").write_text(f"{number:03d}." * 30)
    (tmp_path / "elsewhere.txt").write_text("another text " * 20)
    (tmp_path / "link.txt").symlink_to(inner / "7.txt")
    (tmp_path / "linked").mkdir()
    for number in range(20):
        (tmp_path / "linked" / f"{number}.txt").write_text(f"{number:03d}" * 40)
    for number in range(20):
        (tmp_path / "linked" / f"again{number}.txt").symlink_to(tmp_path / "linked" / f"{number}.txt")

    def data(*sources, heldout=None):
        entries = [WeightedSource(str(tmp_path / source)) for source in sources]
        held, share = (None, {"heldout_fraction": 0.3}) if heldout is None else (str(tmp_path / heldout), {})
        return build_data(DataConfig(sources=entries, heldout_source=held, context_length=16, **share))

    for sources, heldout in (
        (("all", "all/inner"), None), (("all",), "all"), (("all",), "all/inner"), (("all/inner",), "all"),
        (("all/inner", "elsewhere.txt"), "link.txt"), (("all/inner/7.txt", "all"), None),
        (("linked",), None),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"data: expected held-out files that no source trains on, got '.*\.txt'"):
            data(*sources, heldout=heldout)
    data("all", heldout="elsewhere.txt")
    data("all/inner", "elsewhere.txt")
    twice = data("all", "all")  # both are cut in the same places
    assert len(twice.heldout) == 2 * len(data("all").heldout)
    assert len(data("elsewhere.txt", "elsewhere.txt").heldout) == 2 * len(data("elsewhere.txt").heldout)
    source = folder(tmp_path / "tokens")
    with pytest.raises(ValueError, match=r"no source trains on, got '.*\.bin'"):
        build_data(DataConfig(source=source, heldout_source=source, context_length=16))


def test_one_changed_token_of_a_folder_is_refused(tmp_path):
    source = folder(tmp_path / "a")
    config = DataConfig(source=source, context_length=16)
    fingerprint = build_data(config).fingerprint
    path = tmp_path / "a" / "train-00000.bin"
    content = path.read_bytes()
    written = path.stat().st_mtime
    os.utime(path, (written, written + 60))  # a copy's times say nothing of what is in it: it is read, once
    assert build_data(config).fingerprint == fingerprint
    path.write_bytes(content[:100] + b"\1\0" + content[102:])
    os.utime(path, (written, written + 120))  # a system's clock may tick more seldom than this test writes
    with pytest.raises(ValueError, match=r"the tokens are not those of which shards\.json holds the fingerprint"):
        build_data(config)
    other = DataConfig(source=folder(tmp_path / "b", seed=1), context_length=16)
    assert build_data(other).fingerprint != fingerprint


def test_sources_of_two_kinds_are_refused(tmp_path):
    (tmp_path / "text.txt").write_text("some text " * 100)
    one, two = folder(tmp_path / "one", tokenizer=b"{}"), folder(tmp_path / "two", tokenizer=b"[]")
    np.save(tmp_path / "bare.npy", np.zeros(500, dtype=np.uint16))

    def mixed(*sources, **options):
        return build_data(DataConfig(sources=[WeightedSource(str(s)) for s in sources], context_length=8, **options))

    with pytest.raises(ValueError, match=r"one kind; '.*text\.txt' is read byte by byte, '.*one' has tokens"):
        mixed(tmp_path / "text.txt", one, vocab_size=500)
    with pytest.raises(ValueError, match="one tokenizer; '.*one' and '.*two' have two"):
        mixed(one, two)
    bare = folder(tmp_path / "first", seed=2)
    with pytest.raises(ValueError, match="one tokenizer; '.*one' and '.*two' have two"):
        mixed(bare, one, two)
    with pytest.raises(ValueError, match=r"documents='packed' needs .*bare\.npy' does not"):
        build_data(DataConfig(source=str(tmp_path / "bare.npy"), vocab_size=5, context_length=8, documents="packed"))
    with pytest.raises(ValueError, match=r"vocab_size=400: '.*one' is of a larger vocabulary and needs 500"):
        mixed(one, vocab_size=400)
    larger = str(tmp_path / "larger")
    write_shards(tmp_path / "larger", 9000, [np.arange(9000)])
    with pytest.raises(ValueError, match=r"held-out split of '.*larger': tokens from 0 to 8999, outside .* of 500"):
        build_data(DataConfig(source=one, heldout_source=larger, context_length=8))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.sources=[{source: a, wieght: 2}]"], r"'data\.sources\[0\]\.wieght'.*did you mean .*weight"),
        (["data.sources=[{weight: 2}]"], "source"),
        (["data.sources=[{source: a, weight: 0}]"], "weight: expected a number above 0, got 0"),
        (["data.sources=[{source: a, weight: .inf}]"], "weight: expected a finite number, got inf"),
        (["data.sources=[{source: ''}]"], "source: expected a file"),
        (["data.sources=[a, b]"], r"data\.sources: expected a list of mappings"),
        (["data.sources={a: 1}"], r"data\.sources: expected a list of mappings"),
        (["data.source=a", "data.sources=[{source: b}]"], "sources: expected none beside source='a'"),
        (["data.documents=pakced"], "did you mean 'packed'"),
    ],
)
def test_sources_that_cannot_be_are_refused_by_name(overrides, message):
    with pytest.raises(ValueError, match=message):
        load_config(None, overrides)


def test_sources_survive_the_file(tmp_path):
    from attnzoo.config import save_config

    config = load_config(None, ["data.sources=[{source: a, weight: 3}, {source: b}]"])
    assert config.data.title == "a (weight 3), b (weight 1)"
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config
