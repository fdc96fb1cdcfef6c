"""What an experiment, a probe and a command refuse before anything is trained, and what a probe compares."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from attnzoo.cli import app
from attnzoo.config import load_config
from attnzoo.data.tasks import Examples, build_task
from attnzoo.experiments.claims import AtLeast, AtMost, Below, Correlated, Value
from attnzoo.experiments.experiment import Arm, Expectation, Experiment, Measured, Size
from attnzoo.experiments.forgetting_probes import AddedLoss, KeysHeld, WrongWithin
from attnzoo.experiments.plan import Schedule
from attnzoo.experiments.probes import (
    AddedByLength,
    KeptBlocks,
    Loss,
    LossByPlace,
    Probed,
    PrunedLoss,
    Wrong,
    WrongOver,
)
from attnzoo.experiments.run import run_experiment
from attnzoo.models import LanguageModel


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arms": ()}, "arms: expected some"),
        ({"arms": (Arm("a", "fox"), Arm("a", "nope"))}, "distinct names, got a, a"),
        ({"expectations": (Expectation("", "", AtMost(Value("b", "loss"), 1.0)),)}, "unknown arm 'b' of a claim"),
        ({"expectations": (Expectation("", "", AtMost(Value("a", "los"), 1.0)),)}, "did you mean 'loss'"),
        ({"expectations": (Expectation("", "", AtMost(Value("a", "loss", 2.0), 1.0)),)}, "of 'loss', 1, got 2 for 'a'"),
        ({"maps": ("lost",)}, "did you mean 'loss'"),
        ({"seeds": 1}, "seeds: expected at least 2, got 1"),
        ({"arms": Arm("a", "fox")}, r"arms: expected a tuple, as \(a, b\) or \(a,\), got Arm\(name='a'"),
        ({"settings": "steps=2"}, "settings: expected a tuple, .* got 'steps=2'"),
        ({"sizes": Size((), (0.1,))}, r"sizes: expected some by name, .* got Size\("),
        ({"probes": (Wrong("loss", lengths=1.0),)}, r"at of the probe 'loss': expected a tuple, .* got 1.0"),
        (
            {"arms": (Arm("a", "fox", at={"gp": {"window": 8}}),)},
            "unknown size 'gp' of the arm 'a': expected one of cpu",
        ),
        (
            {"expectations": (Expectation("It is.", "", AtMost(Value("a", "loss"), 1.0), ("gp",)),)},
            "unknown size 'gp' of the expectation 'It is.': expected one of cpu",
        ),
        (
            {"measured": (Measured("cpu", "2026-01-31", "a laptop", "a.json", lacks=("b",)),)},
            "unknown lacks 'b' of the result 'a.json': expected one of a",
        ),
    ],
)
def test_experiment_that_contradicts_itself_is_refused(change, message):
    fine = Experiment("", "", (Arm("a", "fox"),), {"cpu": Size((), (0.1,))}, (Loss(),), ())
    with pytest.raises(ValueError, match=message):
        replace(fine, **change)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda value: AtMost(value, "0.05"), "limit: expected a number that float32 holds, got '0.05'"),
        (lambda value: AtLeast(value, None), "limit: expected a number .*, got None"),
        (lambda value: Below(value, value, by="a"), "by: expected a number .*, got 'a'"),
        (lambda value: Value("a", "loss", "1"), "at: expected a number .* or None, got '1'"),
        (lambda value: Correlated(("a", "b"), (("a", "b"),) * 9, "loss"), "got 9 of which p is never below 1"),
        (lambda value: Correlated(("a", "b"), (("a", "b"),), "loss"), "pairs: expected ones .*, got 1 of which p"),
        (lambda value: Expectation("It is.", "", value), r"claim: expected one, as AtMost.*, got Value\(arm='a'"),
    ],
)
def test_claim_that_could_not_be_judged_is_refused_where_it_is_made(make, message):
    with pytest.raises(ValueError, match=message):
        make(Value("a", "loss"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AddedLoss("x", "windo"), "unknown rule 'windo' of the probe 'x': .*did you mean 'window'"),
        (lambda: WrongWithin("x", "forget"), "unknown rule 'forget' of the probe 'x': .*did you mean 'forgets'"),
        (lambda: KeysHeld("x", "h2o"), "unknown rule 'h2o' of the probe 'x': expected one of certified, forgets"),
        (lambda: AddedLoss("x", "h2o", (0.5, 0.0)), r"shares: expected numbers in \(0, 1\] of the probe 'x', got 0.0"),
        (lambda: WrongWithin("x", "h2o", (1.5,)), r"shares: expected numbers in \(0, 1\] of the probe 'x', got 1.5"),
        (lambda: WrongWithin("x", "h2o", 0.5), r"shares of the probe 'x': expected a tuple, .* got 0.5"),
    ],
)
def test_rule_that_a_probe_does_not_know_is_refused_where_it_is_made(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("probe", "message"),
    [
        (Wrong("w", {"quests": 1}), "arm 'a': 'w': unknown option 'quests' .*did you mean 'questions'"),
        (Wrong("w", {"questions": 0}), "arm 'a': 'w': questions: expected 1 to"),
        (Wrong("w", {"vocab_size": 9}), "'w': expected the 16 tokens of training, got 9 others"),
        (Wrong("w", lengths=(1.0, 0.1)), "arm 'a': 'w': length: expected at least 3 tokens"),
        (WrongOver("w", "question", (1, 2)), "'w': unknown option 'question' .*did you mean 'questions'"),
        (WrongOver("w", "questions", (1, 9)), "'w': length: expected at least 19 tokens"),
    ],
)
def test_options_of_a_probe_are_tried_before_any_training(probe, message, tmp_path, monkeypatch):
    settings = ("data.source=task:induction", "data.context_length=16")
    sizes = {"cpu": Size((), (0.1,))}
    mine = Experiment("", "", (Arm("a", "fox"),), sizes, (probe,), (), settings)
    monkeypatch.setattr("attnzoo.experiments.run.find", lambda name: mine)
    with pytest.raises(ValueError, match=message):
        run_experiment(Schedule("mine", "cpu", tmp_path / "out", 2), Console(quiet=True))
    assert not (tmp_path / "out").exists()


def test_one_thing_in_place_of_a_tuple_is_refused():
    for make in (lambda: Size((), 0.1), lambda: Arm("a", "fox", lrs=0.1), lambda: Expectation("", "", None, "cpu")):
        with pytest.raises(ValueError, match=r"(lrs|sizes): expected a tuple, as \(a, b\) or \(a,\), got (0.1|'cpu')"):
            make()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arms": (Arm("a", "fox"), Arm("b", "fox", {"kvshift": 1}))}, "arm 'b': unknown option .*did you mean 'kv"),
        ({"probes": (Wrong("wrong"),)}, "arm 'a': 'wrong': expected a run on a task, got 'stdlib'"),
        ({"probes": (LossByPlace(bands=257),)}, "arm 'a': 'L.i.': bands: expected 1 to 256, .* got 257"),
        ({"probes": (LossByPlace(bands=0),)}, "arm 'a': 'L.i.': bands: expected 1 to 256, .* got 0"),
        *(
            ({"probes": (Loss(), probe)}, f"{re.escape(probe.name)}': the held-out split has .* length of 2560000")
            for probe in (
                LossByPlace(factor=10**4),
                AddedByLength(factor=10**4),
                KeptBlocks(lengths=(1.0, 1e4)),
                PrunedLoss(length=1e4),
            )
        ),
        ({"settings": ("data.source=task:mqar",)}, "arm 'a': 'loss': expected a run on a text, got 'task:mqar'"),
    ],
)
def test_mistake_is_found_before_any_training(change, message, tmp_path, monkeypatch):
    mine = replace(Experiment("", "", (Arm("a", "fox"),), {"cpu": Size((), (0.1,))}, (Loss(),), ()), **change)
    monkeypatch.setattr("attnzoo.experiments.run.find", lambda name: mine)
    with pytest.raises(ValueError, match=message):
        run_experiment(Schedule("mine", "cpu", tmp_path / "out", 2), Console(quiet=True))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("kind", "limit"), [(AtMost, 0.0), (AtLeast, 1.0), (AtLeast, 60.0)])
def test_claim_about_a_share_that_can_never_be_seen_is_refused(kind, limit):
    claim = Expectation("It is.", "", kind(Value("a", "wrong"), limit))
    with pytest.raises(ValueError, match=f"limit: expected a share between 0 and 1 of a, got {limit:g}"):
        Experiment("", "", (Arm("a", "fox"),), {"cpu": Size((), (0.1,))}, (Wrong("wrong"),), (claim,))


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        ("fox", "claim: expected an ordering of models, each once, as 'fox < rope', got 'fox'"),
        ("fox < rope < fox", "claim: expected an ordering of models, each once, as 'fox < rope', got"),
        ("fox block='llama < rope", "claim: expected a variant with options as in a shell, got .*No closing quotation"),
        ("rope < rwkv7_pth", "unknown arm 'rwkv7_pth' .*did you mean 'rwkv7_path'"),
        ("fox < ", "claim: expected an ordering of models"),
        ("fox < rpe", "unknown arm 'rpe' .*: expected one of .*, 'fox, open', .*, or a variant with options"),
        ("los: fox < rope", "unknown probe 'los' of a claim or a picture: .*did you mean 'loss'"),
        ("loss @ far: fox < rope", "claim: expected a number behind @, got 'far'"),
        ("L(i) @ 9: fox < rope", "at: expected a place of 'L.i.', .* got 9 for 'fox'"),
        ("fox kvshift=1 < rope", "unknown option 'kvshift'"),
    ],
)
def test_ordering_that_cannot_be_asked_names_what_exists(claim, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command in (["show", "pairs"], ["run", "pairs", "data.source=stdlib"]):
        error = CliRunner().invoke(app, ["experiment", *command, "--claim", claim]).exception
        assert isinstance(error, ValueError)
        assert re.search(message, str(error))
    assert not list(tmp_path.iterdir())


def test_probes_say_what_they_need():
    config = load_config(None, ["data.source=text.txt"])
    subject = Probed(LanguageModel(config.model), config, None, [], 2, 100)
    with pytest.raises(ValueError, match=r"expected a run on a task, got one on 'text.txt'"):
        Wrong("wrong").measure(subject)
    config = load_config(None, ["data.source=task:parity"])
    data = SimpleNamespace(heldout=Examples(build_task("parity"), 8))
    with pytest.raises(ValueError, match=r"expected a run on a text, got one on 'task:parity'"):
        Loss().measure(replace(subject, config=config, data=data))


def test_a_longer_context_is_compared_on_the_same_text(monkeypatch):
    """A model whose loss is the token asked for and, beyond 8 tokens, 0.5 more: all text costs what it costs."""

    def losses(model, windows):
        late = torch.arange(windows.shape[1] - 1) >= 8
        return (windows[:, 1:] + 0.5 * late).double().numpy()

    monkeypatch.setattr("attnzoo.experiments.probes.token_losses", losses)
    windows = torch.arange(3 * 33).view(3, 33)
    config = load_config(None, ["data.context_length=8"])
    subject = SimpleNamespace(model=None, windows=lambda factor: windows, losses=partial(losses, None), config=config)
    assert AddedByLength().measure(subject) == {2.0: 0.5, 3.0: 0.5, 4.0: 0.5}
    assert LossByPlace().measure(subject)[4.0] > LossByPlace().measure(subject)[1.0] + 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "party"], "unknown experiment 'party' .*did you mean 'parity'.*: .*`attnzoo experiment list`"),
        (
            ["show", "my.py"],
            "unknown experiment 'my.py': .*, or a Python file, of which there is none of that path from h",
        ),
        (["run", "parity", "--size", "gpus"], "unknown size 'gpus': expected one of cpu, gpu; did you mean 'gpu'"),
        (["run", "parity", "optimizer.lr=1"], "optimizer.lr: the experiment sets it"),
        (["run", "parity", "stepz=1"], "unknown configuration key 'stepz'.*did you mean 'steps'"),
    ],
)
def test_mistake_names_what_exists(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = CliRunner().invoke(app, ["experiment", *arguments]).exception
    assert isinstance(error, ValueError)
    assert re.search(message, str(error))
    assert not list(tmp_path.iterdir())


def test_the_size_for_a_gpu_is_run_on_a_cpu_only_when_that_is_said(tmp_path, monkeypatch):
    ran = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(
        "attnzoo.experiments.run.run_experiment", lambda plan, _, command, *rest: ran.append((plan.device, command))
    )
    command = ["experiment", "run", "parity", "--size", "gpu"]
    error = CliRunner().invoke(app, command).exception
    assert "--size gpu: expected a CUDA GPU, found none; `--device cpu` runs it all the same" in str(error)
    CliRunner().invoke(app, [*command, "--device", "cpu"], catch_exceptions=False)
    larger = [*command[:2], "factorial", "--size"]
    assert "--size gpu-medium: expected a CUDA GPU" in str(CliRunner().invoke(app, [*larger, "gpu-medium"]).exception)
    CliRunner().invoke(app, [*larger, "cpu-medium"], catch_exceptions=False)
    CliRunner().invoke(app, [*command[:2], "s3", "model={num_layers: 2}", "--seeds", "4"], catch_exceptions=False)
    assert ran == [
        ("cpu", "attnzoo experiment run parity --size gpu --device cpu"),
        ("cpu", "attnzoo experiment run factorial --size cpu-medium"),
        ("cpu", "attnzoo experiment run s3 'model={num_layers: 2}' --seeds 4"),  # as a shell reads it
    ]
