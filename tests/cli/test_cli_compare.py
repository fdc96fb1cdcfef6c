"""Comparisons and reports from the command line, and the comparison that it has built in."""

from __future__ import annotations

import html
import json
import os
import pickle
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_tasks
import yaml
from click.testing import CliRunner
from command_line import assert_refused, write_tiny
from rich.console import Console

from attnzoo import cli
from attnzoo.config import load_config
from attnzoo.data import build_data
from attnzoo.experiments import compare as comparing
from attnzoo.experiments import processes
from attnzoo.experiments.builtin import built_in
from attnzoo.experiments.compare import CompareConfig, plan
from attnzoo.models import LanguageModel
from attnzoo.registry.table import PAIRS

pytest_plugins = ("command_line",)
DEMO = built_in("compare")["demo"]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny comparison, trained and reported in one process."""
    folder = tmp_path_factory.mktemp("compared")
    ended = CliRunner().invoke(cli.app, ["compare", str(write_tiny(folder))])
    assert ended.exit_code == 0, ended.output
    return folder


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
    page = html.unescape((tmp_path / "runs" / "report.html").read_text())
    assert 'data-series="nope"' in page
    assert f"attnzoo compare {tiny} 'variants=[{{name: fox, options: {{acp: true}}}}, mamba2, nope]'" in page


def test_compare_with_several_jobs_gives_the_same_losses(run: Any, compared: Path, tiny: Path, tmp_path: Path) -> None:
    ran = run("compare", tiny, "--jobs", "2")
    assert ran.code == 0, ran.err
    assert "[2/2]" in ran.out
    assert f"attnzoo compare {tiny} --jobs 2" in (tmp_path / "runs" / "report.html").read_text()
    apart = {path.parent.name: losses(path) for path in (tmp_path / "runs").glob("*/metrics.jsonl")}
    assert {path.parent.name: losses(path) for path in (compared / "runs").glob("*/metrics.jsonl")} == apart
    assert sorted(apart) == ["fox-acp", "mamba2"]


def losses(metrics: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


def test_a_run_that_fails_in_a_process_of_its_own_is_named() -> None:
    done: list[str] = []
    tasks = {"first": partial(time.sleep, 0), "second": partial(time.sleep, 600), "third": partial(time.sleep, "x")}
    with pytest.raises(ChildProcessError, match=r"third: .*str"):  # the second one is stopped, not waited for
        done.extend(processes.run_tasks(tasks, 2))
    assert done == ["first"]
    assert list(processes.run_tasks({"first": partial(time.sleep, 600)}, 1, until=time.monotonic() + 0.1)) == []
    with pytest.raises(ChildProcessError, match="gone: ended with 7"):
        list(processes.run_tasks({"gone": partial(os._exit, 7)}, 1))


def test_a_run_that_is_done_as_it_is_told_to_stop_ends_too(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    tasks = {"done": partial(tiny_tasks.done_when_told_to_stop, ready), "third": partial(tiny_tasks.fails_after, ready)}
    ended = threading.Event()

    def run() -> None:
        with pytest.raises(ChildProcessError, match="third: it failed"):
            list(processes.run_tasks(tasks, 2))
        ended.set()

    threading.Thread(target=run, daemon=True).start()
    assert ended.wait(60)


def test_a_run_that_is_stopped_puts_away_what_it_holds_or_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, gone = tmp_path / "ready", tmp_path / "gone"
    for task in (partial(tiny_tasks.puts_away_what_it_holds, ready, gone), partial(tiny_tasks.deaf, ready)):
        with pytest.raises(ChildProcessError, match="third: it failed"):
            list(processes.run_tasks({"held": task, "third": partial(tiny_tasks.fails_after, ready)}, 2))
        assert gone.exists()
        ready.unlink()
        monkeypatch.setattr(processes, "PATIENCE", 0.1)


def test_a_process_goes_on_to_another_task_when_what_that_waits_for_is_done(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    tasks = {
        name: partial(tiny_tasks.note, seen, name, seconds)
        for name, seconds in (("c", 0), ("a", 1), ("b", 0), ("d", 0))
    }
    done = list(processes.run_tasks(tasks, 2, after={"c": ["a", "b"]}))
    assert sorted(done) == ["a", "b", "c", "d"]
    assert done.index("c") > max(done.index("a"), done.index("b"))
    lines = [line.split() for line in seen.read_text().splitlines()]
    assert sorted(name for name, _ in lines) == ["a", "b", "c", "d"]
    assert len({process for _, process in lines}) == 2


def test_a_run_that_fails_stops_only_those_that_wait_for_it_where_failures_are_told() -> None:
    said: list[str] = []
    tasks = {"a": partial(time.sleep, "x"), "b": partial(time.sleep, 0), "gone": partial(os._exit, 7)}
    tasks |= {"after a": partial(time.sleep, 0), "after b": partial(time.sleep, 0)}
    done = list(processes.run_tasks(tasks, 2, after={"after a": ["a"], "after b": ["b"]}, failed=said.append))
    assert sorted(done) == ["after b", "b"]
    assert sorted(line.partition(":")[0] for line in said) == ["a", "gone"]


def test_processes_are_spread_over_the_gpus_that_this_one_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = tmp_path / "seen"
    for given, expected in (("", ["0", "1"]), ("5,GPU-7", ["5", "GPU-7"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        seen.write_text("")
        tasks = {name: partial(tiny_tasks.note_variable, seen, "CUDA_VISIBLE_DEVICES", 0.5) for name in "abcd"}
        assert sorted(processes.run_tasks(tasks, 4, gpus=2)) == list("abcd")
        assert sorted(seen.read_text().split()) == sorted(2 * expected)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == given


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_processes_have_as_many_threads_as_this_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 3)
    list(processes.run_tasks({"a": partial(tiny_tasks.note_variable, tmp_path / "seen", name, 0)}, 1))
    assert (tmp_path / "seen").read_text() == "3\n"


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
    assert_refused(run("compare", tiny, "train.data.source=task:parity"), "'task:parity'", "attnzoo experiment")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("key", "setting"), [
    ("train.model.attention", "train.model.attention=nope"), ("train.output_dir", "train.output_dir=mine"),
    ("train.output_dir", "train={output_dir: mine}"), ("train.model.attention", "train.model={attention: nope}"),
])  # fmt: skip
def test_compare_refuses_what_its_variants_say(run: Any, tiny: Path, tmp_path: Path, key: str, setting: str) -> None:
    assert_refused(run("compare", tiny, setting), f"{key}: expected none, since each of the variants has its own")
    assert not (tmp_path / "runs").exists()


def test_compare_refuses_a_file_that_says_what_its_variants_say(run: Any, tiny: Path, tmp_path: Path) -> None:
    settings = yaml.safe_load(tiny.read_text())
    settings["train"]["output_dir"] = "mine"
    tiny.write_text(yaml.safe_dump(settings))
    assert_refused(run("compare", tiny), "train.output_dir: expected none, since each of the variants has its own")
    assert not (tmp_path / "runs").exists()


def test_what_is_wrong_with_a_later_variant_shows_before_training(run: Any, tiny: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    late = "variants=[{name: fox, options: {forgetting: {}}, label: forgets}, nope]"
    assert_refused(run("compare", tiny, late, "train.forgetting.budget=2"), "variant 'nope': forgetting: expected")
    assert_refused(run("compare", tiny, "variants=[nope, fox]", "train.start_from=nowhere"), "start_from", "nowhere")
    assert_refused(
        run("compare", tiny, "variants=[nope, {name: fox, label: 1.10}]"), "in quotes as label of fox", "1.1"
    )
    assert not runs.exists()
    assert run("compare", tiny, "variants=[fox]").code == 0
    other = run("compare", tiny, "variants=[nope, fox]", "train.optimizer.lr=0.5")
    assert_refused(other, str(runs / "fox"), "optimizer.lr was")
    for checkpoint in (runs / "fox" / "checkpoints").iterdir():
        (checkpoint / "model.safetensors").write_bytes(b"")
    assert_refused(run("compare", tiny, "variants=[nope, fox]"), "fox", "no other checkpoint is left")
    assert not (runs / "nope").exists()


def test_processes_of_a_comparison_open_the_data_themselves(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of memory-mapped tokens would go through a pipe and stay in each process."""
    sizes: list[int] = []

    def sent(tasks: Any, jobs: int, gpus: int) -> Any:
        sizes.extend(len(pickle.dumps(task)) for task in tasks.values())
        for label, task in tasks.items():
            task()
            yield label

    monkeypatch.setattr(comparing, "run_tasks", sent)
    config = load_config(tiny, schema=CompareConfig)
    comparing.run_comparison(config, Console(quiet=True), jobs=2)
    assert len(sizes) == len(config.variants)
    assert max(sizes) < 10000 < len(pickle.dumps(build_data(config.train.data)))


