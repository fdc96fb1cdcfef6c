"""An experiment is one file: it trains, is judged, and writes a page; what is finished is not done again."""

from __future__ import annotations

import html
import io
import json
import pickle
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from own_experiment import start
from rich.console import Console

from attnzoo.cli import app
from attnzoo.experiments import kept
from attnzoo.experiments import run as running
from attnzoo.experiments.claims import AtMost, Correlated, Value
from attnzoo.experiments.experiment import Expectation, find, names
from attnzoo.experiments.outcome import Trained, as_json, load_outcome, save_outcome
from attnzoo.experiments.plan import Schedule, folder_of
from attnzoo.experiments.report.experiment import markdown, render_experiment, row_in_words, verdict_table
from attnzoo.terminal import print_table
from attnzoo.training import CheckpointError, read_metrics


@pytest.mark.parametrize("setting", ["optimizer.lr=0.001", "optimizer={lr: 0.001}"])
def test_a_setting_that_each_run_overrides_is_refused(own, setting):
    Path(own).write_text(Path(own).read_text().replace("model.num_heads=1", setting))
    with pytest.raises(ValueError, match=r"none, one head.*: settings: optimizer\.lr is set for each run .*are lrs"):
        start(own)


def test_experiment_trains_is_judged_and_writes_a_page(done, monkeypatch):
    page = Path("out/report.html").read_text()
    outcome = load_outcome(Path("out/result.json"))
    assert "output_dir: fox" in outcome.settings  # beside the result, wherever that is
    assert {(run.arm, run.seed) for run in outcome.runs} == {(a, s) for a in ("fox", "none, one head") for s in (0, 1)}
    assert [run.lr for run in outcome.tried] == [0.01, 0.02, 0.1]
    best = min((run for run in outcome.tried if run.arm == "fox"), key=lambda run: run.validation)
    assert {run.lr for run in outcome.of("fox")} == {best.lr}
    assert outcome.places("fox", "wrong answers") == [1.0, 2.0]
    for expectation, verdict in outcome.verdicts(find(done)):
        assert expectation.text in page
        assert f">{verdict.word}</span>" in page
    for text in ("Is a &lt;fox&gt; better than <code>none</code>?", "the &lt;command&gt;", "On a GPU.",
                 "a paper, Table 3", "none, one head", "Both at once", "a fox", "one point"):  # fmt: skip
        assert text in page
    assert not re.search(r'(?:src|href)="(?!#)|@import|url\((?!#)', page)  # nothing is loaded
    assert "**" in Path("out/result.md").read_text()

    def refuse(*args, **kwargs):
        raise AssertionError("trained or measured again")

    monkeypatch.setattr(running, "train", refuse)
    monkeypatch.setattr(running, "load_run", refuse)
    monkeypatch.setattr(running, "datetime", None)  # what is only read has the day on which it was measured
    start(done)
    assert load_outcome(Path("out/result.json")) == replace(outcome, command="the <command>")
    with pytest.raises(AssertionError, match="again"):
        start(done, seeds=3)


def test_other_settings_in_the_same_folder_are_refused_with_the_option_that_gives_another(done):
    message = r"out/fox/lr0.01-seed0 holds another run: steps was 2 and is 3 now\. Give --out a new folder\.$"
    with pytest.raises(CheckpointError, match=message):
        start(done, overrides=("steps=3",))


def test_task_of_an_experiment_s_own_file_is_asked_of_its_runs(done):
    run = next(Path("out/fox").iterdir())
    found = CliRunner().invoke(app, ["evaluate", str(run), "--on", "mine.py:p_ignore=0", "--rows", "2", "--json"])
    assert '"evaluation": "mine.py", "options": {"p_ignore": 0, ' in found.output
    assert (run / "evaluations" / "mine.py-p_ignore=0-rows=2.json").is_file()


