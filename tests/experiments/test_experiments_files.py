"""Experiments of one's own: what their files may hold, and what a run of them is."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from tiny_runs import EXPERIMENT as TINY

from attnzoo.experiments.claims import Value
from attnzoo.experiments.experiment import Arm, Experiment, Size, find, layers_of
from attnzoo.experiments.outcome import load_outcome
from attnzoo.experiments.plan import Schedule
from attnzoo.experiments.probes import Loss
from attnzoo.experiments.run import run_experiment


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\nx = = 1", r"mine\.py, line 2: SyntaxError: invalid syntax"),
        ("from attnzoo import nothing", r"mine\.py, line 1: ImportError: cannot import name 'nothing'"),
        ("def main(): return 0\n\nraise SystemExit(main())", r"mine\.py, line 3: SystemExit: 0"),
        ("Experiment = dict\n\nEXPERIMENT = Experiment(1)", r"mine\.py, line 3: TypeError: 'int' object"),
        ("import math\nEXPERIMENT = math.sqrt(-1)", r"mine\.py, line 2: math domain error"),
    ],
    ids=["syntax", "import", "end", "type", "value"],
)
def test_file_that_fails_is_named_with_its_line(text, message, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        find(str(path))


def test_probe_of_one_s_own_may_be_a_dataclass(tmp_path):
    """Whose annotations are text: it looks for its module among those that are imported."""
    path = tmp_path / "probe.py"
    path.write_text("from __future__ import annotations\nfrom dataclasses import dataclass\n"
                    "@dataclass\nclass Own:\n    kind: ClassVar[str] = ''\nEXPERIMENT = Own()\n")  # fmt: skip
    with pytest.raises(TypeError, match=r"expected an Experiment as EXPERIMENT, got Own\("):
        find(str(path))


def test_an_experiment_may_read_several_texts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        Path(f"{name}.txt").write_text(f"{name} text. " * 300)
    text = "data.sources=[{source: a.txt}, {source: b.txt, weight: 2}]"
    sizes = {"cpu": Size((*TINY, text, "data.context_length=8"), (0.1,), tokens=64)}
    mine = Experiment("Mine", "?", (Arm("fox", "fox"),), sizes, (Loss(),), ())
    monkeypatch.setattr("attnzoo.experiments.run.find", lambda name: mine)
    run_experiment(Schedule("mine", "cpu", Path("out"), 2, device="cpu"), Console(quiet=True), jobs=1)
    first = load_outcome(Path("out/result.json"))
    assert len(first.values(Value("fox", "loss"))) == 2
    Path("b.txt").write_text("another text. " * 300)
    run_experiment(Schedule("mine", "cpu", Path("new"), 2, device="cpu"), Console(quiet=True), jobs=1)
    second = load_outcome(Path("new/result.json"))
    assert (second.values(Value("fox", "loss")) != first.values(Value("fox", "loss"))).all()


def test_options_of_an_arm_at_a_size_stand_in_the_place_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arm = Arm("fox", "fox", {"qk_norm": "l2", "window": 4}, at={"gpu": {"window": 8}})
    sizes = dict.fromkeys(("cpu", "gpu"), Size(TINY, lrs=(0.1,)))
    experiment = Experiment("Mine", "?", (arm,), sizes, (Loss(),), ())
    for size, window in (("cpu", 4), ("gpu", 8)):
        [layer] = {str(layer.options) for layer in Schedule("mine", size, Path("out"), 2)
                   .config(experiment, arm, 0.1, 0).model.layers()}  # fmt: skip
        assert layer == str({"qk_norm": "l2", "window": window})
    assert layers_of(experiment, arm, "gpu") == "fox, qk_norm=l2, window=8"
    assert layers_of(experiment, arm) == "fox, qk_norm=l2, window=4, at size gpu window=8"
    other = Arm("fox", "fox", at={"gpu": {"variant": "nope"}})
    for size, variant in (("cpu", "fox"), ("gpu", "nope")):
        config = Schedule("mine", size, Path("out"), 2).config(experiment, other, 0.1, 0)
        assert {layer.name for layer in config.model.layers()} == {variant}
        assert layers_of(experiment, other, size) == variant
