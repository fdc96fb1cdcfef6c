"""Random configurations: one that can be written and read back, or a refusal that names the key or the file."""

import dataclasses
import math
import shutil
from pathlib import Path

import numpy as np
from damages import damage, damage_folder
from rule import answer

import attnzoo.experiments
from attnzoo.config import DataConfig, TrainConfig, load_config, save_config
from attnzoo.data import build_data
from attnzoo.data.shards import write_shards
from attnzoo.experiments.compare import CompareConfig, plan

CONFIGS = sorted((Path(attnzoo.experiments.__file__).parent / "configs").glob("*/*.yaml"))
VALUES = [
    *("-1", "0", "1", "3", "1.5", "1e400", "-1e400", ".inf", "-.inf", ".nan", "9" * 30, "0x10", "1e-320", "true", "no"),
    *(
        "~",
        "null",
        "''",
        "' '",
        "???",
        "'???'",
        "*",
        "*.py",
        "&a",
        "!x",
        "%",
        "@",
        "`",
        "|",
        ">",
        "${a}",
        "${oc.env:NO}",
    ),
    *(
        "[]",
        "[1]",
        "{}",
        "{a: 1}",
        "[[]]",
        "{name: fox}",
        "[fox, gla]",
        "fox",
        "{",
        "]",
        "'",
        '"',
        "..",
        "/",
        "\\0",
        "é",
    ),
    *("bf16", "fp16", "none", "cpu", "auto", "uint16", "stdlib", "2020-01-01", "1:30", "<<", "=", "a=b", "a: b", "- a"),
]


def keys_of(schema, prefix=""):
    for field in dataclasses.fields(schema):
        value = getattr(schema, field.name)
        yield prefix + field.name
        if dataclasses.is_dataclass(value):
            yield from keys_of(value, f"{prefix}{field.name}.")


KEYS = list(keys_of(TrainConfig()))
RIGHT = ["steps=500", "seed=3", "device=cpu", "model.num_layers=2", "data.vocab_size=300", "optimizer.clip_norm=.inf"]


def numbers_of(config):
    for value in dataclasses.asdict(config).values():
        if isinstance(value, dict):
            yield from (x for x in value.values() if isinstance(x, float))
        elif isinstance(value, float):
            yield value


def test_random_overrides_make_a_configuration_or_are_refused_by_name(fuzz, tmp_path):
    accepted = 0
    for rng in fuzz(48):
        overrides = []
        for _ in range(rng.choice([1, 1, 2, 3])):
            key = rng.choice(KEYS)
            if rng.random() < 0.1:
                key = key[:-1] + rng.choice(["", "_", ".", ".x", "[0]", " "])
            overrides.append(rng.choice(RIGHT) if rng.random() < 0.5 else f"{key}={rng.choice(VALUES)}")
        names = [part for override in overrides for part in override.partition("=")[0].replace("[", ".").split(".")]
        config = answer(lambda overrides=overrides: load_config(None, overrides), filter(None, names), overrides)
        if config is None:
            continue
        accepted += 1
        assert not any(map(math.isnan, numbers_of(config))), overrides
        save_config(config, tmp_path / "c.yaml")
        assert load_config(tmp_path / "c.yaml") == config, overrides
    assert accepted > fuzz.done // 8 or fuzz.done == 1


def test_files_with_random_damage_make_a_configuration_or_are_refused_by_name(fuzz, tmp_path):
    names = [*(key.rpartition(".")[2] for key in KEYS), "c.yaml", *(f.name for f in dataclasses.fields(CompareConfig))]
    for rng in fuzz(30):
        source = rng.choice(CONFIGS)
        path = tmp_path / "c.yaml"
        path.write_bytes(source.read_bytes())
        story = f"{source.name}: {damage(path, rng)}"
        schema = CompareConfig if source.parent.name == "compare" else TrainConfig
        answer(lambda path=path, schema=schema: load_config(path, [], schema), names, story)
        if path.is_dir():
            path.rmdir()


def test_runs_of_random_labels_stay_inside_their_folder_or_are_refused(fuzz):
    characters = "a1./\\ -_=\"'$<>&\0\n~é*"
    for rng in fuzz(30):
        for _ in range(10):
            labels = ["".join(rng.choices(characters, k=rng.randrange(6))) for _ in range(2)]
            config = CompareConfig(variants=[{"name": "nope", "label": label} for label in labels], output_dir="out")
            runs = answer(lambda config=config: plan(config), ["variants: "], labels)
            if runs is None:
                continue
            folders = [Path(run.config.output_dir) for run in runs]
            assert len(set(folders)) == 2
            for folder in folders:
                assert folder.resolve().parent == Path("out").resolve(), labels
                assert folder.name != "report.html"


def test_token_files_with_random_damage_are_read_rightly_or_refused_by_name(fuzz, tmp_path):
    tokens = (np.arange(600) % 251).astype(np.uint16)
    for rng in fuzz(48):
        folder = tmp_path / "data"
        folder.mkdir()
        name = rng.choice(["tokens.npy", "tokens.bin"])
        np.save(folder / name, tokens) if name.endswith("npy") else tokens.tofile(folder / name)
        story = damage(folder / name, rng)
        source = rng.choice([folder, folder / name])
        config = DataConfig(source=str(source), context_length=8, vocab_size=251)

        def read(config=config):
            data = build_data(config)
            return [data.train[index] for index in range(len(data.train))], data

        found = answer(read, [str(source)], story)
        if found is not None:
            windows, data = found
            assert all(window.min() >= 0 and window.max() < 251 for window in windows), story
            assert data.heldout.max() < 251, story
        shutil.rmtree(folder)


def test_folders_of_tokens_with_random_damage_are_read_rightly_or_refused_by_name(fuzz, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    numbers = np.random.default_rng(0)
    documents = [np.append(250, numbers.integers(0, 250, int(numbers.integers(0, 30)))) for _ in range(60)]
    whole = write_shards(tmp_path / "whole", 251, documents[:40], documents[40:], shard_tokens=200)
    right = {int(token) for shard in (*whole.train, *whole.held_out) for token in shard.tokens}
    for rng in fuzz(48):
        folder = tmp_path / "data"
        shutil.copytree(tmp_path / "whole", folder)
        story = damage_folder(folder, rng)
        documents_are = rng.choice(["joined", "packed"])
        config = DataConfig(source=str(folder), context_length=8, documents=documents_are)

        def read(config=config):
            data = build_data(config)
            windows = [(data.train[index], index) for index in range(len(data.train))]
            if config.documents == "packed":
                for window, index in windows:
                    np.testing.assert_array_equal(data.train.begins(index), np.flatnonzero(window[1:] == 250) + 1)
            return [window for window, _ in windows], data

        found = answer(read, [str(folder)], story)
        if found is not None:
            windows, data = found
            assert {int(token) for window in windows for token in window} <= right, story
            assert data.heldout[:].max() < 251, story
        shutil.rmtree(folder)