@pytest.mark.parametrize(("device", "gpus"), [("auto", 4), ("cpu", 1)])
def test_variants_are_trained_on_all_gpus_unless_on_a_cpu(
    device: str, gpus: int, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spread: list[int] = []

    def sent(tasks: Any, jobs: int, gpus: int) -> Any:
        spread.append(gpus)
        raise KeyboardInterrupt

    monkeypatch.setattr(comparing, "run_tasks", sent)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    with pytest.raises(KeyboardInterrupt):
        comparing.run_comparison(
            load_config(tiny, [f"train.device={device}"], schema=CompareConfig), Console(quiet=True), jobs=8
        )
    assert spread == [gpus]


def test_report_rebuilds_the_page_from_the_runs(run: Any, compared: Path, tmp_path: Path) -> None:
    first = (compared / "runs" / "report.html").read_text()
    ran = run("report", compared / "runs", "-o", tmp_path / "again.html", "--title", "tiny comparison")
    assert ran.code == 0, ran.err
    assert (tmp_path / "again.html").read_text() == first
    one = run("report", compared / "runs" / "mamba2", "-o", tmp_path / "one.html")
    assert one.code == 0
    assert 'data-series="fox' not in (tmp_path / "one.html").read_text()


def test_report_names_the_run_whose_data_are_gone(run: Any, tiny_train: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert run("train", tiny_train, f"output_dir={tmp_path}/{name}").code == 0
    config = tmp_path / "two" / "config.yaml"
    moved = config.read_text().replace("text.txt", "gone.txt")
    config.write_text(moved)
    for checkpoint in (tmp_path / "two" / "checkpoints").iterdir():
        (checkpoint / "config.yaml").write_text(moved)
    ran = run("report", tmp_path / "one", tmp_path / "two", "-o", tmp_path / "page.html")
    assert_refused(ran, f"the data of the run in '{tmp_path}/two'", "gone.txt")


def test_report_measures_runs_that_were_trained_one_by_one(run: Any, tiny_train: Path, tmp_path: Path) -> None:
    hybrid = ["model.attention=[mamba2,fox]", "model.num_layers=2"]
    assert run("train", tiny_train, f"output_dir={tmp_path}/runs/gla", "model.attention=gla").code == 0
    assert run("train", tiny_train, f"output_dir={tmp_path}/runs/mixed", *hybrid).code == 0
    ran = run("report", tmp_path / "runs", "-o", tmp_path / "page.html")
    assert ran.code == 0, ran.err
    page = (tmp_path / "page.html").read_text()
    for key in ("gla", "mixed"):
        assert f'<tr data-series="{key}"' in page


def test_report_of_a_folder_names_runs_that_it_leaves_out(
    run: Any, tiny_train: Path, tmp_path: Path, caplog: Any
) -> None:
    """Those that are not measured, beside others that are."""
    for key in ("gla", "fox"):
        assert run("train", tiny_train, f"output_dir={tmp_path}/runs/{key}", f"model.attention={key}").code == 0
        ran = run("report", tmp_path / "runs", "-o", tmp_path / "page.html")
        assert ran.code == 0, ran.err
        assert ("left out" in caplog.text) == (key == "fox")
    assert f"{tmp_path / 'runs' / 'fox'}" in caplog.text
    caplog.clear()
    ran = run("report", tmp_path / "runs", tmp_path / "runs" / "fox", "-o", tmp_path / "page.html")
    assert ran.code == 0, ran.err
    assert "left out" not in caplog.text


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


def test_a_worker_that_is_stopped_as_it_ends_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes where its channel was found closed."""

    class Closed:
        send = None

        def recv(self) -> None:
            work = sys._getframe(1)

            def interrupted(frame: Any, event: str, argument: Any) -> Any:
                if event == "line":
                    sys.settrace(before)
                    frame.f_trace = None
                    raise KeyboardInterrupt
                return interrupted

            sys.settrace(lambda *_: None)
            work.f_trace = interrupted
            raise EOFError

    before, handled = sys.gettrace(), list[Any]()
    monkeypatch.setattr(signal, "signal", lambda number, handler: handled.append(handler))
    monkeypatch.setattr(sys, "stderr", open(os.devnull, "w"))  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    with pytest.raises(SystemExit, match="130"):
        processes._work(Closed())  # type: ignore[arg-type]
    assert handled[-1] == signal.SIG_IGN
