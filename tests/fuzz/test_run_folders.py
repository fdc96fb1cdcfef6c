"""Run folders with random damage: the same result as without it, or a refusal that names the folder."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from damages import damage_folder
from rule import answer
from tiny_runs import config_of, said, weights, write_text

from attnzoo.experiments.compare import result_of
from attnzoo.training import load_run, read_metrics, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a run of eight steps, `whole`, and the same run as a kill after step 6 leaves it, `killed`."""
    folder = tmp_path_factory.mktemp("fuzz")
    write_text(folder)
    train(config_of(folder, "whole", "keep_checkpoints=3"))
    shutil.copytree(folder / "whole", folder / "killed")
    shutil.rmtree(folder / "killed" / "checkpoints" / "step-00000008")
    return folder


def rows_of(run_dir):
    return [(row["kind"], row["step"], row["loss"]) for row in read_metrics(run_dir)]


def test_a_damaged_run_goes_on_to_the_same_bits_or_is_refused(fuzz, folder, tmp_path, caplog):
    expected_rows, expected_weights = rows_of(folder / "whole"), weights(folder / "whole")
    refused = 0
    for rng in fuzz(6):
        run = tmp_path / f"run{fuzz.seed}"
        shutil.copytree(folder / rng.choice(["killed", "whole"]), run)
        story = damage_folder(run, rng)
        config = config_of(folder, "whole", "keep_checkpoints=3")
        config.output_dir = str(run)
        caplog.clear()
        if answer(lambda config=config: train(config), [str(run)], story) is None:
            refused += 1
            continue
        assert weights(run) == expected_weights, story
        lost = set(expected_rows) - set(rows_of(run) if (run / "metrics.jsonl").is_file() else [])
        assert not lost or said(caplog), story
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
    for rng in fuzz(6):
        run = tmp_path / f"run{fuzz.seed}"
        shutil.copytree(folder / rng.choice(["killed", "whole"]), run)
        story = damage_folder(run, rng)
        caplog.clear()
        result = answer(lambda run=run: result_of(run), [str(run)], story)
        if result is None:
            continue
        same = expected[result.facts.checkpoint]
        np.testing.assert_array_equal(result.losses, same.losses, err_msg=story)
        named = replace(same.facts, key=result.facts.key, label=result.facts.label, settings=result.facts.settings)
        if not said(caplog):  # a speed is of the rows that are left
            assert result.facts == named, story
        assert result.facts == replace(named, tokens_per_second=result.facts.tokens_per_second), story
        assert said(caplog) or np.array_equal(result.curve, same.curve), story
        shutil.rmtree(run)
