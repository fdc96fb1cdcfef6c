"""Runs of an earlier result count as finished, and those of another experiment are refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from own_experiment import start

from attnzoo.cli import app
from attnzoo.experiments import run as running
from attnzoo.experiments.outcome import load_outcome, save_outcome


def test_a_result_that_comes_from_elsewhere_is_gone_on_from(done, monkeypatch):
    """Seeds of several sittings add up; a search of learning rates is not made again."""
    whole = load_outcome(Path("out/result.json"))
    part = replace(whole, runs=tuple(run for run in whole.runs if (run.arm, run.seed) != ("none, one head", 1)))
    save_outcome(part, Path("part.json"))
    shutil.rmtree("out")
    trained, folders = running.train, []
    monkeypatch.setattr(running, "train", lambda config: [folders.append(config.output_dir), trained(config)])
    command = ["experiment", "run", done, "--seeds", "2", "--device", "cpu", "--jobs", "1", "--out", "out"]
    result = CliRunner().invoke(app, [*command, "--resume-from", "part.json"], catch_exceptions=False)
    assert result.exit_code == 0
    assert folders == ["out/none-one-head/lr0.1-seed1"]
    again = load_outcome(Path("out/result.json"))
    assert "--resume-from part.json" in again.command
    assert again.machine["before"].startswith("3 runs on ")
    for kind in ("runs", "tried"):
        then, now = (
            [replace(run, date="", seconds=0.0, machine="") for run in getattr(of, kind)] for of in (whole, again)
        )
        assert now == then
    CliRunner().invoke(app, command, catch_exceptions=False)  # the folder keeps them, and where they were made
    assert len(folders) == 1
    assert load_outcome(Path("out/result.json")).machine == again.machine


def test_a_result_whose_rates_were_given_is_gone_on_from_at_these(done, monkeypatch):
    whole = load_outcome(Path("out/result.json"))
    bare = {"values": {}, "guesses": {}, "curve": ()}  # as one rate is recorded
    first = tuple(replace(run, **bare) for run in whole.runs if run.seed == 0)
    save_outcome(replace(whole, tried=first), Path("part.json"))
    shutil.rmtree("out")
    monkeypatch.setattr(running, "train", lambda config: pytest.fail("trained"))
    command = ["experiment", "run", done, "--seeds", "2", "--device", "cpu", "--jobs", "1", "--out", "out"]
    CliRunner().invoke(app, [*command, "--resume-from", "part.json"], catch_exceptions=False)
    again = load_outcome(Path("out/result.json"))
    assert all(run.machine for run in (*again.tried, *again.runs))
    for now, then in ((again.tried, first), (again.runs, whole.runs)):
        assert tuple(replace(run, machine="") for run in now) == then


def test_results_of_several_machines_add_up(done, monkeypatch):
    whole = load_outcome(Path("out/result.json"))
    one_rate = tuple(replace(run, values={}, guesses={}, curve=()) for run in whole.runs if run.seed == 0)
    for seed in (0, 1):
        runs = tuple(run for run in whole.runs if run.seed == seed)
        machine = {"processor": f"machine {seed}"}
        save_outcome(replace(whole, runs=runs, tried=one_rate, machine=machine), Path(f"part{seed}.json"))
    shutil.rmtree("out")
    monkeypatch.setattr(running, "train", lambda config: pytest.fail("trained"))
    command = ["experiment", "run", done, "--seeds", "2", "--device", "cpu", "--jobs", "1", "--out", "out"]
    command += ["--resume-from", "part0.json", "--resume-from", "part1.json"]
    CliRunner().invoke(app, command, catch_exceptions=False)
    again = load_outcome(Path("out/result.json"))
    assert tuple(replace(run, machine="") for run in again.runs) == whole.runs
    assert {(run.seed, run.machine) for run in again.runs} == {(0, "machine 0"), (1, "machine 1")}
    assert again.command.endswith("--resume-from part0.json --resume-from part1.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda of: replace(of, size="gpu"), "--resume-from: expected a result of the size 'cpu', got 'gpu'"),
        (
            lambda of: replace(of, runs=(replace(of.runs[0], arm="foxx"),)),
            "unknown arm 'foxx' of --resume-from: .*'fox'",
        ),
        (lambda of: replace(of, runs=(replace(of.runs[0], seed=4),)), "fox, seed 4, .*: .*`--seeds 5` takes this one"),
        (lambda of: replace(of, runs=(replace(of.runs[0], key="a"),)), "fox, seed 0, .* was of other settings, anoth"),
        (lambda of: replace(of, runs=(replace(of.runs[0], key=""),)), "fox, seed 0, .* has no digest of its settings"),
    ],
)
def test_a_result_of_other_runs_is_refused_by_name(done, change, message):
    outcome = replace(load_outcome(Path("out/result.json")), tried=())
    with pytest.raises(ValueError, match=message):
        start(done, records=[change(outcome)])


def test_a_result_of_another_experiment_counts_where_its_runs_are_the_same(done, monkeypatch):
    """As that of `pairs` in a file that adds a pair to it."""
    shutil.copy(done, "more.py")
    shutil.move("out", "before")
    monkeypatch.setattr(running, "train", lambda config: pytest.fail("trained"))
    start("more.py", records=[load_outcome(Path("before/result.json"))])
    assert len(load_outcome(Path("out/result.json")).runs) == 4


def test_an_ordering_takes_the_runs_of_its_models_alone(done, monkeypatch):
    shutil.move("out", "before")
    trained, folders = running.train, []
    monkeypatch.setattr(running, "train", lambda config: [folders.append(config.output_dir), trained(config)])
    record = load_outcome(Path("before/result.json"))
    start(done, records=[record], claims=("longer: fox < nope qk_norm=rms",))
    assert {Path(folder).parent.name for folder in folders} == {"nope-qk_norm=rms"}
    assert {run.arm for run in load_outcome(Path("out/result.json")).runs} == {"fox", "nope qk_norm=rms"}


@pytest.mark.parametrize("option", ["--resume-from", "--rates"])
def test_a_result_that_is_not_there_is_refused_by_its_option(done, option):
    result = CliRunner().invoke(app, ["experiment", "run", done, option, "none.json"])
    assert str(result.exception).startswith(f"{option}: none.json is not readable: there is no such result.json")


def test_rates_other_than_those_of_the_runs_are_refused_by_name(done):
    with pytest.raises(
        ValueError, match=r"fox, seed 0, learning rate .*: expected that of --rates or of another result, 0\.3"
    ):
        start(done, records=[load_outcome(Path("out/result.json"))], rates={"fox": 0.3})
