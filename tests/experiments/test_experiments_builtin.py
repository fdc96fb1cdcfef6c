"""The experiments of the catalogue: each can be run, and what is recorded of it follows from its numbers."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from thinning import in_long
from tiny_runs import EXPERIMENT as TINY

from attnzoo.config import load_config
from attnzoo.data.tasks import Examples, build_task
from attnzoo.experiments.asked import asked as of_claims
from attnzoo.experiments.claims import Correlated
from attnzoo.experiments.experiment import Experiment, find, names
from attnzoo.experiments.outcome import Outcome, load_outcome
from attnzoo.experiments.plan import Schedule, device_of
from attnzoo.experiments.report.experiment import markdown, render_experiment
from attnzoo.experiments.run import run_once
from attnzoo.models import LanguageModel
from attnzoo.models.swap import Unfilled

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.mark.parametrize("name", names())
def test_built_in_experiment_can_be_run(name, tmp_path, monkeypatch):
    """Every arm is a model that can be built, every size a training; tiny runs of its arms give every number."""
    monkeypatch.chdir(tmp_path)
    experiment = find(name)
    for size, arms in zip(experiment.sizes, (experiment.arms, *[experiment.arms[:1]] * 9), strict=False):
        for arm in arms:
            config = Schedule(name, size, Path("out"), 3).config(experiment, arm, 0.001, 0)
            with torch.device("meta"), Unfilled():
                LanguageModel(config.model)
            if config.data.task is not None:
                task = build_task(config.data.task, config.data.task_options)
                Examples(task, config.data.context_length)[0]
    Path("text.txt").write_text("one and two and three and four. " * 2000)
    data = () if config.data.task else ("data.source=text.txt", "data.context_length=16")
    small = replace(experiment.sizes["cpu"], rows=2, tokens=600)
    experiment = replace(experiment, sizes={**experiment.sizes, "cpu": small})
    plan = Schedule(name, "cpu", Path("out"), 3, (*TINY, *data), "cpu")
    missing = {probe.name for probe in experiment.probes}
    for arm in experiment.arms:
        lr = (arm.lrs or small.lrs)[0]
        run = run_once(plan, experiment, arm, lr, 0, measure=True)
        assert list(run.values) == [probe.name for probe in experiment.probes]
        assert all(list(run.values[probe.name]) in ([], [*probe.at]) for probe in experiment.probes)
        assert all(math.isfinite(x) for found in run.values.values() for x in found.values())
        missing -= {probe for probe, found in run.values.items() if found}
        if not missing:
            break
    assert not missing


@pytest.mark.parametrize("name", ["recall", "forgetting_recall"])
def test_random_tokens_give_no_asked_key_another_value(name):
    """The value that stands last behind a key is the one that is asked, at every size and for every probe."""
    experiment = find(name)
    for size in experiment.sizes:
        data = Schedule(name, size, Path("out"), 3).config(experiment, experiment.arms[0], 0.001, 0).data
        for probe in experiment.probes:
            task = build_task(data.task, {**data.task_options, **probe.options})
            tokens, answers = Examples(task, round(data.context_length * probe.lengths[0])).batch(range(20))
            values = [number for number, word in enumerate(task.words) if word.startswith("v")]
            for row, asked in zip(tokens, answers, strict=True):
                for place in (asked >= 0).nonzero()[0]:
                    before = row[: place - 1] == row[place]
                    behind = row[1:place][before]
                    assert behind[np.isin(behind, values)][-1] == asked[place]


def test_two_sides_of_the_factorial_have_the_same_layers():
    """All but what the delta rule cannot have or does not need: keys that are longer than 1, and a bias of beta. (GLA's
    gate of low rank is as large as Wall's of full rank at this size.)"""
    experiment, apart = find("factorial"), ("q_norm.weight", "k_norm.weight", "beta_proj.bias")
    sizes = {}
    for arm in experiment.arms:
        config = Schedule("factorial", "cpu", Path("out"), 3).config(experiment, arm, 0.001, 0)
        with torch.device("meta"), Unfilled():
            layer = LanguageModel(config.model).blocks[0].attention
        sizes[arm.name] = sum(p.numel() for name, p in layer.named_parameters() if not name.endswith(apart))
    claim = next(each.claim for each in experiment.expectations if isinstance(each.claim, Correlated))
    for linear, softmax in (claim.bases, *claim.pairs):
        assert sizes[linear] == sizes[softmax]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "arm"), [(name, arm) for name in names() for arm in find(name).arm_names])
