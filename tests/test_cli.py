"""The command line: what each command does, and that a mistake is one clear line and exit code 2."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from attnzoo import cli, describe, get, list_variants, pairs
from attnzoo import verify as verification
from attnzoo.config import load_config
from attnzoo.experiments import processes
from attnzoo.experiments.builtin import built_in
from attnzoo.experiments.compare import CompareConfig, plan
from attnzoo.models import LanguageModel
from attnzoo.registry import PAIRS
from attnzoo.training.metrics import Metrics

ROOT = Path(__file__).parents[1]
DEMO = built_in("compare")["demo"]
TINY = """
title: tiny comparison
output_dir: {folder}/runs
variants: [{{name: fox, options: {{acp: true}}}}, mamba2]
train:
  steps: 3
  batch_size: 2
  log_every: 1
  progress: quiet
  tensorboard: false
  model: {{hidden_size: 32, num_layers: 1, num_heads: 2}}
  data: {{source: {folder}/text.txt, context_length: 32}}
  optimizer: {{warmup_steps: 1}}
evaluate: {{tokens: 512, block: 16}}
"""


class Ran:
    """Exit code, standard output and standard error of one command."""

    def __init__(self, code: int, out: str, err: str):
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(*arguments: object) -> Ran:
        monkeypatch.setenv("COLUMNS", "140")
        monkeypatch.setattr(sys, "argv", ["attnzoo", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capsys.readouterr()
        return Ran(int(exit_.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A configuration that trains two small models in seconds."""
    sentences = (f"line {i}: the gate of token {i * i % 97} closes\n" for i in range(2000))
    (tmp_path / "text.txt").write_text("".join(sentences))
    config = tmp_path / "tiny.yaml"
    config.write_text(TINY.format(folder=tmp_path))
    return config


def assert_refused(ran: Ran, *parts: str) -> None:
    assert ran.code == 2
    lines = ran.err.strip().splitlines()
    assert len(lines) == 1, ran.err
    assert lines[0].startswith("attnzoo: ")
    for part in parts:
        assert part in lines[0]


def test_list_shows_every_pair_and_its_parts_in_80_columns(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ran = run("list")
    assert ran.code == 0
    rows = ran.out.splitlines()
    assert max(map(len, rows)) <= 80
    for pair in pairs():
        (row,) = [row.split() for row in rows if row.split()[1:3] == [pair.linear, pair.softmax]]
        assert len(row) == 3 + len(set(pair.requires) - {"beta"})


@pytest.mark.parametrize("name", list_variants())
def test_show_names_the_dual_the_gate_and_every_form(run: Any, name: str) -> None:
    ran = run("show", name)
    assert ran.code == 0
    variant = get(name)
    for word in (variant.dual.name, *variant.requires, *variant.forms):
        assert word in ran.out
    assert "\x1b" not in ran.out  # no colour where there is no terminal
    assert ran.out == describe(name) + "\n"


def test_show_speaks_ascii_to_a_terminal_that_knows_nothing_else() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "attnzoo.cli", "show", "path_fox"]
    ran = subprocess.run(command, env=environment, capture_output=True, check=True)
    assert ran.stdout.decode("ascii") == describe("path_fox", ascii_only=True) + "\n"


def test_verify_prints_a_row_per_form_and_passes(run: Any) -> None:
    ran = run("verify", "nope", "gated_deltanet")
    assert ran.code == 0
    for form in (*get("nope").forms, *get("gated_deltanet").forms, "extend"):
        assert re.search(rf"\b{form}\b", ran.out)
    assert "FAILED" not in ran.out


def broken(name: str, form: str, change: Any) -> Any:
    """``get`` with one form of one variant changed."""

    def get_broken(asked: str) -> Any:
        variant = get(asked)
        if asked != name:
            return variant
        forms = {**variant.forms, form: lambda *inputs: change(variant.forms[form](*inputs))}
        return dataclasses.replace(variant, forms=MappingProxyType(forms))

    return get_broken


