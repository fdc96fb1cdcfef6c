"""A run made longer goes on at a rate that does not jump, resumes exactly, and is what its configuration says."""

import itertools
import json
import math
import os
import re
import shutil
import sys

import pytest
import tiny_runs
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_runs import StoppedError, numbers, outcome, said, stop_at

from attnzoo.config import Extension, OptimizerConfig, load_config
from attnzoo.training import CheckpointError, extend, load_run, newest_checkpoint, train
from attnzoo.training.optimizer import learning_rate


@pytest.fixture(scope="module")
def finished_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    tiny_runs.write_text(folder)
    return train(tiny_runs.config_of(folder, "run"))


@pytest.fixture
def finished(finished_once, tmp_path):
    """`finished(*overrides, run=...)`: the configuration of a run of eight steps that is finished, of which that folder
    holds a copy."""

    def make(*overrides, run="run"):
        if not (tmp_path / run).exists():
            shutil.copytree(finished_once, tmp_path / run)
        return tiny_runs.config_of(finished_once.parent, "", *overrides, f"output_dir={tmp_path / run}")

    return make


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_the_rate_never_jumps_and_never_changes_what_was(data):
    """From one update to the next, it moves no more than the steepest of its lines and cosines does."""
    warmup = data.draw(st.integers(1, 20))
    config, steps = OptimizerConfig(lr=1.0, warmup_steps=warmup), data.draw(st.integers(warmup + 20, 100))
    steepest = max(1 / warmup, math.pi / 2 / (steps - warmup))
    for _ in range(data.draw(st.integers(1, 3))):
        before = [learning_rate(step, steps, config) for step in range(1, steps + 1)]
        least = config.extensions[-1].after + 1 if config.extensions else 1
        after = data.draw(st.integers(least, steps))
        lr, line = data.draw(st.floats(0.01, 2.0)), data.draw(st.integers(1, 20))
        schedule = data.draw(st.sampled_from(["constant", "cosine"]))
        config.extensions = [*config.extensions, Extension(after, steps, schedule, lr, line)]
        steps = after + line + data.draw(st.integers(10, 60))
        steepest = max(steepest, 2 / line, lr * math.pi / 2 / (steps - after - line))
        now = [learning_rate(step, steps, config) for step in range(1, steps + 1)]
        assert now[:after] == before[:after]
        assert all(abs(b - a) <= steepest + 1e-9 for a, b in itertools.pairwise(now))
        assert now[after + line - 1] == pytest.approx(lr)
        tail = now[after + line :]
        if schedule == "constant":
            assert tail == [lr] * len(tail)
        else:
            n = len(tail)
            assert tail == pytest.approx([lr * 0.5 * (1 + math.cos(math.pi * i / n)) for i in range(n)])


def test_a_finished_run_goes_on_along_a_line_and_a_new_cosine(finished):
    config = finished()
    reference = numbers(config.output_dir)
    longer = extend(config.output_dir, 16, "cosine", lr=0.005, warmup_steps=3)
    train(longer)
    rows = numbers(config.output_dir)
    assert rows[: len(reference)] == reference
    found = [row["lr"] for row in rows if row["kind"] == "train"]
    last = found[7]
    assert found[8:11] == pytest.approx([last + (0.005 - last) * i / 3 for i in (1, 2, 3)])
    assert found[11:] == pytest.approx([0.0025 * (1 + math.cos(math.pi * i / 5)) for i in range(5)])
    assert load_run(config.output_dir)[1] == load_config(f"{config.output_dir}/config.yaml") == longer


@pytest.mark.parametrize(("stop", "again"), [(9, "the same call"), (12, "its own file")])
def test_an_extension_that_was_stopped_goes_on_to_the_same_bits(finished, stop, again):
    outcomes = []
    for run in ("whole", "stopped"):
        config = finished(run=run)
        longer = extend(config.output_dir, 14, "constant", lr=0.004)
        assert longer.optimizer.extensions == [Extension(8, 8, "constant", 0.004, 2)]
        if run == "stopped":
            with pytest.raises(StoppedError):
                train(longer, on_row=stop_at(stop))
            if again == "its own file":
                longer = load_config(f"{config.output_dir}/config.yaml")
            else:
                longer = extend(config.output_dir, 14, "constant", lr=0.004)
        outcomes.append(outcome(train(longer)))
    assert outcomes[0] == outcomes[1]
    assert extend(config.output_dir, 14, "constant") == longer  # it is so already


def test_an_interrupted_run_goes_on_from_its_rate(finished):
    config = finished()
    shutil.rmtree(newest_checkpoint(config.output_dir))  # as if it had been stopped after step 6
    rate = learning_rate(6, 8, config.optimizer)
    longer = extend(config.output_dir, 10, "constant")
    assert longer.optimizer.extensions == [Extension(6, 8, "constant", rate, 0)]
    train(longer)
    assert [row["lr"] for row in numbers(config.output_dir) if row["kind"] == "train"][6:] == [rate] * 4