def test_run_on_a_text_that_has_changed_is_another_run(own):
    experiment, keys = find(own), []
    for text in ("one and two. " * 200, "one and two. " * 200, "two and one. " * 200):
        Path("text.txt").write_text(text)
        kept._fingerprint.cache_clear()
        plan = Schedule(own, "cpu", Path("out"), 2, ("data.source=text.txt", "data.context_length=16"))
        keys.append(kept.place(plan, experiment, experiment.arms[0], 0.01, 0)[1])
    assert keys[0] == keys[1] != keys[2]


def test_run_that_lost_its_numbers_is_measured_and_not_trained(done, monkeypatch):
    before = load_outcome(Path("out/result.json"))
    path = Path("out/none-one-head/lr0.1-seed1/measured.json")
    path.write_text(path.read_text()[:-20])
    steps = []
    trained = running.train
    monkeypatch.setattr(running, "train", lambda config: trained(config, on_row=steps.append))
    start(done)
    after = load_outcome(Path("out/result.json"))
    assert [run.values for run in after.runs] == [run.values for run in before.runs]
    assert steps == []


def test_probe_of_one_s_own_is_measured_once_whatever_it_is(done, monkeypatch):
    """An object without a repr of its own, and one with a function among its options: both show places in memory."""
    probes = """
class Count:
    name, places, percent = "count", "", False

    def __init__(self, of):
        self.of = of

    def measure(self, subject):
        return {1.0: float(self.of)}


@dataclass(frozen=True)
class Of:
    what: object = len
    name: str = "of"
    places: str = ""
    percent: bool = False

    def measure(self, subject):
        return {1.0: self.what("abc")}


"""
    text = Path(done).read_text().replace("    probes=(", "    probes=(Count(1), Of(), ")
    Path(done).write_text(text.replace("EXPERIMENT =", f"from dataclasses import dataclass\n{probes}EXPERIMENT ="))
    arm = "none, one head"  # which has one learning rate
    start(done, only=[arm])
    outcome = load_outcome(Path("out/result.json"))
    assert outcome.values(Value(arm, "count")).tolist() == [1.0, 1.0]
    assert outcome.values(Value(arm, "of")).tolist() == [3.0, 3.0]
    with monkeypatch.context() as patch:
        patch.setattr(running, "load_run", None)  # nothing is measured again
        start(done, only=[arm])
    Path(done).write_text(Path(done).read_text().replace("Count(1)", "Count(2)"))
    start(done, only=[arm])
    assert load_outcome(Path("out/result.json")).values(Value(arm, "count")).tolist() == [2.0, 2.0]


def test_experiment_that_is_not_finished_says_what_is_missing(done):
    whole = load_outcome(Path("out/result.json"))
    for path in Path("out").glob("none*/lr0.1-seed1/measured.json"):
        path.unlink()
    page = start(done, minutes=1e-9).read_text()
    part = load_outcome(Path("out/result.json"))
    assert [run for run in whole.runs if run not in part.runs] == [
        run for run in whole.runs if (run.arm, run.seed) == ("none, one head", 1)
    ]
    assert part.verdicts(find(done))[0][1].word == "undecided"
    assert "none, one head: 1 of 2 seeds" in page
    assert "3 of 4 models trained and measured" in page
    shutil.rmtree(next(Path("out").glob("none*")))
    assert "none, one head: 0 of 2 seeds" in start(done, minutes=1e-9).read_text()
    shutil.rmtree("out")
    with pytest.raises(TimeoutError, match="the same command goes on"):
        start(done, minutes=1e-9)


def test_seeds_wait_for_the_learning_rates_of_their_arm_alone(own):
    experiment = find(own)
    tasks, after = running._tasks(Schedule(own, "cpu", Path("out"), 2), experiment, experiment.arms)
    calls = {label: (task.func, *task.args[1:]) for label, task in tasks.items()}
    rates = ["fox, learning rate 0.01", "fox, learning rate 0.02"]
    seeds = ["fox, seed 0", "none, one head, seed 0", "fox, seed 1", "none, one head, seed 1"]
    assert list(calls) == [*rates, *seeds]
    assert [calls[label] for label in rates] == [(running.run_rate, "fox", lr) for lr in (0.01, 0.02)]
    assert calls["none, one head, seed 1"] == (running.run_seed, "none, one head", 1)
    assert after == {label: rates if label.startswith("fox, seed") else [] for label in tasks}


