"""The command line: what each command does, and that a mistake is one clear line and exit code 2."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from command_line import assert_refused
from torch import Tensor

from attnzoo import cli, describe, get, list_variants, pairs, registry
from attnzoo.experiments.builtin import built_in
from attnzoo.testing import LAWS
from attnzoo.training.metrics import Metrics

pytest_plugins = ("command_line",)
ROOT = Path(__file__).parents[2]
DEMO = built_in("compare")["demo"]


def test_verify_leaves_nothing_where_it_is_called(tmp_path: Path) -> None:
    here, cache = tmp_path / "here", tmp_path / "cache"
    here.mkdir()
    unset = {name: value for name, value in os.environ.items() if name != "HYPOTHESIS_STORAGE_DIRECTORY"}
    words = [sys.executable, "-m", "attnzoo", "verify", "nope"]
    subprocess.run(words, cwd=here, env={**unset, "XDG_CACHE_HOME": str(cache)}, check=True, capture_output=True)
    assert not list(here.iterdir())


@pytest.mark.parametrize("columns", [30, 80, 140])
def test_list_shows_every_pair_and_its_parts_in_80_columns(run: Any, columns: int) -> None:
    ran = run("list", columns=columns)
    assert ran.code == 0
    rows = ran.out.splitlines()
    assert max(map(len, rows)) <= 80
    for pair in pairs():
        (row,) = [row.split() for row in rows if row.split()[1:3] == [pair.linear, pair.softmax]]
        assert len(row) == 3 + len(set(pair.requires) - {"beta"})


@pytest.mark.parametrize("columns", [80, 60])
@pytest.mark.parametrize(
    "words", ["list", "show fox", "show rwkv7", "--help", "bench --help", "data list", "experiment list", "doctor"]
)
def test_what_a_newcomer_asks_fits_the_terminal(run: Any, words: str, columns: int) -> None:
    ran = run(*words.split(), columns=columns)
    assert ran.code == 0
    assert max(map(len, ran.out.splitlines())) <= columns
    assert "..." not in ran.out.partition("Commands:")[2]  # no help is cut off


def test_a_table_as_wide_as_the_terminal_has_no_empty_lines(run: Any) -> None:
    rows = run("list", "--presets", columns=80).out.splitlines()
    assert max(map(len, rows)) == 80
    assert not any(row.endswith(" ") for row in rows)


@pytest.mark.parametrize("name", list_variants())
def test_show_names_the_dual_the_gate_and_every_form(run: Any, name: str) -> None:
    ran = run("show", name)
    assert ran.code == 0
    variant = get(name)
    for word in (variant.dual.name, *variant.requires, *variant.forms):
        assert word in ran.out
    assert "\x1b" not in ran.out  # no colour where there is no terminal
    assert ran.out == describe(name) + "\n"


def test_show_speaks_ascii_to_a_terminal_that_knows_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr(sys, "argv", ["attnzoo", "show", "path_fox"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    sys.stdout.flush()
    assert not ended.value.code
    assert written.getvalue().decode("ascii") == describe("path_fox", ascii_only=True) + "\n"


def test_verify_prints_a_row_per_law_and_every_form(run: Any) -> None:
    ran = run("verify", "nope", "gated_deltanet", "--examples", "1")
    assert ran.code == 0
    for said in (*get("nope").forms, *get("gated_deltanet").forms, "extend", "layer", *LAWS):
        assert re.search(rf"\b{said}\b", ran.out)
    assert "FAILED" not in ran.out
    assert "largest error of each form" in ran.out


def broken(name: str, form: str, change: Any) -> Any:
    """``get`` with one form of one variant changed."""

    def get_broken(asked: str) -> Any:
        variant = get(asked)
        if asked != name:
            return variant

        def changed(*inputs: Any, **options: Any) -> Any:
            return change(variant.forms[form](*inputs, **options))

        return dataclasses.replace(variant, forms=MappingProxyType({**variant.forms, form: changed}))

    return get_broken


def wrong_gradient(o: Tensor) -> Tensor:
    return o + 1e-6 * (o - o.detach())


@pytest.mark.parametrize("change", [lambda o: o * (1 + 1e-8), wrong_gradient, lambda o: o * torch.nan])
def test_verify_exits_1_when_a_form_is_wrong(run: Any, monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    monkeypatch.setattr("attnzoo.testing.case.get", broken("retnet", "parallel", change))
    monkeypatch.setattr("attnzoo.verify.LAWS", {"oracle": LAWS["oracle"]})
    ran = run("verify", "retnet", "--examples", "3")
    assert ran.code == 1
    failed = [row for row in ran.out.splitlines() if "FAILED" in row]
    assert len(failed) == 2  # its row, and what is said below
    assert re.search(r"parallel: \w+ off by .* \(allowed 1e-10\)", ran.out)
    assert "check('oracle', Case('retnet', " in ran.out


def test_forms_that_need_a_gpu_are_not_counted_as_verified_without_one(run: Any) -> None:
    ran = run("verify", "gla", "--examples", "1")
    if torch.cuda.is_available():
        assert "needs a GPU" not in ran.out
    else:
        assert "0 failed, 3 not run" in ran.out  # two kernels, and pruning, which is for keys


MINE = """
from attnzoo import Pair, register
from attnzoo.algebra.diagonal import Diagonal
from attnzoo.algebra.transitions import Product
from attnzoo.recurrences.deltanet import Householder

