"""Whether any model is better than always the same answer: without, an experiment decides nothing."""

from __future__ import annotations

import html
import json
from dataclasses import replace
from pathlib import Path

from attnzoo.data.tasks import Examples, build_task
from attnzoo.evaluation.answers import Guess, measure_guess
from attnzoo.experiments.experiment import find
from attnzoo.experiments.outcome import Trained, as_json, from_json, load_outcome, save_outcome
from attnzoo.experiments.report.experiment import hints, markdown, render_experiment


def change(outcome, wrong, guess):
    """The outcome with these shares of wrong answers in the runs of either arm, beside a guess."""
    places = {1.0: Guess(guess, 0.02), 2.0: Guess(guess, 0.02)}
    runs = [
        replace(run, values={**run.values, "wrong answers": dict.fromkeys(places, wrong[run.arm] + run.seed / 100)},
                guesses={**run.guesses, "wrong answers": places})
        for run in outcome.runs
    ]  # fmt: skip
    return replace(outcome, runs=tuple(runs))


def test_nothing_is_decided_where_no_model_is_better_than_a_guess(done):
    whole, experiment = load_outcome(Path("out/result.json")), find(done)
    claim = experiment.expectations[0].claim
    never = change(whole, {"fox": 0.7, "none, one head": 0.8}, 0.75)
    assert claim.judge(never.values).word == "seen"
    assert never.verdict(claim).word == "undecided"
    assert never.verdict(claim).why.endswith("no model is better than a guess")
    assert "wrong answers" in never.unlearnt()
    learnt = change(whole, {"fox": 0.6, "none, one head": 0.8}, 0.75)
    assert learnt.verdict(claim).word == "seen"
    assert "wrong answers" not in learnt.unlearnt()
    older = change(whole, {"fox": 0.7, "none, one head": 0.8}, 0.75)
    older = replace(older, runs=tuple(replace(run, guesses={}) for run in older.runs))
    assert older.verdict(claim).word == "seen"  # of a result that is older than guesses
    for outcome, is_said in ((never, True), (learnt, False)):
        hint = "No model is better than a guess in 'wrong answers': always the same answer is 75% wrong."
        assert (hint in markdown(experiment, outcome)) == is_said
        assert (hint in html.unescape(render_experiment(experiment, outcome))) == is_said
        assert "| *always the same answer* | | 75.00 % | 75.00 % |" in markdown(experiment, outcome)
        save_outcome(outcome, Path("again.json"))
        assert load_outcome(Path("again.json")) == outcome


def test_a_model_that_may_be_better_than_a_guess_is_not_said_to_have_learnt_nothing(done):
    whole = load_outcome(Path("out/result.json"))
    nearly = change(whole, {"fox": 0.7, "none, one head": 0.8}, 0.75)
    never = change(whole, {"fox": 0.74, "none, one head": 0.8}, 0.75)
    few, nothing = (hint for outcome in (nearly, never) for hint in hints(outcome) if "'wrong answers'" in hint)
    assert "may be chance: it takes 4." in few
    assert "Nothing was learnt" not in few
    assert "Nothing was learnt" in nothing


def test_a_model_that_is_right_by_chance_is_not_better_than_a_guess_that_never_is():
    """Of 4,096 values any is as likely: 4,096 answers at random are right once in the mean, and some guesses never."""
    examples = Examples(build_task("mqar", {"pairs": 16}), 256, seed=1000, held_out=True)
    guess = measure_guess(examples, 256)
    assert (guess.wrong, guess.uncertainty, guess.asked) == (1.0, 0.0, 4096)
    for right, better in ((0, False), (1, False), (8, False), (40, True), (4096, True)):
        run = Trained("a", 0.1, 0, 0.0, {"p": {1.0: 1 - right / 4096}}, guesses={"p": {1.0: guess}})
        assert run.betters("p") == better
        assert from_json(json.loads(json.dumps(as_json(run)))) == run


def test_guess_is_asked_what_the_probe_asks(done):
    outcome = load_outcome(Path("out/result.json"))
    for run in outcome.runs:
        assert {probe: [*found] for probe, found in run.guesses.items()} == {
            probe: [*found] for probe, found in run.values.items()
        }
        noise = run.guesses["noise"]  # rows of 8 tokens without noise ask more often
        assert noise[0.0].uncertainty < noise[0.5].uncertainty
    assert outcome.guess("noise", 0.0) == outcome.runs[0].guesses["noise"][0.0].wrong