def test_learning_rates_are_searched_until_the_best_lies_between_two(own, monkeypatch):
    """Along 1, 2, 5, 10, ..., in short trainings, up and down, and no further where none ends well."""
    Path(own).write_text(
        Path(own).read_text().replace("lrs=(0.01, 0.02), rows=4", "lrs=(0.01, 0.02), tries=('steps=2',)")
    )
    experiment, best, ran = find(own), 0.1, []

    def trained(plan, experiment, arm, lr, seed, measure, tries=False):
        ran.append((lr, plan.config(experiment, arm, lr, seed, tries).steps))
        folder, key = kept.place(plan, experiment, arm, lr, seed, tries)
        run = Trained(arm.name, lr, seed, abs(lr - best) if lr < 0.4 else float("inf"), {})
        folder.mkdir(parents=True, exist_ok=True)
        (folder / kept.MEASURED).write_text(json.dumps({"key": key, "run": as_json(run)}))
        return run

    monkeypatch.setattr(running, "run_once", trained)
    steps = Schedule(own, "cpu", Path("up"), 2).config(experiment, experiment.arms[0], 0.01, 0).steps
    plan = Schedule(own, "cpu", Path("up"), 2)
    assert running.run_seed(plan, "fox", 1).lr == 0.1
    assert ran == [(0.01, 2), (0.02, 2), (0.05, 2), (0.1, 2), (0.2, 2), (0.1, steps)]
    assert [run.lr for run in kept.finished(plan, experiment, experiment.arm("fox"))[0]] == [0.01, 0.02, 0.05, 0.1, 0.2]
    best = 0.002
    assert running.run_search(Schedule(own, "cpu", Path("down"), 2), "fox").lr == 0.002
    assert min(lr for lr, _ in ran) == 0.001
    best = 1.0
    assert running.run_search(Schedule(own, "cpu", Path("diverges"), 2), "fox").lr == 0.2
    tasks, after = running._tasks(plan, experiment, experiment.arms)
    assert after["fox, seed 1"] == ["fox, best learning rate"]
    assert after["fox, best learning rate"] == ["fox, learning rate 0.01", "fox, learning rate 0.02"]


def test_learning_rates_of_another_size_are_taken_and_not_searched(own):
    plan = Schedule(own, "cpu", Path("out"), 2, rates={"fox": 0.3})
    tasks, _ = running._tasks(plan, find(own), find(own).arms)
    assert [label for label in tasks if "learning rate" in label] == []
    assert plan.grid(find(own), find(own).arm("fox")) == (0.3,)
    assert plan.grid(find(own), find(own).arm("none, one head")) == (0.1,)


def test_learning_rates_that_are_equal_to_six_digits_have_runs_of_their_own(own):
    plan, experiment = Schedule(own, "cpu", Path("out"), 2), find(own)
    folders = [
        plan.config(experiment, experiment.arms[0], lr, 0).output_dir for lr in (1e-3, 1.000001e-3, 1.0000012e-3)
    ]
    assert [Path(folder).name for folder in folders] == [
        f"lr{lr}-seed0" for lr in ("0.001", "0.001000001", "0.0010000012")
    ]


def test_small_models_share_a_gpu(monkeypatch):
    monkeypatch.setattr(running.os, "cpu_count", lambda: 16)
    assert running._jobs_at_a_time(None, 10**13) == 16
    assert running._jobs_at_a_time(139 * 2**30, 10**11) == 16
    assert running._jobs_at_a_time(78 * 2**30, 10**11) == 9
    assert running._jobs_at_a_time(78 * 2**30, 10**11, gpus=4) == 4
    assert running._jobs_at_a_time(4 * 2**30, 10**11) == 1
    assert running._jobs_at_a_time(139 * 2**30, 10**13) == 1