def wrong_gradient(o: Tensor) -> Tensor:
    return o + 1e-6 * (o - o.detach())


@pytest.mark.parametrize("change", [lambda o: o * (1 + 1e-8), wrong_gradient, lambda o: o * torch.nan])
def test_verify_exits_1_when_a_form_is_wrong(run: Any, monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    monkeypatch.setattr(verification, "get", broken("retnet", "parallel", change))
    ran = run("verify", "retnet")
    assert ran.code == 1
    failed = [row for row in ran.out.splitlines() if "FAILED" in row]
    assert len(failed) == 1
    assert "parallel" in failed[0]


def test_forms_that_need_a_gpu_are_not_counted_as_verified_without_one(run: Any) -> None:
    ran = run("verify", "gla")
    if torch.cuda.is_available():
        assert "needs a GPU" not in ran.out
    else:
        assert "0 failed, 2 not run" in ran.out


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["lst"], ["'lst'", "'list'"]),
        (["show", "foks"], ["'foks'", "did you mean 'fox'"]),
        (["verify", "path_fax"], ["did you mean 'path_fox'"]),
        (["show"], ["'NAME'"]),
        (["show", "fox", "nope"], ["nope"]),
        (["show", "fox-pro-760m"], ["`attnzoo show --preset fox-pro-760m`"]),
        (["show", "fox", "no\npe"], ["no pe"]),
        (["show", "--preset", "fox-pro-750m"], ["'fox-pro-750m'", "MODEL-BLOCK-SIZE", "did you mean 'fox-pro-760m'"]),
        (["train", "fox-pro-12m"], ["did you mean 'fox-pro-125m'", "attnzoo list --presets"]),
        (["verify", "--sed", "1"], ["'--seed'"]),
        (["verify", "--seed", "x"], ["'x'"]),
        (["train", "missing.yaml"], ["missing.yaml", "fox_small, tiny"]),
        (["train", "tinny"], ["'tinny'", "did you mean 'tiny'"]),
        (["train", "configs/tiny.yaml"], ["'configs/tiny.yaml'", "did you mean 'tiny'"]),
        (["train", "tiny", "stepz=3"], ["'stepz'", "'steps'"]),
        (["train", "demo"], ["'demo'", "fox_small, tiny"]),
        (["train", "."], ["'.' is a folder", "data.source=."]),
        (["compare", "demos"], ["did you mean 'demo'"]),
        (["compare", "demo", "train.stepz=3"], ["'train.stepz'"]),
        (["compare", "missing.yaml"], ["missing.yaml"]),
        (["report", "missing"], ["missing"]),
        (["report"], ["RUN"]),
        (["report", ""], ["RUN", "expected a path, got ''"]),
        (["report", "x", "-o", "/dev/null/page.html"], ["--output='/dev/null'", "is not a folder"]),
        (["report", "x", "-o", ""], ["--output", "expected a path, got ''"]),
        (["compare", DEMO, "train.stepz=3"], ["'train.stepz'", "'train.steps'"]),
        (["compare", DEMO, "train.steps=three"], ["train.steps", "three"]),
        (["compare", DEMO, "steps"], ["'steps'", "key=value"]),
        (["compare", DEMO, "variants=[nope,foks]"], ["did you mean 'fox'"]),
        (["compare", DEMO, "variants=[]"], ["variants"]),
        (["compare", DEMO, "variants=[3]"], ["variants", "3"]),
        (["compare", DEMO, "variants=[fox,fox]"], ["'fox' twice"]),
        (["compare", DEMO, "variants=[{name: fox, option: {}}]"], ["'option'", "'options'"]),
        (["compare", DEMO, "variants=[nope,{name: fox, options: {acq: true}}]"], ["acq", "acp"]),
        (["compare", DEMO, "evaluate.length_factor=0"], ["length_factor"]),
    ],
)
def test_mistake_is_one_line_that_names_the_nearest(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], parts: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(run(*arguments), *parts)
    assert list(tmp_path.iterdir()) == []  # nothing was trained before it was noticed


