"""What a report says of a run belongs to the checkpoint that the run has now, and to one held-out text."""

import errno
import json
import os
import shutil

import numpy as np
import pytest
from tiny_runs import StoppedError, said, stop_at, write_text
from tiny_runs import config_of as any_config_of

from attnzoo.data import build_data
from attnzoo.experiments.compare import EvaluateConfig, PlannedRun, measure, result_of
from attnzoo.experiments.report import render, results, save_result, write_report
from attnzoo.training import CheckpointError, newest_checkpoint, read_metrics, train
from attnzoo.training.folder import load_run


def config_of(folder, run, *overrides):
    return any_config_of(folder, run, "checkpoint_every=4", "eval_every=0", *overrides)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A folder with a run that has logged step 7 and whose newest checkpoint is of step 4."""
    folder = tmp_path_factory.mktemp("report")
    write_text(folder)
    with pytest.raises(StoppedError):
        train(config_of(folder, "run"), on_row=stop_at(7))
    return folder


@pytest.fixture
def folder(stopped, tmp_path):
    shutil.copytree(stopped, tmp_path / "copy")
    return tmp_path / "copy"


def test_a_run_that_has_gone_on_is_measured_again(folder):
    before = result_of(folder / "run")
    assert result_of(folder / "run").facts == before.facts
    config = config_of(folder, "run", f"data.source={folder / 'text.txt'}")
    config.data.source = load_run(folder / "run")[1].data.source
    train(config)
    after = result_of(folder / "run")
    assert (before.facts.steps, after.facts.steps) == (4, 8)
    assert (after.losses != before.losses).any()
    assert after.facts.checkpoint.startswith("step-00000008 ")


def test_steps_tokens_and_curve_are_those_of_the_checkpoint(folder):
    assert read_metrics(folder / "run")[-1]["step"] == 7
    result = result_of(folder / "run")
    assert (result.facts.steps, result.facts.tokens) == (4, 4 * 2 * 16)
    assert result.curve[0].tolist() == [step * 2 * 16 for step in (1, 2, 3, 4)]
    seconds = [row["seconds"] for row in read_metrics(folder / "run") if row["step"] == 4]
    assert result.facts.seconds == seconds[0]


def test_a_run_stopped_before_its_first_row_is_reported(folder):
    (folder / "run" / "metrics.jsonl").write_text("")
    result = result_of(folder / "run")
    assert result.facts.steps == 4
    assert result.facts.tokens_per_second > 0
    render([result])


def test_measuring_again_keeps_the_name_and_the_way_of_measuring(folder):
    run_dir = folder / "run"
    config, evaluate = load_run(run_dir)[1], EvaluateConfig(length_factor=2, tokens=128)
    config.output_dir = str(run_dir)
    result = measure(PlannedRun("run", "my label", "nope", config), evaluate, build_data(config.data), "the command")
    save_result(result, run_dir)
    saved = result_of(run_dir)
    assert saved.length == 32
    shutil.move(newest_checkpoint(run_dir), run_dir / "checkpoints" / "step-00000003")
    progress = run_dir / "checkpoints" / "step-00000003" / "progress.json"
    progress.write_text(progress.read_text().replace('"step": 4', '"step": 3'))
    (run_dir / "checkpoints" / "step-00000003" / "digests.json").unlink()
    again = result_of(run_dir)
    assert again.facts.checkpoint != saved.facts.checkpoint
    assert (again.facts.label, again.facts.command, again.losses.shape) == ("my label", "the command", (4, 32))


def test_an_unreadable_evaluation_is_measured_again_with_a_word(folder, caplog):
    first = result_of(folder / "run")
    path = folder / "run" / "evaluation.json"
    path.write_text(path.read_text()[:-40])
    again = result_of(folder / "run")
    assert again.facts.checkpoint == first.facts.checkpoint
    assert "it is measured again" in caplog.records[-1].getMessage()
    shutil.rmtree(folder / "run" / "checkpoints")
    assert result_of(folder / "run").facts == again.facts  # all that is left of the run
    path.write_text("{")
    with pytest.raises(ValueError, match="not readable"):
        result_of(folder / "run")


def test_a_run_whose_text_has_changed_since_is_not_measured_on_it(folder):
    run_dir = folder / "run"
    source = folder / "own.txt"
    source.write_text("a text of its own. " * 300)
    train(config_of(folder, "own", f"data.source={source}", "steps=3"))
    source.write_text("something else now " * 300)
    with pytest.raises(CheckpointError, match="trained on other data"):
        result_of(folder / "own")
    assert run_dir.is_dir()


def test_runs_with_different_heldout_text_are_not_compared(folder):
    source = folder / "own.txt"
    source.write_text((folder / "text.txt").read_text()[::-1])
    train(config_of(folder, "own", f"data.source={source}"))
    one, other = result_of(folder / "run"), result_of(folder / "own")
    assert one.losses.shape == other.losses.shape
    with pytest.raises(ValueError, match="same held-out text"):
        render([one, other])
    assert json.loads((folder / "own" / "evaluation.json").read_text())["facts"]["heldout"] == other.facts.heldout


def test_parts_of_the_layers_and_what_a_token_is_are_said(folder):
    config = config_of(folder, "parts", "steps=3", "model.vocab_size=300", "model.attention=fox")
    config.model.attention_options = {"window": 4, "sinks": True, "num_kv_heads": 1, "forgetting": {}}
    train(config)
    facts = result_of(folder / "parts").facts
    assert {"window", "sinks", "grouped heads", "forget network"} <= {*facts.parts}
    assert facts.unit == "byte"
    assert not {"window", "sinks", "grouped heads", "forget network"} & {*result_of(folder / "run").facts.parts}


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_run_on_a_medium_that_cannot_be_written_to_is_reported(number, tmp_path, monkeypatch, caplog):
    """A report of it is for another place."""
    write_text(tmp_path)
    run = train(config_of(tmp_path, "run"))

    def refuse(path, content):
        raise OSError(number, os.strerror(number), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(results, "write_whole", refuse)
        found = result_of(run)
    (line,) = said(caplog)
    assert line == f"{run} cannot be written to: what was measured of the run is not kept there"
    write_report([found], tmp_path / "elsewhere" / "report.html")
    again = result_of(run)
    assert again.facts == found.facts
    np.testing.assert_allclose(again.losses, found.losses, rtol=1e-6)