def test_arm_of_a_built_in_experiment_runs_on_a_gpu(name, arm, tmp_path, monkeypatch):
    """A few steps at the size that is for it, after those of the arms that it starts from."""
    monkeypatch.chdir(tmp_path)
    experiment = find(name)
    few = ("steps=3", "optimizer.warmup_steps=1", "eval_tokens=4096", "log_every=1", "compile=false")
    few += ("data.source=stdlib",) if "data.source=tokens/packages" in experiment.settings else ()
    size = experiment.sizes["gpu"]
    experiment = replace(
        experiment, sizes={**experiment.sizes, "gpu": replace(size, rows=8, tokens=min(size.tokens, 40_000))}
    )
    plan, measured = Schedule(name, "gpu", Path("out"), 3, few), experiment.arm(arm)
    for before in map(experiment.arm, reversed(experiment.before(measured))):
        run_once(plan, experiment, before, (before.lrs or size.lrs)[0], 0, measure=False)
    run = run_once(plan, experiment, measured, (measured.lrs or size.lrs)[0], 0, measure=True)
    assert math.isfinite(run.validation)
    assert any(run.values.values())


def run_by(outcome: Outcome) -> Experiment:
    """The experiment that the command of a record runs: that of its orderings alone where it has `--claim`."""
    words = shlex.split(outcome.command)
    return of_claims(find(outcome.experiment), [claim for option, claim in pairwise(words) if option == "--claim"])


@pytest.mark.parametrize("name", names())
def test_recorded_results_follow_from_their_numbers(name):
    experiment = find(name)
    for measured in experiment.measured:
        outcome = load_outcome(RESULTS / measured.result)
        assert (outcome.experiment, outcome.size, outcome.date) == (name, measured.size, measured.date)
        page = markdown(run_by(outcome), outcome)
        assert (RESULTS / measured.result).with_suffix(".md").read_text() == page
        assert "-0.0" not in re.sub(r"-0\.0*[1-9]", "", page), "a number that is too small for its digits"
        seeds = {arm.name: len(outcome.of(arm.name)) for arm in experiment.arms}
        assert all(count == 0 if name in measured.lacks else count >= measured.seeds for name, count in seeds.items())
        assert measured.seeds >= 3 or "seed" in measured.tried, "say how many seeds of which models"
        words = {verdict.word for _, verdict in outcome.verdicts(experiment)}
        assert measured.tried or "not seen" not in words, "say what was tried"
        if measured in in_long(experiment.measured[-1:], experiment.measured):  # the same drawings, of other numbers
            render_experiment(run_by(outcome), outcome)


@pytest.mark.parametrize("name", names())
def test_runs_that_are_compared_seed_by_seed_begin_with_the_same_weights(name):
    """They are or start from one arm's runs, or are models of the same parameters, drawn with the same seed."""
    experiment = find(name)
    claims = [one for each in experiment.expectations for one in getattr(each.claim, "claims", (each.claim,))]
    pairs = {tuple(value.arm for value in claim.values) for claim in claims if getattr(claim, "paired", False)}
    for arms in ([experiment.arm(name) for name in pair] for pair in pairs):
        if len({arm.after or arm.name for arm in arms}) == 1:
            continue
        first = []
        for arm in arms:
            config = Schedule(name, "cpu", Path("out"), 3).config(experiment, arm, 0.001, 0)
            with torch.device("meta"), Unfilled():
                first.append([(key, p.shape) for key, p in LanguageModel(config.model).named_parameters()])
        assert first[0] == first[1]


