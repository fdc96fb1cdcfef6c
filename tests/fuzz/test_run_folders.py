"""Run folders with random damage: the same result as without it, or a refusal that names the folder."""

import logging
import shutil

import numpy as np
import pytest
import torch
from damages import damage_folder
from rule import answer

from attnzoo.config import load_config
from attnzoo.experiments.compare import result_of
from attnzoo.training import load_run, newest_checkpoint, read_metrics, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a run of eight steps, `whole`, and the same run as a kill after step 6 leaves it, `killed`."""
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "text.txt").write_text("".join(f"{number} and one is {number + 1}.\n" for number in range(300)))
    torch.set_num_threads(1)
    train(config_of(folder, "whole"))
    shutil.copytree(folder / "whole", folder / "killed")
    shutil.rmtree(folder / "killed" / "checkpoints" / "step-00000008")
    return folder


def config_of(folder, run):
    small = [
        f"output_dir={folder / run}",
        f"data.source={folder / 'text.txt'}",
        "data.context_length=16",
        "model={hidden_size: 16, intermediate_size: 16, num_layers: 1, num_heads: 2}",
        "optimizer={warmup_steps: 2, lr: 0.01}",
        "steps=8",
        "batch_size=2",
        "log_every=1",
        "eval_every=4",
        "eval_tokens=64",
        "checkpoint_every=2",
        "keep_checkpoints=3",
        "progress=quiet",
        "device=cpu",
        "tensorboard=false",
    ]
    return load_config(None, small)


def rows_of(run_dir):
    return [(row["kind"], row["step"], row["loss"]) for row in read_metrics(run_dir)]


def weights_of(run_dir):
    return (newest_checkpoint(run_dir) / "model.safetensors").read_bytes()


def test_a_damaged_run_goes_on_to_the_same_bits_or_is_refused(fuzz, folder, tmp_path, caplog):
    expected_rows, expected_weights = rows_of(folder / "whole"), weights_of(folder / "whole")
    refused = 0
    for rng in fuzz(12):
        run = tmp_path / f"run{fuzz.seed}"
        shutil.copytree(folder / rng.choice(["killed", "whole"]), run)
        story = damage_folder(run, rng)
        config = config_of(folder, "whole")
        config.output_dir = str(run)
        caplog.clear()
        if answer(lambda config=config: train(config), [str(run)], story) is None:
            refused += 1
            continue
        assert weights_of(run) == expected_weights, story
        lost = set(expected_rows) - set(rows_of(run) if (run / "metrics.jsonl").is_file() else [])
        said = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert not lost or said, story
        load_run(run)
        shutil.rmtree(run)
    assert refused < fuzz.done / 2 or fuzz.done == 1


def test_a_damaged_run_is_reported_as_it_was_or_is_refused(fuzz, folder, tmp_path, caplog):
    expected = {}
    shutil.copytree(folder / "whole", tmp_path / "copy")
    for newest in sorted((tmp_path / "copy" / "checkpoints").iterdir(), reverse=True):
        result = result_of(tmp_path / "copy")
        expected[result.facts.checkpoint] = result
        shutil.rmtree(newest)
    assert [result.facts.steps for result in expected.values()] == [8, 6, 4]
    for name in ("killed", "whole"):
        result_of(folder / name)
    for rng in fuzz(12):
        run = tmp_path / f"run{fuzz.seed}"
        shutil.copytree(folder / rng.choice(["killed", "whole"]), run)
        story = damage_folder(run, rng)
        caplog.clear()
        result = answer(lambda run=run: result_of(run), [str(run)], story)
        if result is None:
            continue
        said = [record for record in caplog.records if record.levelno >= logging.WARNING]
        same = expected[result.facts.checkpoint]
        np.testing.assert_array_equal(result.losses, same.losses, err_msg=story)
        assert (result.facts.steps, result.facts.tokens) == (same.facts.steps, same.facts.tokens), story
        assert said or np.array_equal(result.curve, same.curve), story
        shutil.rmtree(run)
