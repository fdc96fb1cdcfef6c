"""A run folder whose files were damaged since they were written: it is said, and nothing wrong is trained on."""

import json
import re
import shutil

import pytest
import torch
from tiny_runs import config_of, numbers, said, weights, write_text

from attnzoo.experiments.compare import result_of
from attnzoo.training import CheckpointError, load_run, newest_checkpoint, train
from attnzoo.training import checkpoint as checkpoint_module

LAST, BEFORE = "step-00000008", "step-00000006"
FILES = ["model.safetensors", "optimizer.bin", "random_states_0.pkl", "progress.json", "config.yaml", "digests.json"]
DAMAGE = [
    *((name, "flipped") for name in FILES),
    ("model.safetensors", "cut"),
    ("optimizer.bin", "emptied"),
    ("random_states_0.pkl", "removed"),
    ("config.yaml", "removed"),
    ("progress.json", "cut"),
    ("progress.json", "nested"),
    ("digests.json", "nested"),
]


def flip(path, at=0.6, bit=4):
    content = bytearray(path.read_bytes())
    content[int(len(content) * at)] ^= 1 << bit
    path.write_bytes(content)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with a finished run, `reference`, that keeps the checkpoints of steps 6 and 8."""
    folder = tmp_path_factory.mktemp("damage")
    write_text(folder)
    train(config_of(folder, "reference"))
    return folder


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it to damage: its configuration, and its folder."""
    shutil.copytree(finished / "reference", tmp_path / "run")
    config = config_of(finished, "reference")
    config.output_dir = str(tmp_path / "run")
    return config, tmp_path / "run"


