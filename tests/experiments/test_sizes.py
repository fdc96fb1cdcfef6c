"""Gains of one experiment's parts over the sizes of its results."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from attnzoo.cli import app
from attnzoo.experiments.claims import Value
from attnzoo.experiments.experiment import find
from attnzoo.experiments.outcome import load_outcome, save_outcome
from attnzoo.experiments.sizes import gains_by_size, left_out

RESULTS = Path(__file__).parents[2] / "docs" / "results"
RECORDS = [RESULTS / each.result for each in find("factorial").measured if each.size.startswith("cpu")]


@pytest.fixture(scope="module")
def outcomes():
    return [load_outcome(path) for path in RECORDS]


def test_gains_by_size_are_those_of_the_records_the_smallest_first(outcomes):
    rows = gains_by_size(find("factorial"), outcomes[::-1])
    assert len(rows) == 14
    for row in rows:
        assert (np.diff(row.weights) > 0).all()
        means = [outcome.values(row.higher).mean() - outcome.values(row.lower).mean() for outcome in outcomes]
        assert row.gains == pytest.approx(means)
        assert (row.errors > 0).all()


def test_gain_that_grows_is_told_from_one_that_does_not(outcomes):
    """Runs that are moved by the same number at the largest size gain more by it, and no more certainly less."""
    base, part = Value("nope", "loss"), Value("alibi", "loss")

    def p(by: float) -> float:
        runs = [
            replace(run, values={**run.values, "loss": {1.0: run.values["loss"][1.0] - by * (run.arm == part.arm)}})
            for run in outcomes[-1].runs
        ]
        rows = gains_by_size(find("factorial"), [*outcomes[:-1], replace(outcomes[-1], runs=tuple(runs))])
        return next(row.p for row in rows if (row.lower, row.higher) == (part, base))

    assert 1 > p(0.0) > p(0.2) > p(0.5) > 0
    assert p(0.0) > 0.2
    assert p(0.5) < 0.01
    assert p(-0.5) < 0.01


def test_command_prints_and_draws_them(outcomes, tmp_path):
    ran = CliRunner().invoke(app, ["experiment", "sizes", *map(str, RECORDS), "--out", str(tmp_path)])
    assert ran.exit_code == 0
    assert re.search(r"fox below nope\s+0\.293 ± 0\.011\s+0\.329 ± 0\.013\s+0\.394 ± 0\.028\s+0\.039", ran.output)
    for side, name, base in (("linear", "mamba2", "linear_attention"), ("softmax", "fox", "nope")):
        drawn = (tmp_path / f"factorial-{side}.svg").read_text()
        assert f">{name}<" in drawn
        assert f">gain in loss over {base}<" in drawn


def test_results_that_are_not_of_several_sizes_of_one_experiment_are_refused(outcomes):
    experiment, other = find("factorial"), load_outcome(RESULTS / find("parity").measured[0].result)
    for given, message in (
        (outcomes[:1], "results: expected some of different sizes, got cpu"),
        ([outcomes[0], outcomes[0]], "results: expected some of different sizes, got cpu, cpu"),
        ([outcomes[0], other], "results: expected ones of 'factorial', got one of 'parity'"),
        (
            [outcomes[0], replace(outcomes[1], runs=tuple(run for run in outcomes[1].runs if run.arm == "fox"))],
            "results: expected two with runs of deltanet and linear_attention, got cpu",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            gains_by_size(experiment, given)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pairs", "expected ones of one text, as .* do not compare, got stdlib at cpu, tokens/packages at gpu"),
        ("needle", "expected ones that compare models, and needle claims limits alone"),
    ],
)
def test_results_whose_numbers_do_not_compare_are_refused(name, message):
    """Nats a byte beside nats a token are no curve."""
    experiment = find(name)
    records = {each.size: each.result for each in experiment.measured}
    with pytest.raises(ValueError, match=f"results: {message}"):
        gains_by_size(experiment, [load_outcome(RESULTS / records[size]) for size in ("cpu", "gpu")])


def test_gain_is_shown_at_the_sizes_that_have_it_and_left_out_where_they_are_not_two(outcomes, tmp_path):
    """Of the largest size only one run of FoX is kept, of the others all but FoX's."""
    few = [replace(each, runs=tuple(run for run in each.runs if run.arm != "fox")) for each in outcomes]
    one = next(run for run in outcomes[2].runs if run.arm == "fox")
    large = replace(few[2], runs=(*(run for run in few[2].runs if run.arm in ("linear_attention", "nope")), one))
    experiment, files = find("factorial"), [tmp_path / f"{n}.json" for n in range(3)]
    for path, each in zip(files, (few[0], outcomes[1], large), strict=True):
        save_outcome(each, path)
    rows = {row.lower.arm: row for row in gains_by_size(experiment, list(map(load_outcome, files)))}
    full = {row.lower.arm: row for row in gains_by_size(experiment, outcomes)}
    fox, mamba2 = rows["fox"], rows["mamba2"]
    assert np.isfinite([fox.gains, fox.errors]).tolist() == [[False, True, True], [False, True, False]]
    assert fox.gains[1] == full["fox"].gains[1]
    assert fox.gains[2] == pytest.approx(outcomes[2].values(fox.higher).mean() - one.values["loss"][1.0])
    assert np.isnan(fox.p)
    assert (mamba2.gains[:2] == full["mamba2"].gains[:2]).all()
    assert mamba2.p == next(row.p for row in gains_by_size(experiment, outcomes[:2]) if row.lower.arm == "mamba2")
    ran = CliRunner().invoke(app, ["experiment", "sizes", *map(str, files), "--out", str(tmp_path)])
    assert ran.exit_code == 0
    assert re.search(r"fox below nope\s+–\s+0\.329 ± 0\.013\s+0\.\d{3}\s+–\s", ran.output)
    assert "left out" not in ran.output
    ran = CliRunner().invoke(app, ["experiment", "sizes", *map(str, files[:2])])
    assert ran.exit_code == 0
    assert left_out(experiment, gains_by_size(experiment, list(map(load_outcome, files[:2])))) == ["fox"]
    assert "left out, as fewer than two results have runs of them: fox\n" in ran.output