def test_single_arm_is_trained_and_the_page_has_what_there_is(done, monkeypatch):
    before = load_outcome(Path("out/result.json"))
    shutil.rmtree("out/fox")

    def refuse(*args, **kwargs):
        raise AssertionError("trained again")

    monkeypatch.setattr(running, "train", refuse)
    page = start(done, only=["none, one head"]).read_text()
    assert load_outcome(Path("out/result.json")).runs == tuple(before.of("none, one head"))
    assert "fox: 0 of 2 seeds" in page
    with pytest.raises(
        ValueError, match="unknown arm 'fix': expected one of fox, 'none, one head'; did you mean 'fox'"
    ):
        start(done, only=["fix"])


def test_run_that_diverges_is_no_choice_and_decides_nothing(done, monkeypatch):
    trained = running.train

    def diverge(config):
        if config.optimizer.lr in (0.01, 0.1):
            raise FloatingPointError("the loss is not finite")
        return trained(config)

    for path in [*Path("out").glob("none*/*/measured.json"), *Path("out/fox").glob("lr0.01-*/measured.json")]:
        path.unlink()
    monkeypatch.setattr(running, "train", diverge)
    page = start(done).read_text()
    outcome = load_outcome(Path("out/result.json"))
    assert {run.lr for run in outcome.of("fox")} == {0.02}
    (first, verdict), *_ = outcome.verdicts(find(done))
    assert (first.text, verdict.word) == ("It is.", "undecided")
    assert page.count("the loss is not finite") == 2  # both seeds of the arm that has one rate


def test_a_field_without_a_number_has_no_colour(done):
    whole = load_outcome(Path("out/result.json"))
    runs = tuple(replace(run, values={}, note="diverged") if run.arm != "fox" else run for run in whole.runs)
    page = render_experiment(find(done), replace(whole, runs=runs))
    assert '<td class="none"><b>–</b>' in page
    assert not re.search(r'<td style="--s: \d+%"><b>–', page)  # the colour of the best


def test_plan_goes_to_another_process(own):
    assert pickle.loads(pickle.dumps(Schedule(own, "cpu", Path("out"), 3))) == Schedule(own, "cpu", Path("out"), 3)


def test_outcome_that_was_changed_is_refused(done):
    path = Path("out/result.json")
    path.write_text(path.read_text().replace('"validation": ', '"validation": 1', 1))
    with pytest.raises(ValueError, match="not what was written"):
        load_outcome(path)


def test_brackets_are_text_in_the_terminal(done):
    outcome, experiment = load_outcome(Path("out/result.json")), find(done)
    texts = ("With beta in [a, b] it is.", "It ends in [/a].")
    expectations = tuple(replace(experiment.expectations[0], text=text) for text in texts)
    console = Console(record=True, width=200, file=io.StringIO())
    print_table(verdict_table(replace(experiment, expectations=expectations), outcome), console)
    said = console.export_text()
    for text in texts:
        assert text in said


def test_place_that_was_not_measured_is_named(done):
    outcome = load_outcome(Path("out/result.json"))
    with pytest.raises(ValueError, match=r"expected a place of 'wrong answers', 1, 2, got 3"):
        outcome.values(Value("fox", "wrong answers", 3.0))
    assert outcome.verdict(AtMost(Value("fox", "speed"), 1.0)).why == "fox: speed was not measured"
    nothing = tuple(replace(run, values={**run.values, "speed": {}}) for run in outcome.runs)  # a probe had none to say
    for place in (None, 1.0):
        verdict = replace(outcome, runs=nothing).verdict(AtMost(Value("fox", "speed", place), 1.0))
        assert (verdict.word, verdict.why) == ("undecided", "fox: speed was not measured")
    save_outcome(outcome, Path("again.json"))
    assert load_outcome(Path("again.json")) == outcome


def test_a_run_keeps_the_losses_of_its_training(done):
    outcome = load_outcome(Path("out/result.json"))
    for run in outcome.runs:
        [folder] = Path("out", folder_of(find(done).arm(run.arm))).glob(f"lr{run.lr:g}-seed{run.seed}")
        logged = [row for row in read_metrics(folder) if row["kind"] == "train"]
        assert run.curve
        assert run.curve == tuple((row["tokens"], row["loss"]) for row in logged)