@pytest.mark.parametrize(("name", "kind"), DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_goes_on(finished, run, caplog, name, kind):
    config, run_dir = run
    path = run_dir / "checkpoints" / LAST / name
    if kind == "flipped":
        flip(path)
    elif kind == "cut":
        path.write_bytes(path.read_bytes()[:-20])
    elif kind == "emptied":
        path.write_bytes(b"")
    elif kind == "nested":
        path.write_bytes(b"[" * 200_000)
    else:
        path.unlink()
    seen = []
    train(config, on_row=seen.append)
    assert seen[0]["step"] == 7
    (line,) = said(caplog)
    assert re.search(rf"{LAST}.*{BEFORE}$", line)
    assert name in line or name == "digests.json"
    assert weights(run_dir) == weights(finished / "reference")
    assert numbers(run_dir) == numbers(finished / "reference")
    assert (run_dir / "checkpoints" / f"damaged-{LAST}").is_dir()  # nothing is thrown away


def test_without_a_whole_checkpoint_the_run_is_refused_and_stays_as_it_is(run):
    config, run_dir = run
    flip(run_dir / "checkpoints" / LAST / "model.safetensors")
    (run_dir / "checkpoints" / BEFORE / "optimizer.bin").write_bytes(b"")
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    for broken in (lambda: train(config), lambda: checkpoint_module.usable_checkpoint(run_dir)):
        with pytest.raises(CheckpointError, match=rf"{LAST}/model.*damaged.*{BEFORE}/optimizer.bin has 0 bytes"):
            broken()
    assert {path: path.stat().st_mtime_ns for path in before if path.name != ".lock"} == {
        path: stamp for path, stamp in before.items() if path.name != ".lock"
    }


def test_a_model_is_loaded_from_the_checkpoint_before_a_damaged_one(run, caplog):
    _, run_dir = run
    flip(run_dir / "checkpoints" / LAST / "optimizer.bin")
    assert len(load_run(run_dir)[0].blocks) == 1
    assert said(caplog) == []  # the weights are whole
    flip(run_dir / "checkpoints" / LAST / "model.safetensors")
    load_run(run_dir)
    (line,) = said(caplog)
    assert f"{LAST}/model.safetensors is damaged" in line


def test_a_checkpoint_under_the_name_of_another_step_is_not_gone_on_from(finished, run, caplog):
    config, run_dir = run
    shutil.rmtree(run_dir / "checkpoints" / LAST)
    shutil.copytree(run_dir / "checkpoints" / BEFORE, run_dir / "checkpoints" / "step-00000007")
    train(config)
    (line,) = said(caplog)
    assert re.search(r"progress.json is of step 6, and its folder is step-00000007.*using .*step-00000006", line)
    assert numbers(run_dir) == numbers(finished / "reference")


@pytest.mark.parametrize("name", ["progress.json", "config.yaml"])
def test_a_model_is_not_loaded_with_facts_that_are_damaged(run, caplog, name):
    _, run_dir = run
    path = run_dir / "checkpoints" / LAST / name
    path.write_text(path.read_text().replace("0", "1", 1))
    load_run(run_dir)
    (line,) = said(caplog)
    assert f"{LAST}/{name} is damaged" in line
    assert line.endswith(BEFORE)


def test_a_configuration_that_is_not_the_checkpoints_is_refused_by_field(run):
    config, run_dir = run
    path = run_dir / "config.yaml"
    path.write_text(path.read_text().replace("norm_eps: 1.0e-06", "norm_eps: 1.0e-01"))
    message = rf"config.yaml is not what {LAST} was trained with: model.norm_eps was 1e-06 and is 0.1 now"
    with pytest.raises(CheckpointError, match=message):
        load_run(run_dir)
    with pytest.raises(CheckpointError, match=message):
        result_of(run_dir)
    path.write_text(path.read_text().replace("1.0e-01", "1.0e-06").replace("log_every: 1", "log_every: 3"))
    load_run(run_dir)  # a field that is free to change


def test_a_checkpoint_of_another_run_is_refused_by_field(finished, run):
    config, run_dir = run
    other = config_of(finished, "other", "seed=5", f"output_dir={run_dir.parent / 'other'}")
    train(other)
    shutil.rmtree(run_dir / "checkpoints" / LAST)
    shutil.copytree(run_dir.parent / "other" / "checkpoints" / LAST, run_dir / "checkpoints" / LAST)
    with pytest.raises(CheckpointError, match=rf"is not what {LAST} was trained with: seed was 5 and is 0 now"):
        train(config)


def without_digests(run_dir):
    for name in ("digests.json", "config.yaml"):
        for path in (run_dir / "checkpoints").glob(f"*/{name}"):
            path.unlink()


def test_a_checkpoint_of_a_version_without_digests_goes_on_with_a_word(finished, run, caplog):
    config, run_dir = run
    without_digests(run_dir)
    shutil.rmtree(run_dir / "checkpoints" / LAST)
    train(config)
    (line,) = said(caplog)
    assert "wrote no digests" in line
    assert "no configuration: whether it was trained with that of the run is not known" in line
    assert "random" not in line
    assert weights(run_dir) == weights(finished / "reference")


def test_a_checkpoint_without_random_states_goes_on_with_a_word(finished, run, caplog):
    config, run_dir = run
    without_digests(run_dir)
    (newest_checkpoint(run_dir) / "random_states_0.pkl").unlink()
    train(config)
    (line,) = said(caplog)
    assert line.endswith("; no random states: random numbers are drawn anew")


@pytest.mark.parametrize("content", [b"", b"no archive", None])
def test_a_damaged_optimizer_is_an_error_of_its_own_without_digests_too(run, content):
    config, run_dir = run
    config.keep_checkpoints = 1
    without_digests(run_dir)
    shutil.rmtree(run_dir / "checkpoints" / LAST)
    path = run_dir / "checkpoints" / BEFORE / "optimizer.bin"
    path.write_bytes(path.read_bytes()[:-2000] if content is None else content)
    with pytest.raises(CheckpointError, match=f"{BEFORE}(/optimizer.bin is empty| cannot be read: .*)"):
        train(config)


def test_the_optimizer_of_a_larger_model_is_refused_without_digests_too(run):
    config, run_dir = run
    without_digests(run_dir)
    path = run_dir / "checkpoints" / LAST / "optimizer.bin"
    found = torch.load(path, weights_only=True)
    found["state"][0]["exp_avg"] = torch.zeros(99, 16)
    torch.save(found, path)
    with pytest.raises(
        CheckpointError, match=rf"{LAST} cannot be read: .*exp_avg: expected \[\d+, 16\], got \[99, 16\]"
    ):
        train(config)


def test_a_copy_that_someone_put_beside_the_checkpoints_is_left_alone(run):
    config, run_dir = run
    folder = run_dir / "checkpoints"
    for name in ("step-00000006 (copy)", "step-99-before-the-change"):
        shutil.copytree(folder / BEFORE, folder / name)
    (folder / "step-00000099").write_text("a file")
    train(config)
    assert newest_checkpoint(run_dir).name == LAST
    assert len(list(folder.iterdir())) == 5


def test_digests_cover_all_that_a_checkpoint_holds(run):
    folder = newest_checkpoint(run[1])
    assert set(json.loads((folder / "digests.json").read_text())) == {
        path.name for path in folder.iterdir() if path.name != "digests.json"
    }


@pytest.mark.parametrize("garbage", [b"\0\0\xff", b"[1, 2]", b"[" * 200_000, b'{"kind": "eval", "step": "4"}'])
def test_a_line_that_is_no_row_costs_no_other_row_and_is_said(finished, run, caplog, garbage):
    config, run_dir = run
    path = run_dir / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 10
    path.write_bytes(b"".join([*lines[:2], garbage + b"\n", *lines[3:]]))
    spoiled = path.read_bytes()
    expected = numbers(finished / "reference")
    del expected[2]
    assert numbers(run_dir) == expected
    assert "line 3 is no row and left out" in said(caplog)[-1]
    shutil.rmtree(run_dir / "checkpoints" / LAST)
    caplog.clear()
    train(config)
    assert "line 3 is no row and left out; the file as it was is kept as damaged-metrics.jsonl" in said(caplog)[0]
    assert (run_dir / "damaged-metrics.jsonl").read_bytes() == spoiled
    caplog.clear()
    assert numbers(run_dir) == expected
    assert said(caplog) == []


def test_missing_metrics_are_said(run, caplog):
    config, run_dir = run
    shutil.rmtree(run_dir / "checkpoints" / LAST)
    (run_dir / "metrics.jsonl").unlink()
    train(config)
    assert "metrics.jsonl is missing: its rows begin anew after step 6" in said(caplog)[0]


@pytest.mark.parametrize("change", ["a number", "the end"])
def test_rows_that_changed_since_their_checkpoint_are_said(run, caplog, change):
    config, run_dir = run
    path = run_dir / "metrics.jsonl"
    text = path.read_text()
    first, rest = text.split("\n", 1)
    path.write_text(first.replace('"tokens": 32', '"tokens": 33') + "\n" + rest if change == "a number" else first)
    assert path.read_text() != text
    shutil.rmtree(run_dir / "checkpoints" / LAST)
    train(config)
    (line,) = said(caplog)
    assert "rows are missing or not as they were written; the file as it was is kept as damaged-metrics.jsonl" in line
    caplog.clear()
    train(config)
    assert said(caplog) == []
