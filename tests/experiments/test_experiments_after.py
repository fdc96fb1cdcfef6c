"""Arms of an experiment that start from the weights of another."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from own_experiment import start, write_own

from attnzoo.experiments import kept
from attnzoo.experiments import run as running
from attnzoo.experiments.experiment import find
from attnzoo.experiments.outcome import load_outcome
from attnzoo.experiments.plan import Schedule


@pytest.fixture
def chained(tmp_path, monkeypatch):
    """The name of an experiment whose arm "on" starts from the weights of another, in the folder that is current."""
    monkeypatch.chdir(tmp_path)
    name = write_own()
    arm = 'Arm("on", "nope", settings=("model.num_heads=1",), lrs=(1e-12,), after="none, one head"),'
    Path(name).write_text(Path(name).read_text().replace("lrs=(0.1,))),", f"lrs=(0.1,)), {arm}),"))
    return name


def run_arm(plan, name):
    """All runs of an arm that has one learning rate."""
    for seed in range(plan.seeds):
        running.run_seed(plan, name, seed)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("optimizer.lr=0.1", "optimizer.lr"),
        ("optimizer={lr: 0.1}", "optimizer.lr"),
        ("model={attention: nope}", "model.attention"),
        ("model={attention_options: {window: 2}}", "model.attention_options"),
        ("model.attention_options.window=2", "model.attention_options"),
        ("data={seed: 3}", "data.seed"),
        ("start_from=elsewhere", "start_from"),
    ],
)
def test_an_override_of_what_each_run_sets_is_refused(chained, override, key):
    with pytest.raises(ValueError, match=rf"{re.escape(key)}: the experiment sets it for each run"):
        start(chained, overrides=(override,))
    assert not Path("out").exists()


def test_a_source_of_weights_beside_an_arm_s_own_is_refused(chained):
    text = Path(chained).read_text()
    text = text.replace('num_heads=1",), lrs=(1e-12,)', 'num_heads=1", "start_from=x"), lrs=(1e-12,)')
    Path(chained).write_text(text)
    with pytest.raises(ValueError, match="arm 'on': settings: start_from is set for each run"):
        start(chained)


def test_single_arm_comes_with_those_that_it_starts_from(chained):
    experiment = find(chained)
    for only, expected in ((["on"], ["none, one head", "on"]), (["fox"], ["fox"])):
        assert [arm.name for arm in running._with_those_before(experiment, only)] == expected


def test_rates_of_an_arm_after_another_are_tried_when_that_one_is_trained(chained):
    Path(chained).write_text(Path(chained).read_text().replace("lrs=(1e-12,)", "lrs=(1e-12, 2e-12)"))
    experiment, plan = find(chained), Schedule(chained, "cpu", Path("out"), 2, device="cpu")
    tasks, after = running._tasks(plan, experiment, experiment.arms)
    labels = list(tasks)  # one process takes them in this order
    assert after["on, learning rate 2e-12"] == ["none, one head, seed 0"]
    assert all(labels.index(before) < labels.index(label) for label in labels for before in after[label])


def test_arm_after_another_starts_from_the_weights_of_the_same_seed(chained):
    experiment, plan = find(chained), Schedule(chained, "cpu", Path("out"), 2, device="cpu")
    first, second = (running.run_seed(plan, "none, one head", seed).validation for seed in (0, 1))
    for seed, before in enumerate((first, second)):
        assert running.run_seed(plan, "on", seed).validation == pytest.approx(before, rel=1e-6)
    assert first != second
    _, after = running._tasks(plan, experiment, experiment.arms)
    assert {label: before for label, before in after.items() if before and not label.startswith("fox")} == {
        f"on, seed {seed}": [f"none, one head, seed {seed}"] for seed in (0, 1)
    }
    longer = replace(plan, overrides=("steps=3",))
    assert not kept.finished(longer, experiment, experiment.arm("on"))[1]
    elsewhere = replace(plan, out=Path("out").rename("other"))
    assert len(kept.finished(elsewhere, experiment, experiment.arm("on"))[1]) == 2
    with pytest.raises(ValueError, match="unknown after 'on' of the arm 'fox'"):
        replace(experiment, arms=(replace(experiment.arm("fox"), after="on"), *experiment.arms[1:]))
    with pytest.raises(ValueError, match="expected an arm with one learning rate, got 'fox' with 2"):
        plan.config(experiment, replace(experiment.arm("on"), after="fox"), 0.1, 0)


def test_arm_learns_from_the_run_of_the_same_seed_of_one_that_it_comes_after(chained):
    experiment, plan = find(chained), Schedule(chained, "cpu", Path("out"), 2, device="cpu")
    taught = replace(
        experiment.arm("on"), name="taught", after="on", teacher="none, one head",
        settings=("model.num_heads=1", "objective=distil"),
    )  # fmt: skip
    chain = replace(experiment, arms=(*experiment.arms, taught))
    config = plan.config(chain, taught, 1e-12, 1)
    assert (config.objective, config.teacher) == ("distil", "out/none-one-head/lr0.1-seed1")
    elsewhere = replace(plan, out=Path("other"))
    assert kept.place(elsewhere, chain, taught, 1e-12, 1)[1] == kept.place(plan, chain, taught, 1e-12, 1)[1]
    with pytest.raises(
        ValueError, match="unknown teacher 'fox' of the arm 'taught': expected one of on, 'none, one head'"
    ):
        replace(experiment, arms=(*experiment.arms, replace(taught, teacher="fox")))


def test_weights_that_stayed_behind_are_trained_again_where_an_arm_starts_from_them(chained, monkeypatch):
    plan, base = Schedule(chained, "cpu", Path("out"), 2, device="cpu"), "none, one head"
    run_arm(plan, base)
    on, before = running.run_seed(plan, "on", 0), running.run_seed(plan, base, 1)
    for checkpoints in Path("out").glob("*/*/checkpoints"):
        shutil.rmtree(checkpoints)
    trained, folders = running.train, []
    monkeypatch.setattr(running, "train", lambda config: [folders.append(config.output_dir), trained(config)])
    run_arm(plan, base)  # seed 0 is asked for by no arm any more
    assert folders == ["out/none-one-head/lr0.1-seed1"]
    run_arm(plan, "on")
    assert folders[1:] == ["out/on/lr1e-12-seed1"]
    assert running.run_seed(plan, "on", 0) == on
    assert running.run_seed(plan, "on", 1).validation == pytest.approx(before.validation, rel=1e-6)


def test_weights_that_another_training_gives_are_measured_with_those_that_start_from_them(chained, monkeypatch):
    """On a GPU training does not repeat itself to the bit; what is compared in pairs starts from the same weights."""
    plan, base, experiment = Schedule(chained, "cpu", Path("out"), 2, device="cpu"), "none, one head", find(chained)
    run_arm(plan, base)
    before = [running.run_seed(plan, base, 1), running.run_seed(plan, "on", 0)]
    trained, seeded = running.train, torch.manual_seed

    def lose_and_train_otherwise():
        for checkpoints in Path("out").glob("*/*/checkpoints"):
            shutil.rmtree(checkpoints)

        def train(config):
            with monkeypatch.context() as patch:
                patch.setattr(torch, "manual_seed", lambda seed: seeded(seed + 100))
                trained(config)

        monkeypatch.setattr(running, "train", train)

    lose_and_train_otherwise()
    again = running.run_seed(plan, base, 1)
    assert again.validation != before[0].validation
    assert running.run_seed(plan, base, 1) == again
    assert running.run_seed(plan, "on", 1).validation == pytest.approx(again.validation, rel=1e-6)
    assert running.run_seed(plan, "on", 0) == before[1]  # its own base was not trained again
    Path("out/none-one-head/lr0.1-seed0/measured.json").unlink()
    running.run_seed(plan, base, 0)
    assert [run.seed for run in kept.finished(plan, experiment, experiment.arm("on"))[1]] == [1]
    run_arm(plan, "on")
    assert running.run_seed(plan, "on", 0).validation == pytest.approx(running.run_seed(plan, base, 0).validation)


def test_arm_after_one_that_diverged_has_no_numbers_and_says_why(chained, monkeypatch):
    trained = running.train

    def diverge(config):
        if "none-one-head" in config.output_dir and config.seed == 1:
            raise FloatingPointError("the loss is not finite")
        return trained(config)

    monkeypatch.setattr(running, "train", diverge)
    page = start(chained, only=("on",)).read_text()
    outcome = load_outcome(Path("out/result.json"))
    one, other = outcome.of("on")
    assert one.values
    assert not one.note
    assert not other.values
    assert other.note == "none, one head, whose weights it would start from: the loss is not finite"
    assert page.count("the loss is not finite") == 2