def test_a_run_is_made_longer_twice(finished):
    config = finished()
    train(extend(config.output_dir, 12, "constant", lr=0.004))
    train(extend(config.output_dir, 20, "cosine"))  # from where the level part was
    rows = [row for row in numbers(config.output_dir) if row["kind"] == "train"]
    assert [row["lr"] for row in rows][12:14] == pytest.approx([0.004, 0.002 * (1 + math.cos(math.pi / 8))])
    assert len(rows) == 20


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before_the_extension(finished, caplog):
    config = finished()
    longer = extend(config.output_dir, 14, "constant", lr=0.004)
    reference = outcome(train(longer))
    config = finished(run="damaged")
    longer = extend(config.output_dir, 14, "constant", lr=0.004)
    with pytest.raises(StoppedError):
        train(longer, on_row=stop_at(9))
    newest = newest_checkpoint(config.output_dir)
    assert newest.name == "step-00000008"
    os.truncate(newest / "model.safetensors", 9)
    assert outcome(train(longer)) == reference
    assert any("step-00000006" in line for line in said(caplog))


def test_more_steps_alone_are_refused_and_both_ways_named(finished):
    config = finished()
    before = outcome(config.output_dir)
    with pytest.raises(CheckpointError, match="steps was 8 and is 12 now") as refused:
        train(finished("steps=12"))
    assert "--schedule constant" in str(refused.value)
    assert "--schedule cosine" in str(refused.value)
    command = re.search(r"`attnzoo extend (\S+) --steps (\d+) --schedule constant --lr RATE`", str(refused.value))
    assert command[1] == config.output_dir
    assert extend(command[1], int(command[2]), "constant", lr=0.004).steps == 12  # without a rate it is refused
    with pytest.raises(CheckpointError, match="steps was 8 and is 6 now") as refused:
        train(finished("steps=6", "optimizer.warmup_steps=2"))
    assert "extend" not in str(refused.value)
    assert outcome(config.output_dir) == before


def test_an_extension_from_before_the_checkpoint_is_another_run(finished):
    config = finished()
    for added in ("{after: 5, planned: 8, schedule: constant, lr: 0.01}",
                  "{after: 8, planned: 9, schedule: constant, lr: 0.01}"):  # fmt: skip
        with pytest.raises(CheckpointError, match="holds another run"):
            train(finished("steps=12", f"optimizer.extensions=[{added}]"))
    longer = finished("steps=12", "optimizer.extensions=[{after: 8, planned: 8, schedule: constant, lr: 0.01}]")
    train(longer)
    with pytest.raises(CheckpointError, match="holds another run"):
        train(config)


def test_extensions_that_cannot_be_are_refused(finished):
    config = finished()
    for arguments, options, message in [
        ((12, "cosine"), {}, r"lr: expected the rate to come to, as the cosine has ended: it is .* at step 8"),
        ((8, "constant"), {"lr": 0.1}, "steps: expected more than the 8 of the run's newest checkpoint, got 8"),
        ((12, "cosine"), {"lr": 0.1, "warmup_steps": 0}, "warmup_steps: expected at least 1"),
        ((12, "cosien"), {"lr": 0.1}, "unknown schedule 'cosien'.*did you mean 'cosine'"),
        ((12, "cosine"), {"lr": -1.0}, "lr: expected a number above 0"),
        ((10, "cosine"), {"lr": 0.1}, r"extensions\[0\]: after=8 and warmup_steps=2 must leave updates before step 10"),
    ]:
        with pytest.raises(ValueError, match=message):
            extend(config.output_dir, *arguments, **options)


def test_what_is_no_run_is_not_extended(tmp_path):
    with pytest.raises(FileNotFoundError, match="no run in"):
        extend(tmp_path / "nothing", 10, "constant")


def test_the_command_extends_and_goes_on(finished):
    from click.testing import CliRunner

    from attnzoo.cli import app

    config = finished()
    done = CliRunner().invoke(
        app, ["extend", config.output_dir, "--steps", "12", "--schedule", "cosine", "--lr", "0.01"]
    )
    assert done.output == f"run: {config.output_dir}\n"
    progress = json.loads((newest_checkpoint(config.output_dir) / "progress.json").read_text())
    assert progress["step"] == 12


def test_several_processes_are_given_the_command_of_one(finished, monkeypatch):
    from click.testing import CliRunner

    from attnzoo.cli import app

    config, given = finished(), []
    monkeypatch.setattr("attnzoo.training.launch.launch", lambda *arguments: given.append(arguments))
    words = ["extend", config.output_dir, "--steps=11", "--schedule=constant", "--lr=0.01", "--warmup-steps=2"]
    assert CliRunner().invoke(app, [*words, "--processes=2"]).exit_code == 0
    assert given == [([sys.executable, "-m", "attnzoo", *words], 2)]
