"""No file of a user's is lost in the folder of a run, whatever its name."""

from __future__ import annotations

import pytest
from tiny_runs import StoppedError, config_of, outcome, said, stop_at, write_text

from attnzoo.config import load_config, to_yaml
from attnzoo.training import check_run, train

STEPS = ("steps=2", "eval_every=2", "checkpoint_every=2", "optimizer.warmup_steps=1")


@pytest.fixture
def run(tmp_path):
    write_text(tmp_path)
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.mark.parametrize("content", ["defaults:\n  - model: large\n", "steps: [\n", "", "steps: many\n"])
def test_a_config_yaml_of_another_program_is_refused_and_left(content, run):
    (run / "config.yaml").write_text(content)
    for start in (train, lambda config: check_run(config, None)):
        with pytest.raises(FileExistsError, match=r"output_dir: expected no '.*run/config\.yaml'.*rename it"):
            start(config_of(run.parent, "run", *STEPS))
    assert [path.name for path in run.iterdir()] == ["config.yaml"]
    assert (run / "config.yaml").read_text() == content


def test_a_recipe_in_its_own_output_folder_is_kept_word_for_word(run, caplog):
    recipe = f"# what we try today\noutput_dir: {run}\n{to_yaml(config_of(run.parent, 'run', *STEPS))}"
    recipe = recipe.replace(f"\noutput_dir: {run}\n", "\n", 1)
    (run / "config.yaml").write_text(recipe)
    config = load_config(run / "config.yaml")
    train(config)
    assert (run / "earlier-config.yaml").read_text() == recipe
    assert any("kept as earlier-config.yaml" in line for line in said(caplog))
    assert load_config(run / "config.yaml") == config
    caplog.clear()
    train(load_config(run / "config.yaml"))  # goes on, and keeps no more
    assert sorted(path.name for path in run.glob("*config*")) == ["config.yaml", "earlier-config.yaml"]


def test_words_added_to_the_configuration_of_a_run_are_kept(run):
    with pytest.raises(StoppedError):
        train(config_of(run.parent, "run", "steps=4"), on_row=stop_at(3))
    written = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(f"# the good one\n{written}")
    train(config_of(run.parent, "run", "steps=4"))
    assert (run / "config.yaml").read_text() == written
    assert (run / "earlier-config.yaml").read_text() == f"# the good one\n{written}"
    train(config_of(run.parent, "plain", "steps=4"))
    assert outcome(run) == outcome(run.parent / "plain")


def test_what_another_run_without_a_checkpoint_left_is_kept_together(run):
    with pytest.raises(StoppedError):
        train(config_of(run.parent, "run", *STEPS, "seed=1"), on_row=stop_at(1))
    before = {name: (run / name).read_bytes() for name in ("config.yaml", "metrics.jsonl")}
    train(config_of(run.parent, "run", *STEPS, "seed=2"))
    assert (run / "earlier-config.yaml").read_bytes() == before["config.yaml"]
    assert (run / "without-checkpoint-metrics.jsonl").read_bytes() == before["metrics.jsonl"]


def test_rows_without_a_configuration_are_kept(run):
    train(config_of(run.parent, "other", *STEPS))
    rows = (run.parent / "other/metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(rows)
    train(config_of(run.parent, "run", *STEPS))
    assert (run / "without-checkpoint-metrics.jsonl").read_bytes() == rows