erase = Householder()
register(Pair("wrapped", "wrapped_path", ("log_diag", "w", "beta"), transition=Product(erase, Diagonal(), erase)))
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file of one's own that registers a pair."""
    monkeypatch.setenv(registry.FILES, "")
    (file := tmp_path / "wrapped_pair.py").write_text(MINE)
    yield file
    for name in [name for name, of in registry._digests.items() if of]:
        if name in registry.list_variants("other"):
            registry.unregister_readout(name)
        elif name in registry.list_variants("linear"):
            registry.unregister(registry.get(name).pair)
    sys.modules.pop("wrapped_pair", None)


def test_a_file_is_listed_shown_and_verified_as_what_is_installed(run: Any, mine: Path) -> None:
    assert "wrapped_path" not in run("list").out
    assert "wrapped_path" in run("list", str(mine)).out
    assert "Rₜ = (I − βₜ wₜ wₜᵀ) Diag(exp(aₜ)) (I − βₜ wₜ wₜᵀ)" in run("show", str(mine)).out
    ran = run("verify", f"{mine}:wrapped", "--examples", "1", "--shape", "1,2,3,4")
    assert ran.code == 0
    assert "wrapped_path" not in ran.out
    for words in (("verify", f"{mine}:wraped"), ("show", f"{mine}:wraped")):
        assert "expected one of wrapped, wrapped_path; did you mean 'wrapped'?" in run(*words).err
    assert "expected a Python file that registers variants, found none" in run("verify", "missing.py").err
    assert run("list", "rwkv7").err.rstrip().endswith("; did you mean `attnzoo show rwkv7`?")
    (mine.parent / "empty.py").write_text("x = 1\n")
    assert "it registers none" in run("verify", str(mine.parent / "empty.py")).err