def test_commands_list_and_show_every_experiment(own):
    listed = CliRunner().invoke(app, ["experiment", "list"])
    for name in names():
        assert name in listed.output
        shown = CliRunner().invoke(app, ["experiment", "show", name], catch_exceptions=False)
        assert all(each.source.split()[0] in shown.output for each in find(name).expectations)
        assert ("not yet run" in shown.output) == (not find(name).measured)
        words = " ".join(shown.output.split())
        for arm in find(name).arms:
            assert not arm.after or f"from the weights of {arm.after}" in words
            assert not arm.lrs or f"learning rates {', '.join(f'{lr:g}' for lr in arm.lrs)}" in words


def test_command_runs(done):
    arguments = ["experiment", "run", done, "--seeds", "2", "--jobs", "1", "--out", "out"]
    ran = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert ran.exit_code == 0
    assert "report: out/report.html" in ran.output
    loss = load_outcome(Path("out/result.json")).of("none, one head")[1].validation
    assert f"[6/6] none, one head, seed 1: held-out loss {loss:.4g}" in ran.output
    row = next(line for line in Path("out/result.md").read_text().splitlines() if line.startswith("| none, one head |"))
    cells = row.split("|")[3].split()
    alone = CliRunner().invoke(app, [*arguments, "--arm", "none, one head"], catch_exceptions=False)
    assert "[1/2] none, one head, seed 0: held-out loss " in alone.output
    said = " ".join(alone.output.split())
    assert " ".join(["none, one head (learning rate 0.1): wrong answers at 1", *cells]) in said
    assert "attnzoo experiment run mine.py --seeds 2" in Path("out/report.html").read_text()


def test_ordering_that_no_experiment_names_is_one_command(done):
    """Of an arm and a variant with options; what the arm's runs have is not done again where --out says so."""
    claim = "longer: fox < nope qk_norm=rms"
    shown = CliRunner().invoke(app, ["experiment", "show", done, "--claim", claim, "--seeds", "5"])
    assert "what 5 seeds see, by simulation:\n- in four of five experiments a difference of two models" in shown.output
    arguments = ["experiment", "run", done, "--seeds", "2", "--jobs", "1", "--out", "out", "--claim", claim]
    ran = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert "2 seeds see in four of five experiments a difference of two models of " in ran.output
    assert "[8/8] nope qk_norm=rms, seed 1: held-out loss " in ran.output
    outcome = load_outcome(Path("out/result.json"))
    assert {run.arm for run in outcome.runs} == {"fox", "nope qk_norm=rms"}
    page = html.unescape(Path("out/report.html").read_text())
    assert "longer: fox < nope qk_norm=rms." in page
    assert "attnzoo experiment run mine.py --seeds 2 --claim 'longer: fox < nope qk_norm=rms'" in page


def test_gains_of_both_sides_are_drawn_with_every_run(done):
    outcome = load_outcome(Path("out/result.json"))
    arms = ("none, one head", "fox")
    pairs = (arms, ("fox", "fox"), arms[::-1], ("none, one head", "none, one head"))
    claim = Correlated(("fox", "none, one head"), pairs, "wrong answers", (("a",), ("b",), ("c",), ("d",)))
    experiment = replace(find(done), expectations=(Expectation("They agree.", "nobody", claim),))
    page = render_experiment(experiment, outcome)
    assert "What a part gains on either side" in page
    assert page.count("none, one head | fox") == 1
    assert page.count('class="heat"') == 1 + len(experiment.arms)  # the grid and a map for each arm


def test_a_row_of_fewer_seeds_than_planned_says_how_many(done):
    outcome = load_outcome(Path("out/result.json"))
    outcome = replace(outcome, runs=tuple(run for run in outcome.runs if (run.arm, run.seed) != ("fox", 1)))
    page = markdown(find(done), outcome)
    assert "| fox (1 of 2 seeds) |" in page
    assert "| none, one head |" in page
    assert "nan" not in page
    assert " ," not in row_in_words(find(done), outcome, find(done).arms[0])
    assert "fox (1 of 2 seeds)</th>" in render_experiment(find(done), outcome)