@pytest.mark.parametrize("name", names())
def test_command_of_a_recorded_result_makes_its_runs(name):
    """Its settings are those that the same command has now."""
    for measured in find(name).measured:
        outcome = load_outcome(RESULTS / measured.result)
        experiment = run_by(outcome)
        arm, size = experiment.arms[0], experiment.sizes[measured.size]
        overrides = tuple(word for word in shlex.split(outcome.command) if "=" in word)
        plan = Schedule(name, measured.size, Path(), 3, overrides, device_of(measured.size))
        taken = [run.lr for run in outcome.runs if run.arm == arm.name and "--rates" in outcome.command]
        now = plan.config(experiment, arm, (taken or arm.lrs or size.lrs)[0], 0)
        assert load_config(yaml.safe_load(outcome.settings)) == now
        there = [found for found in experiment.arms if found.name not in measured.lacks]
        if "--rates" in outcome.command:  # nothing is searched
            chosen = load_outcome(RESULTS.parents[1] / shlex.split(outcome.command)[-1])
            assert all(run.lr == chosen.of(run.arm)[0].lr for run in (*outcome.tried, *outcome.runs))
            continue
        for found in there:
            tried, grid = {run.lr for run in outcome.tried if run.arm == found.name}, set(found.lrs or size.lrs)
            assert tried == grid or (size.tries and tried > grid)


def test_page_of_results_has_every_claim_and_picture_of_the_records(monkeypatch):
    monkeypatch.syspath_prepend(str(RESULTS.parent / "figures"))
    import results as page_of_results

    page = (RESULTS / "index.md").read_text()
    assert page == page_of_results.with_claims(page), "python docs/figures/make.py tables"
    assert sorted(name for group in page_of_results.QUESTIONS.values() for name in group) == names()
    for name in names():
        for each in find(name).measured:
            assert f"(../figures/out/{page_of_results.drawing(name, each)}.svg)" in page
            for expectation in find(name).judged(each.size):
                assert f"| {expectation.text} | {expectation.source} | " in page


def test_page_of_results_says_at_which_sizes_some_models_alone_were_run():
    page = (RESULTS / "index.md").read_text()
    (said,) = re.findall(r"^\*\*Not yet run on a GPU\*\*.*\*\*In part\*\*: (.*)\.$", page, re.MULTILINE)
    told = {(name, size): (int(ran), int(of)) for name, size, ran, of in re.findall(
        r"`(\w+)` at `([\w-]+)` \((\d+) of (\d+) models\)", said)}  # fmt: skip
    for name in names():
        experiment = find(name)
        for each in (each for each in experiment.measured if each.size.startswith("gpu")):
            ran = {run.arm for run in load_outcome(RESULTS / each.result).runs}.intersection(experiment.arm_names)
            counts = len(ran), len(experiment.arms)
            assert told.get((name, each.size), (counts[1],) * 2) == counts


def test_every_picture_of_the_page_of_results_says_something_else():
    page = (RESULTS / "index.md").read_text()
    for found in (re.findall(rule, page, re.MULTILINE) for rule in (r"^\*(`.*`\. .*)\*$", r"^!\[(.*)\]\(")):
        assert len(found) == len(set(found)) == sum(len(find(name).measured) for name in names())


def test_a_discount_looks_as_far_ahead_at_every_size_as_a_share_of_the_context():
    for name, arm in (("learned_forgetting", "rope, discount"), ("forgetting_text", "discount"),
                      ("forgetting_ablations", "discount")):  # fmt: skip
        experiment, ahead = find(name), {}
        for size in experiment.sizes:
            config = Schedule(name, size, Path("out"), 3).config(experiment, experiment.arm(arm), 0.01, 0)
            [options] = {layer.options["forgetting"]["discount"] for layer in config.model.layers()}
            ahead[size] = 1 / (1 - options) / config.data.context_length
        assert ahead["gpu"] == pytest.approx(ahead["cpu"]), name