def test_error_of_our_own_is_kept_apart_from_a_bug(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(name: str) -> Any:
        raise KeyError(name)

    monkeypatch.setattr("attnzoo.equations.describe", bug)
    monkeypatch.setattr(sys, "argv", ["attnzoo", "show", "fox"])
    with pytest.raises(KeyError):
        cli.main()


def test_traceback_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNZOO_TRACEBACK", "1")
    monkeypatch.setattr(sys, "argv", ["attnzoo", "show", "foks"])
    with pytest.raises(ValueError, match="foks"):
        cli.main()


def test_help_lists_every_command_in_a_fresh_process() -> None:
    ran = subprocess.run([sys.executable, "-m", "attnzoo.cli", "--help"], capture_output=True, text=True, check=True)
    for command in ("list", "show", "verify", "train", "compare", "report", "bench"):
        assert re.search(rf"^  {command} ", ran.stdout, flags=re.MULTILINE)


def commands(group: click.Group) -> list[list[str]]:
    """The group itself, and every command at any depth, as words after the program's name."""
    found: list[list[str]] = [[]]
    for name, command in group.commands.items():
        deeper = commands(command) if isinstance(command, click.Group) else [[]]
        found += [[name, *words] for words in deeper]
    return found


def test_documented_help_is_what_the_commands_print() -> None:
    page = (ROOT / "docs" / "reference" / "cli.md").read_text()
    shown = re.findall(r"```text\n(.*?)\n```", page, flags=re.DOTALL)
    for command in commands(cli.app):
        ran = CliRunner().invoke(cli.app, [*command, "--help"], prog_name="attnzoo", terminal_width=78)
        assert ran.output.strip() in shown, command
    assert describe("path_fox") in shown  # the example of `attnzoo show`
    assert len(shown) == 1 + len(commands(cli.app))


def test_command_line_itself_loads_nothing_heavy() -> None:
    code = (
        "import sys, attnzoo; before = set(sys.modules); import attnzoo.cli; "
        "heavy = {'torch', 'numpy', 'matplotlib', 'accelerate', 'omegaconf', 'jinja2', 'transformers', 'rich'}; "
        "print(sorted((set(sys.modules) - before) & heavy))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.fixture
def tiny_train(tiny: Path, tmp_path: Path) -> Path:
    """The configuration of one of the tiny runs."""
    path = tmp_path / "train.yaml"
    body = tiny.read_text().partition("train:\n")[2].partition("evaluate")[0]
    path.write_text("\n".join(line[2:] for line in body.splitlines()))
    return path


def test_train_trains(run: Any, tiny_train: Path, tmp_path: Path) -> None:
    ran = run("train", tiny_train, f"output_dir={tmp_path}/one", "model.attention=gla")
    assert ran.code == 0
    assert f"{tmp_path}/one" in ran.out
    assert len((tmp_path / "one" / "metrics.jsonl").read_text().splitlines()) == 4  # three steps and an evaluation


def test_compare_trains_measures_and_reports_and_does_not_do_it_twice(run: Any, tiny: Path, tmp_path: Path) -> None:
    ran = run("compare", tiny)
    assert ran.code == 0, ran.err
    page = (tmp_path / "runs" / "report.html").read_text()
    for label in ("fox (acp)", "mamba2"):
        assert label in ran.out
        assert page.count(f"Forget gate of {label}, head") == 2
    assert "192 tokens each in 3 steps" in page
    assert f"attnzoo compare {tiny}" in page
    assert "short convolution in mamba2" in page

    files = {path: path.read_bytes() for path in (tmp_path / "runs").glob("*/*.*") if path.is_file()}
    stamps = {path: path.stat().st_mtime_ns for path in files if path.name.startswith("evaluation")}
    again = run("compare", tiny, "variants=[{name: fox, options: {acp: true}}, mamba2, nope]")
    assert again.code == 0, again.err
    assert {path: path.read_bytes() for path in files} == files
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert 'data-series="nope"' in (tmp_path / "runs" / "report.html").read_text()


def test_compare_with_several_jobs_gives_the_same_losses(run: Any, tiny: Path, tmp_path: Path) -> None:
    ran = run("compare", tiny, "--jobs", "2")
    assert ran.code == 0, ran.err
    assert "[2/2]" in ran.out
    assert f"attnzoo compare {tiny} --jobs 2" in (tmp_path / "runs" / "report.html").read_text()
    apart = {path.parent.name: losses(path) for path in (tmp_path / "runs").glob("*/metrics.jsonl")}
    assert run("compare", tiny, f"output_dir={tmp_path}/one").code == 0
    assert {path.parent.name: losses(path) for path in (tmp_path / "one").glob("*/metrics.jsonl")} == apart
    assert sorted(apart) == ["fox-acp", "mamba2"]


def losses(metrics: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


def test_a_run_that_fails_in_a_process_of_its_own_is_named() -> None:
    done: list[str] = []
    with pytest.raises(ChildProcessError, match=r"third: .*str"):  # the second one is stopped, not waited for
        done.extend(processes.apart(time.sleep, {"first": (0,), "second": (600,), "third": ("x",)}, 2))
    assert done == ["first"]
    assert list(processes.apart(time.sleep, {"first": (600,)}, 1, until=time.monotonic() + 0.1)) == []


def test_compare_measures_again_when_the_measuring_changes(run: Any, tiny: Path, tmp_path: Path) -> None:
    assert run("compare", tiny, "variants=[nope]").code == 0
    metrics = (tmp_path / "runs" / "nope" / "metrics.jsonl").read_bytes()
    ran = run("compare", tiny, "variants=[nope]", "evaluate.length_factor=2")
    assert "P(64)" in ran.out
    assert (tmp_path / "runs" / "nope" / "metrics.jsonl").read_bytes() == metrics


def test_compare_refuses_runs_of_another_budget(run: Any, tiny: Path) -> None:
    assert run("compare", tiny, "variants=[nope]").code == 0
    assert_refused(run("compare", tiny, "variants=[nope]", "train.steps=4"), "steps was 3 and is 4 now")


def test_text_too_short_to_measure_is_noticed_before_training(run: Any, tiny: Path, tmp_path: Path) -> None:
    assert_refused(run("compare", tiny, "evaluate.length_factor=400"), "12800", "12801")
    assert not (tmp_path / "runs").exists()


def test_compare_refuses_a_task_before_training(run: Any, tiny: Path, tmp_path: Path) -> None:
    assert_refused(run("compare", tiny, "train.data.source=task:parity"), "'task:parity'", "attnzoo evaluate")
    assert not (tmp_path / "runs").exists()


def test_report_rebuilds_the_page_from_the_runs(run: Any, tiny: Path, tmp_path: Path) -> None:
    assert run("compare", tiny).code == 0
    first = (tmp_path / "runs" / "report.html").read_text()
    ran = run("report", tmp_path / "runs", "-o", tmp_path / "again.html", "--title", "tiny comparison")
    assert ran.code == 0, ran.err
    assert (tmp_path / "again.html").read_text() == first
    one = run("report", tmp_path / "runs" / "mamba2", "-o", tmp_path / "one.html")
    assert one.code == 0
    assert 'data-series="fox' not in (tmp_path / "one.html").read_text()


def test_report_measures_runs_that_were_trained_one_by_one(run: Any, tiny_train: Path, tmp_path: Path) -> None:
    hybrid = ["model.attention=[mamba2,fox]", "model.num_layers=2"]
    assert run("train", tiny_train, f"output_dir={tmp_path}/runs/gla", "model.attention=gla").code == 0
    assert run("train", tiny_train, f"output_dir={tmp_path}/runs/mixed", *hybrid).code == 0
    ran = run("report", tmp_path / "runs", "-o", tmp_path / "page.html")
    assert ran.code == 0, ran.err
    page = (tmp_path / "page.html").read_text()
    for key in ("gla", "mixed"):
        assert f'<tr data-series="{key}"' in page


def test_demo_compares_the_twelve_variants_on_equal_budgets() -> None:
    every = plan(load_config(DEMO, schema=CompareConfig))
    runs = [run for run in every if run.group == "own layers"]
    twelve = "nope rope alibi fox path path_fox linear_attention retnet mamba2 gla deltanet gated_deltanet"
    assert [run.variant for run in runs] == twelve.split()
    assert [run.config.model.attention_options for run in runs if run.variant == "fox"] == [{"acp": True}]
    assert len({(run.config.steps, run.config.batch_size, run.config.data.context_length) for run in every}) == 1
    sizes = [sum(p.numel() for p in LanguageModel(run.config.model).parameters()) for run in every]
    assert max(sizes) < 1.15 * min(sizes)


def test_demo_has_every_pair_in_equal_layers() -> None:
    runs = [run for run in plan(load_config(DEMO, schema=CompareConfig)) if run.group == "equal layers"]
    names = [(pair.linear, pair.softmax) for pair in PAIRS]
    assert sorted(run.variant for run in runs) == sorted(name for pair in names for name in pair)
    sizes = {run.variant: sum(p.numel() for p in LanguageModel(run.config.model).parameters()) for run in runs}
    for linear, softmax in names:
        assert sizes[linear] == pytest.approx(sizes[softmax], rel=1e-3)  # all but a bias of beta and the scale of keys


def test_an_interrupted_run_says_how_to_go_on(run: Any, tiny_train: Path, tmp_path: Path, monkeypatch: Any) -> None:
    plain, keys = Metrics.append, [signal.SIGINT]  # pressed once

    def pressed(self: Metrics, row: Any) -> None:
        plain(self, row)
        if keys:
            os.kill(os.getpid(), keys.pop())

    monkeypatch.setattr(Metrics, "append", pressed)
    ran = run("train", tiny_train, f"output_dir={tmp_path}/one", "model.attention=gla", "checkpoint_every=1")
    assert ran.code == 130
    assert ran.err.strip() == f"attnzoo: stopped after step 2; train in {tmp_path}/one again to go on"


def test_an_interrupt_before_training_is_said(run: Any, monkeypatch: Any) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("attnzoo.registry.pairs", interrupted)
    ran = run("list")
    assert (ran.code, ran.err.strip()) == (130, "attnzoo: interrupted")


def test_the_end_of_a_file_is_no_interrupt(monkeypatch: Any) -> None:
    def ends(*arguments: object) -> None:
        raise EOFError("ran out of input")

    monkeypatch.setattr("attnzoo.registry.pairs", ends)
    monkeypatch.setattr(sys, "argv", ["attnzoo", "list"])
    with pytest.raises(EOFError, match="ran out of input"):
        cli.main()


def test_an_interrupt_that_nobody_reads_about_is_one(monkeypatch: Any) -> None:
    class Gone:
        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

        flush = isatty = fileno = lambda self, *rest: self.write("")

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("attnzoo.registry.pairs", interrupted)
    monkeypatch.setattr(sys, "argv", ["attnzoo", "list"])
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", Gone())
        with pytest.raises(SystemExit) as exit_:
            cli.main()
    assert exit_.value.code == 130


def test_a_wrong_type_is_one_line(run: Any, tiny_train: Path, tmp_path: Path) -> None:
    ran = run("train", tiny_train, f"output_dir={tmp_path}/one", "model.attention_options={acp: maybe}")
    assert_refused(ran, "acp", "maybe")


def test_show_needs_nobody_to_read_it(monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "argv", ["attnzoo", "show", "fox"])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 0


def test_the_package_runs_as_a_module() -> None:
    ran = subprocess.run([sys.executable, "-m", "attnzoo", "--version"], capture_output=True, text=True, check=True)
    assert "attnzoo" in ran.stdout
