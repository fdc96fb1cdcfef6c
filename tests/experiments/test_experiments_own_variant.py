"""A variant of one's own in experiments: asked of a built-in one, or in an experiment's own file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from tiny_runs import EXPERIMENT as TINY

from attnzoo import files, registry
from attnzoo.cli import app
from attnzoo.experiments.experiment import find
from attnzoo.experiments.outcome import load_outcome
from attnzoo.training import load_run

PAIR = """
from attnzoo import Gate, Pair, register
from attnzoo.layer.gates import GateProjection

class Steady(GateProjection):
    provides = ("log_decay",)

    def forward(self, x, k, stream):
        return Gate(log_decay=x.new_full((*x.shape[:2], self.sizes.num_heads), -0.5)), None

LAYER = {"gate": (Steady,)}
register(Pair("steady_linear", "steady_softmax", ("log_decay",), linear_layer=LAYER, softmax_layer=LAYER))
"""
ASKED = f"""{PAIR}
from attnzoo.experiments.experiment import Experiment, Size, arms_of
from attnzoo.experiments.probes import Loss

EXPERIMENT = Experiment(
    "Mine", "?", arms_of("fox", "steady_softmax"), {{"cpu": Size({TINY}, (0.1,), tokens=64)}}, (Loss(),), (),
    settings=("data.source=text.txt", "data.context_length=8"),
)
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a text, in which nothing of one's own is registered yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(registry.FILES, "")
    Path("text.txt").write_text("one and two are three. " * 100)
    yield tmp_path
    forget()


def forget() -> None:
    if "steady_linear" in registry.list_variants():
        registry.unregister(registry.get("steady_linear").pair)
    files._run_file.cache_clear()


def run(*words: str) -> str:
    ran = CliRunner().invoke(app, words, catch_exceptions=False)
    assert ran.exit_code == 0
    return ran.output


def losses(out: str) -> dict[str, list[float]]:
    found = load_outcome(Path(out) / "result.json")
    return {arm: [run.validation for run in found.of(arm)] for arm in ("fox", "steady_softmax") if found.of(arm)}


def test_a_file_of_variant_and_experiment_runs_and_another_gate_is_trained_anew() -> None:
    """The file is run once for all that asks for it, and what it trained belongs to its text."""
    words = ("experiment", "run", "mine.py", "--seeds", "2", "--jobs", "1", "--out", "out")
    Path("mine.py").write_text(ASKED)
    run(*words)
    first, folders = losses("out"), {path.name for path in Path("out").iterdir()}
    Path("mine.py").write_text(ASKED.replace("-0.5", "-5.0"))
    forget()
    run(*words)
    second = losses("out")
    assert second["fox"] == first["fox"]
    assert all(a != b for a, b in zip(first["steady_softmax"], second["steady_softmax"], strict=True))
    [own] = {path.name for path in Path("out").iterdir()} - folders
    assert own.startswith("steady_softmax-")


def test_a_file_of_variant_and_experiment_is_taken_for_both_at_once() -> None:
    Path("mine.v2.py").write_text(ASKED)
    for words in (("--with", "mine.v2.py", "experiment", "show", "mine.v2.py"), ("show", "mine.v2.py:steady_softmax")):
        assert "steady_softmax" in run(*words)
    assert os.environ[registry.FILES].endswith("mine.v2.py")


def test_a_file_is_run_anew_only_where_its_text_has_changed() -> None:
    Path("mine.py").write_text(ASKED)
    found = find("mine.py")
    assert find("mine.py") is found
    Path("mine.py").write_text(ASKED.replace('"?"', '"!"'))
    forget()
    assert find("mine.py").question == "!"


def test_an_ordering_may_name_a_variant_of_a_file() -> None:
    """The result's command has the file, however it was given."""
    Path("pair.py").write_text(PAIR)
    small = ("data.source=text.txt", "data.context_length=8", *TINY, "--seeds", "2", "--jobs", "1", "--arm")
    asked = ("--claim", "pair.py:steady_softmax < fox")
    run("experiment", "run", "fox_gates", *small, "pair.py:steady_softmax", "--out", "out", *asked)
    [of] = {run.arm for run in load_outcome(Path("out/result.json")).runs}
    assert of == "pair.py:steady_softmax"
    assert "--claim 'pair.py:steady_softmax < fox'" in load_outcome(Path("out/result.json")).command
    assert os.environ[registry.FILES].endswith("pair.py")
    asked = ("--claim", "steady_softmax < fox")
    run("--with", "pair.py", "experiment", "run", "fox_gates", *small, "steady_softmax", "--out", "with", *asked)
    assert load_outcome(Path("with/result.json")).command.startswith("attnzoo --with pair.py experiment run fox_gates")


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        ("pair.py < fox", "claim: expected FILE.py:NAME with one of steady_linear, steady_softmax, got 'pair.py'"),
        ("loss: fox < pair.py:steady", "unknown variant 'steady' of pair.py: .*did you mean 'steady_(linear|softmax)'"),
        ("steady_softmax < fox", "unknown arm 'steady_softmax': expected .*, or FILE.py:NAME"),
        ("fox < fox window={", "claim: expected options that can be read, as 'window=512', got 'fox window={'"),
    ],
)
def test_ordering_about_a_file_that_cannot_be_asked_says_why(claim: str, message: str) -> None:
    Path("pair.py").write_text(PAIR)
    with pytest.raises(ValueError, match=message):
        CliRunner().invoke(app, ["experiment", "show", "pairs", "--claim", claim], catch_exceptions=False)


def test_a_run_says_where_the_file_of_its_variant_has_changed(caplog: pytest.LogCaptureFixture) -> None:
    """Gone on with or looked at; not a word where the file is as it was."""
    of = ("data.source=text.txt", "data.context_length=8", "model.attention=steady_softmax", "output_dir=out", *TINY)
    Path("pair.py").write_text(PAIR)
    run("--with", "pair.py", "train", "tiny", *of)
    for text, said in ((PAIR, 0), (PAIR.replace("-0.5", "-5.0"), 1)):
        Path("pair.py").write_text(text)
        forget()
        caplog.clear()
        run("--with", "pair.py", "train", "tiny", *of)
        load_run("out")
        lines = [line for line in caplog.messages if "Python file of steady_softmax has changed since" in line]
        assert (len(lines) > 0) == said
