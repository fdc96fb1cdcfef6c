"""What no run can begin from, or go on with, is refused by name."""

import json
import os
import shutil

import pytest
import tiny_runs
from tiny_runs import StoppedError, stop_at, write_text

from attnzoo.config import TrainConfig
from attnzoo.experiments.builtin import find_config
from attnzoo.training import CheckpointError, extend, load_run, newest_checkpoint, read_metrics, train


@pytest.fixture
def config_of(tmp_path):
    write_text(tmp_path)

    def make(*overrides, run="run") -> TrainConfig:
        return tiny_runs.config_of(tmp_path, run, "optimizer.lr=1e-3", *overrides)

    return make


def test_an_unknown_option_of_the_pruning_is_refused(config_of):
    with pytest.raises(ValueError, match=r"option 'epz' of acp.*did you mean 'eps'"):
        train(config_of("model.attention_options={acp: {epz: 1e-3}}"))


@pytest.mark.parametrize("eps", ["x", "[0.1]", "2", "~"])
def test_an_option_of_the_pruning_that_is_no_number_is_refused_by_name(config_of, eps):
    with pytest.raises(ValueError, match=r"eps: expected a float in \(0, 1\), got"):
        train(config_of(f"model.attention_options={{acp: {{eps: {eps}}}}}"))


def test_another_configuration_is_not_mixed_into_a_run(config_of):
    run_dir = train(config_of())
    message = r"model\.hidden_size was 16 and is 32 now; optimizer\.lr was 0\.001 and is 0\.01 now"
    with pytest.raises(CheckpointError, match=message):
        train(config_of("model.hidden_size=32", "optimizer.lr=0.01"))
    train(config_of("log_every=5", "keep_checkpoints=1", "gradient_accumulation=2"))  # these may change
    assert load_run(run_dir)[1].log_every == 5


def test_rows_of_a_run_without_a_checkpoint_outlast_another_configuration(config_of, caplog):
    run = train(config_of())
    for again, kept in (("seed=0", False), ("seed=7", True)):
        rows = (run / "metrics.jsonl").read_bytes()
        shutil.rmtree(run / "checkpoints")
        train(config_of(again))
        aside = run / "without-checkpoint-metrics.jsonl"
        assert aside.exists() == kept
    assert aside.read_bytes() == rows
    assert "had other settings and no checkpoint; its rows are in without-checkpoint-metrics.jsonl" in caplog.text
    assert read_metrics(run)[0]["loss"] != json.loads(rows.splitlines()[0])["loss"]


def test_a_command_that_a_refusal_names_is_quoted_as_a_shell_reads_it(config_of):
    run_dir = train(config_of(run="a run"))
    with pytest.raises(CheckpointError, match=f"`attnzoo extend '{run_dir}' --steps 12 "):
        train(config_of("steps=12", run="a run"))
    with pytest.raises(FileNotFoundError, match=f"`attnzoo train '{run_dir}/config.yaml'` goes on"):
        find_config(str(run_dir), "train")
    with pytest.raises(FileNotFoundError, match=f"'data.source={run_dir}/checkpoints' trains on it"):
        find_config(str(run_dir / "checkpoints"), "train")


def test_a_checkpoint_is_not_taken_for_a_run(config_of):
    run_dir = train(config_of())
    checkpoint = newest_checkpoint(run_dir)
    for use in (load_run, lambda folder: extend(folder, 12, "constant", lr=0.01)):
        with pytest.raises(
            FileNotFoundError, match=f"is one checkpoint of a run: expected the run's folder, '{run_dir}'"
        ):
            use(checkpoint)


def test_other_data_is_not_mixed_into_a_run(config_of, tmp_path):
    source = tmp_path / "own.txt"
    source.write_text("first text " * 200)
    config = config_of(f"data.source={source}")
    train(config)
    source.write_text("other text " * 200)
    with pytest.raises(CheckpointError, match="trained on other data"):
        train(config)


def test_a_folder_in_use_is_refused(config_of):
    config = config_of()

    def train_again(row):
        train(config)

    with pytest.raises(CheckpointError, match="another process is training"):
        train(config, on_row=train_again)


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (["data.source=nowhere.txt"], FileNotFoundError, "no data.*nowhere.txt"),
        (["data.context_length=100000"], ValueError, "data.context_length=100000 needs at least 100001"),
        (["model.vocab_size=100"], ValueError, "vocab_size=100 is below the 256 tokens"),
        (["batch_size=5", "gradient_accumulation=2"], ValueError, "batch_size=5 does not divide evenly"),
        (["model.attention=foxx"], ValueError, "did you mean 'fox'"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(config_of, overrides, error, message):
    config = config_of(*overrides)
    with pytest.raises(error, match=message):
        train(config)
    assert not os.path.exists(config.output_dir)


def test_what_is_no_run_is_refused(tmp_path, config_of):
    with pytest.raises(FileNotFoundError, match=r"no config\.yaml"):
        load_run(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no metrics\.jsonl"):
        read_metrics(tmp_path)
    config = config_of("checkpoint_every=0")
    with pytest.raises(StoppedError):
        train(config, on_row=stop_at(2))
    with pytest.raises(FileNotFoundError, match="no checkpoint yet"):
        load_run(config.output_dir)


def test_a_foreign_checkpoint_is_refused(config_of):
    run_dir = train(config_of("keep_checkpoints=1"))
    progress = newest_checkpoint(run_dir) / "progress.json"
    progress.write_text(json.dumps({"stage": 3}))
    with pytest.raises(CheckpointError, match="not a checkpoint of this version"):
        train(config_of("keep_checkpoints=1"))