def test_a_model_of_a_file_is_trained_by_one_word(run: Any, mine: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("one word and another, " * 200)
    data = ["data.context_length=16", f"data.source={tmp_path / 'text.txt'}", "batch_size=2"]
    sizes = ["model.hidden_size=16", "model.num_heads=2", "model.num_layers=1", "model.attention_options={}"]
    steps = ["steps=1", "optimizer.warmup_steps=0", "eval_every=0", "tensorboard=false"]
    ran = run(
        "train", "tiny", *data, *sizes, *steps, f"output_dir={tmp_path / 'run'}", f"model.attention={mine}:wrapped"
    )
    assert ran.code == 0, ran.err
    assert "attention: wrapped\n" in (tmp_path / "run" / "config.yaml").read_text()
    assert run("evaluate", tmp_path / "run", mine, "--on", "loss").code == 0
    ran = run("train", "tiny", f"model.attention={mine}")
    assert "expected FILE.py:NAME with one of wrapped, wrapped_path" in ran.err


READOUT = """
from attnzoo import Readout, register_readout


class Sigmoid(Readout):
    equations = ("oₜ = Σⱼ σ(sₜⱼ + dₜⱼ) vⱼ",)

    def weights(self, scores):
        return (scores.s + scores.d).sigmoid()


register_readout("sigmoid_fox", Sigmoid(), "fox")
"""


def test_a_readout_of_a_file_is_listed_shown_verified_and_trained_by_one_word(
    run: Any, mine: Path, tmp_path: Path
) -> None:
    mine.write_text(READOUT)
    assert "sigmoid_fox (the gate of fox)" in run("list", str(mine)).out
    assert "oₜ  = Σⱼ σ(sₜⱼ + dₜⱼ) vⱼ" in run("show", str(mine)).out
    ran = run("verify", str(mine), "--examples", "1", "--shape", "1,2,3,4")
    assert ran.code == 0
    assert "9 ok, 0 failed, 2 not run" in ran.out
    (tmp_path / "text.txt").write_text("one word and another, " * 200)
    data = ["data.context_length=16", f"data.source={tmp_path / 'text.txt'}", "batch_size=2"]
    sizes = ["model.hidden_size=16", "model.num_heads=2", "model.num_layers=1"]
    steps = ["steps=1", "optimizer.warmup_steps=0", "eval_every=0", "tensorboard=false"]
    ran = run("train", "tiny", *data, *sizes, *steps, f"output_dir={tmp_path / 'run'}", f"model.attention={mine}")
    assert ran.code == 0, ran.err
    assert "attention: sigmoid_fox\n" in (tmp_path / "run" / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["lst"], ["'lst'", "'list'"]),
        (["show", "foks"], ["'foks'", "did you mean 'fox'"]),
        (["verify", "path_fax"], ["did you mean 'path_fox'"]),
        (["show"], ["'NAME' (`attnzoo show --help`)"]),
        (["show", "fox", "nope"], ["nope"]),
        (["show", "fox-pro-760m"], ["`attnzoo show --preset fox-pro-760m`"]),
        (["show", "fox-pro-760"], ["did you mean the model 'fox-pro-760m'", "`attnzoo show --preset fox-pro-760m`"]),
        (["report", "pyproject.toml"], ["expected the folder of a run", "'pyproject.toml' is"]),
        (["show", "fox", "no\npe"], ["no pe"]),
        (["show", "--preset", "fox-pro-750m"], ["'fox-pro-750m'", "MODEL-BLOCK-SIZE", "did you mean 'fox-pro-760m'"]),
        (["train", "fox-pro-12m"], ["did you mean 'fox-pro-125m'", "attnzoo list --presets"]),
        (["verify", "--sed", "1"], ["'--seed'"]),
        (["verify", "--seed", "x"], ["'x'"]),
        (["doctor", "--dtype", "bfloat"], ["'--dtype'", "expected one of bfloat16, ", "did you mean 'bfloat16'"]),
        (["verify", "--shape", "1,2"], ["'--shape'", "expected B,H,T,K, four whole numbers", "'1,2'"]),
        (["verify", "fox", "--interpret", "--dtype", "bfloat16"], ["expected float32 or float16"]),
        (["verify", "--seed", "9223372036854775808"], ["'--seed'", "0<=x<=2147483647"]),
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
        (["report", f"{Path(DEMO).parent}s"], ["is not there; did you mean", "/compare'"]),
        (["report"], ["RUN"]),
        (["report", ""], ["RUN", "expected a path, got ''"]),
        (["report", "x", "-o", "/dev/null/page.html"], ["--output='/dev/null'", "is not a folder"]),
        (["tokenize", "x", "--to", "/dev/null/tokens"], ["--to='/dev/null'", "is not a folder"]),
        (["report", "x", "-o", ""], ["--output", "expected a path, got ''"]),
        (["report", "x", "-o", "x.pdf"], ["--output: expected a name that ends in .html", "'x.pdf'"]),
        (["explore", "fox", "-o", "x"], ["--output: expected a name that ends in .html", "'x'"]),
        (["list", "--presets", "mine.py"], ["--presets: expected nothing beside it, got mine.py"]),
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
    def bug(name: str, **options: Any) -> Any:
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
        assert "...\n" not in ran.output.partition("Commands:")[2], "the first line of a command is too long for a list"
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


def test_train_trains(run: Any, tiny_train: Path, tmp_path: Path) -> None:
    ran = run("train", tiny_train, f"output_dir={tmp_path}/one", "model.attention=gla")
    assert ran.code == 0
    assert f"{tmp_path}/one" in ran.out
    assert len((tmp_path / "one" / "metrics.jsonl").read_text().splitlines()) == 4  # three steps and an evaluation


def test_a_runs_own_configuration_goes_on_with_it_where_it_stands(run: Any, tiny_train: Path, tmp_path: Path) -> None:
    run("train", tiny_train, f"output_dir={tmp_path}/one")
    (tmp_path / "one").rename(tmp_path / "moved")
    own = tmp_path / "moved" / "config.yaml"
    assert run("train", own).out == f"run: {tmp_path}/moved\n"
    assert not (tmp_path / "one").exists()
    assert run("train", own, f"output_dir={tmp_path}/other", "steps=2").out == f"run: {tmp_path}/other\n"
    assert len((tmp_path / "moved" / "metrics.jsonl").read_text().splitlines()) == 4  # as it was


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


@pytest.mark.parametrize("command", [("train",), ("compare",), ("bench", "train"), ("experiment", "run")])
def test_a_key_given_twice_is_refused_by_name(run: Any, tiny: Path, command: tuple[str, ...]) -> None:
    ran = run(*command, tiny, "steps=3", "model.hidden_size=3", "steps=4")
    assert_refused(ran, "override 'steps=4': expected steps once, got it twice")


def test_help_may_stand_beside_what_else_stands_alone() -> None:
    result = CliRunner().invoke(cli.app, ["list", "--presets", "--help"])
    assert result.exit_code == 0
    assert "Usage:" in result.output
