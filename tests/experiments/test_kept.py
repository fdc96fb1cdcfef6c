"""Where the runs of an earlier result are put, and what of a folder they leave alone; nothing is trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from own_experiment import write_own

from attnzoo.cli import app
from attnzoo.experiments import kept
from attnzoo.experiments.experiment import find
from attnzoo.experiments.outcome import Outcome, Trained, save_outcome
from attnzoo.experiments.plan import Schedule

ALONE = "none, one head"  # the arm of one learning rate
MACHINE = {"gpu": "an H200", "torch": "2.11", "before": "2 runs on an A100"}


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """Of two seeds of an experiment whose learning rates are searched in runs of another length."""
    monkeypatch.chdir(tmp_path)
    own = Path(write_own())
    own.write_text(own.read_text().replace("lrs=(0.01, 0.02), rows=4", "lrs=(0.01, 0.02), tries=('steps=3',)"))
    return Schedule(str(own), "cpu", Path("out"), 2, device="cpu")


def run(plan, arm, lr, seed, tries=False, **changed):
    """A run as it is recorded."""
    experiment = find(plan.name)
    _, key = kept.place(plan, experiment, experiment.arm(arm), lr, seed, tries)
    values = {} if tries else {"wrong answers": {1.0: 0.5}}
    return replace(Trained(arm, lr, seed, abs(lr - 0.02), values, key=key, weights="abc"), **changed)


@pytest.fixture
def record(plan):
    """A search up to the rate beyond the best, and all seeds, of which one diverged and one came from elsewhere."""
    tried = [run(plan, "fox", lr, 0, tries=True) for lr in (0.01, 0.02, 0.05)]
    runs = [run(plan, "fox", 0.02, 0, machine="a V100"), run(plan, "fox", 0.02, 1, values={}, note="diverged")]
    alone = [run(plan, ALONE, 0.1, seed) for seed in (0, 1)]
    return Outcome("mine", "cpu", (*runs, *alone), (*tried, replace(alone[0], values={})), "", "", MACHINE, "")


def found(plan, arm):
    """The finished runs of an arm: those that tried a rate and, as none is left to try, the measured ones."""
    experiment = find(plan.name)
    return kept.finished(plan, experiment, experiment.arm(arm))


def test_what_is_taken_stands_where_it_would_have_been_made(plan, record):
    kept.take(plan, find(plan.name), record)
    for arm in ("fox", ALONE):
        told = [
            [replace(one, machine=one.machine or "an H200, 2.11") for one in of if one.arm == arm]
            for of in (record.tried, record.runs)
        ]
        assert found(plan, arm) == tuple(told)


def test_what_a_folder_has_is_left_as_it_is(plan, record):
    experiment = find(plan.name)
    kept.take(plan, experiment, record)
    before = [found(plan, arm) for arm in ("fox", ALONE)]
    other = [replace(one, validation=9.0, values={"wrong answers": {1.0: 0.9}}, note="") for one in record.runs]
    kept.take(plan, experiment, replace(record, runs=tuple(other)))
    assert [found(plan, arm) for arm in ("fox", ALONE)] == before


def test_the_first_seed_beyond_those_planned_is_refused(plan, record):
    with pytest.raises(ValueError, match=r"none, one head, seed 2, .*: expected seeds below 2; `--seeds 3` takes this"):
        kept.take(plan, find(plan.name), replace(record, runs=(run(plan, ALONE, 0.1, 2),)))


def test_rates_of_results_are_those_of_their_runs_but_for_arms_that_they_searched(record):
    assert kept.rates_of([record]) == {ALONE: 0.1}
    assert kept.rates_of([record], searched=False) == {"fox": 0.02, ALONE: 0.1}
    parts = [replace(record, tried=record.tried[:1]), replace(record, tried=record.tried[1:2], runs=())]
    assert kept.rates_of(parts[:1]) == {"fox": 0.02, ALONE: 0.1}
    assert kept.rates_of(parts) == {ALONE: 0.1}
    assert kept.rates_of([]) == {}


def test_rates_that_are_given_are_those_of_every_arm_also_of_one_that_a_result_searched(plan, record, monkeypatch):
    save_outcome(record, Path("part.json"))
    given = []
    monkeypatch.setattr("attnzoo.experiments.run.run_experiment", lambda plan, *_: given.append(plan.rates))
    for options in (["--rates", "part.json"], []):
        command = ["experiment", "run", plan.name, *options, "--resume-from", "part.json"]
        CliRunner().invoke(app, command, catch_exceptions=False)
    assert given == [{"fox": 0.02, ALONE: 0.1}, {ALONE: 0.1}]
