"""`attnzoo bench`: what a machine without a GPU can measure, what it is told, and how results are written."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from click.testing import CliRunner, Result

from attnzoo import cli, list_variants
from attnzoo.benchmarks import acp, gpt, host, layers, measure
from attnzoo.benchmarks.acp import search_share
from attnzoo.benchmarks.train import trained_gates
from attnzoo.config import load_config
from attnzoo.experiments.builtin import find_config
from attnzoo.forms.backends import fla
from attnzoo.models import LanguageModel
from attnzoo.models.config import ModelConfig
from attnzoo.training.start import start_from

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = DOCS / "benchmarks/results"
FOLDERS = sorted(path.parent for path in RESULTS.rglob("results.json"))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["bench", *arguments])


def test_cpu_times_every_linear_variant_and_fox() -> None:
    ran = run("cpu", "--length", "8", "--repeats", "1")
    assert ran.exit_code == 0, ran.output
    rows = [line.split("|")[1].strip() for line in ran.output.splitlines() if line.startswith("| ")]
    assert [row for row in rows if row in list_variants()] == [*list_variants("linear")]
    assert [row for row in rows if row.startswith("mean decay")]
    assert [row for row in rows if row.startswith("`")] == [f"`{name}`" for name in ("LlamaAttention", *host.LAYERS)]


def test_train_measures_the_steps_of_a_built_in_configuration_and_keeps_no_run(tmp_path: Path) -> None:
    small = [
        "batch_size=1",
        "model.hidden_size=32",
        "data.context_length=16",
        "model.attention=[mamba2,{name: fox, options: {acp: true}}]",
        "steps=8",  # of a run that goes on for longer than planned
        "optimizer.warmup_steps=2",
        "optimizer.extensions=[{after: 4, planned: 4, schedule: constant, lr: 1e-3, warmup_steps: 3}]",
    ]
    ran = run(
        "train",
        "tiny",
        *small,
        "--device",
        "cpu",
        "--steps",
        "1",
        "--repeats",
        "2",
        "--out",
        "speed",
        "--trained-gates",
    )
    assert ran.exit_code == 0, ran.output
    assert [path.name for path in tmp_path.iterdir()] == ["speed"]
    result = json.loads((tmp_path / "speed/results.json").read_text())
    assert len(result["tokens_per_second"]) == 2
    assert result["attention"] == ["mamba2", "fox"]
    assert result["ms_per_step"] == pytest.approx(16e3 / torch.tensor(result["tokens_per_second"]).quantile(0.5).item())
    assert result["peak_GiB"] is None
    assert result["blocks_kept"] == 1.0  # a context of one block
    assert "| - | 1.000 | - | - |" in ran.output
    assert "| 1 mamba2, 1 fox |" in (tmp_path / "speed/results.md").read_text()
    assert "| 1 mamba2, 1 fox |" in ran.output


def test_training_with_pruning_is_timed_from_weights_that_learned_in_the_shortest_context(tmp_path: Path) -> None:
    small = ["data.source=text.txt", "model.hidden_size=16", "model.num_layers=1", "model.num_heads=1", "batch_size=1"]
    small += ["data.context_length=64", "eval_tokens=64"]
    (tmp_path / "text.txt").write_text("a text that has enough bytes for this\n" * 100)
    ran = run("acp", *small, "--size", "cpu", "--device", "cpu", "--learn", "2", "--steps", "1", "--out", "speed")
    assert ran.exit_code == 0, ran.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["speed", "text.txt"]
    rows = json.loads((tmp_path / "speed/results.json").read_text())["rows"]
    assert [len(row[kind]) for row in rows for kind in ("plain", "pruned")] == [4] * 6
    assert all(row["learned"] == 2 and row["kept"] == 1.0 for row in rows)  # a context of one block
    assert all(0 < row["search"] < 1 and row["plain_ms"] > 0 for row in rows)
    assert (tmp_path / "speed/results.md").read_text().count("| 1 x 64 |") == 3


def test_the_search_is_what_runs_with_pruning_alone() -> None:
    assert search_share({"scan": 1.0, "attend": 3.0}, {"attend": 9.0}) == 0.25
    assert search_share({"attend": 3.0}, {"attend": 9.0}) == 0.0


def test_pruned_attention_is_timed_on_the_batch_that_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Size] = []

    def timed(call: Callable[[], object]) -> dict[str, float]:
        seen.append(cast(tuple[torch.Tensor, Any], call())[0].shape[:2])
        return {"attend": 1.0}

    monkeypatch.setattr(acp, "kernel_times", timed)
    config = ModelConfig("fox", {"acp": True}, vocab_size=8, hidden_size=16, num_layers=1, num_heads=2)
    acp.attention_times(LanguageModel(config), torch.arange(8), batch=3)
    assert seen == [(3, 8)] * 2


def test_a_gpt_is_trained_with_each_variant_in_the_same_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt, "MODES", {"eager": None})
    sizes = {"batch": 2, "context": 8, "hidden": 32, "layers": 1, "heads": 2, "vocabulary": 40}
    words = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    words += ["--device", "cpu", "--steps", "1", "--out", "speed"]
    ran = run("gpt", *words)
    assert ran.exit_code == 0, ran.output
    result = json.loads((tmp_path / "speed/results.json").read_text())
    rows = {row["name"]: row for row in result["rows"]}
    assert set(list_variants()) < rows.keys()
    assert result["sizes"] == sizes
    assert rows["fox + ACP"]["loss"] == pytest.approx(rows["fox"]["loss"], abs=2e-3)
    assert len({row["loss"] for row in rows.values()}) > 10
    assert [line for line in result["missing"] if not line.startswith("FLA's fox")] == []
    assert {line[:16] for line in result["missing"]} == {"FLA's fox, Trito", "FLA's fox, TileL"}
    assert f"| fox | {rows['fox']['tokens_per_second']:,} | " in (tmp_path / "speed/results.md").read_text()
    monkeypatch.setattr(gpt, "times", lambda contender, *_: {**rows["fox"], "name": contender.name, "ms": -1.0})
    result["rows"] = [row for row in result["rows"] if row["name"] != "gla"]
    measure.save(Path("speed"), result, gpt.table(result))
    assert run("gpt", *words, "--resume").exit_code == 0
    again = json.loads((tmp_path / "speed/results.json").read_text())["rows"]
    assert sorted(row["name"] for row in again if row["ms"] < 0) == ["FLA's fox, TileLang", "FLA's fox, Triton", "gla"]
    assert [row for row in again if row["ms"] > 0] == result["rows"]
    few = run("gpt", *words, "--only", "nope", "--mode", "compiled", "--out", "few")
    assert few.exit_code == 0, few.output
    assert json.loads((tmp_path / "few/results.json").read_text())["rows"] == []  # the only mode here is eager
    ran = run("gpt", *words, "--mode", "graphs")
    assert "expected eager or compiled with --device cpu, got 'graphs'" in ran.output + str(ran.exception)
    ran = run("gpt", *words, "--resume", "--batch", "3")
    assert str(ran.exception).startswith("--resume: expected the sizes {'batch': 3, ")
    assert str(run("gpt", *words, "--resume", "--out", "other").exception).startswith("--resume: expected 'other")


def test_gpts_are_measured_in_a_process_for_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def run_tasks(tasks: Any, jobs: int, until: float, gpus: int, failed: Any) -> Any:
        assert (jobs, gpus) == (4, 4)
        for number, (label, task) in enumerate(tasks.items()):
            if number == 20:
                return
            seen.append(label)
            if label == "fox, compiled":
                failed("fox, compiled: ended with 1")
            else:
                name, mode, *_, file = task.args
                file.write_text(json.dumps({"name": name, "mode": mode}))
                yield label

    monkeypatch.setattr(gpt, "run_tasks", run_tasks)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    result: Any = {"device": "cuda", "sizes": vars(gpt.GPTSizes()), "steps": 1, "missing": []}
    result["rows"] = [{"name": "fox", "mode": "eager"}]
    gpt.measure(gpt.contenders(), result, 60, lambda result: None)
    assert seen[:3] == ["SDPA, RoPE, eager", "fox + ACP, eager", "rope, eager"]
    assert seen.index("FLA's fox, Triton, eager") < seen.index("SDPA, RoPE, compiled") < seen.index("fox, graphs")
    assert "fox, compiled: ended with 1" in result["missing"]
    assert len(result["rows"]) == 20
    late = [line for line in result["missing"] if line.endswith(": no time was left")]
    assert [line.split(", ")[0] for line in late] == ["eager", "compiled", "graphs"]
    assert late[1].startswith("compiled, linear_attention, retnet, gla, ")


def test_commands_of_the_documentation_measure_what_can_be_shared_out() -> None:
    texts = [path.read_text() for path in DOCS.rglob("*.md")]
    commands = [words for text in texts for words in re.findall(r"attnzoo bench train (\w[^`#\n]*=[^`#\n]*)", text)]
    assert len(commands) >= 2
    for name, *overrides in map(shlex.split, commands):
        given = [word for word in overrides if "=" in word]
        load_config(find_config(name, "train"), given).rows_per_part(1)


@pytest.mark.parametrize(
    "arguments",
    [["fox", "--plot"], ["path"], ["wall"], ["layers"], ["decode"], ["generate"], ["gpt"], ["acp"], ["train", "tiny"]],
)
def test_without_a_gpu_the_kernels_are_refused_in_a_line(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ran = run(*arguments)
    assert ran.exit_code != 0
    assert f"bench {arguments[0]}: expected a CUDA GPU, found none; " in ran.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["fox", "--shapes", "2,24,16384"], "expected four whole numbers above 0, B,H,T,K, got '2,24,16384'"),
        (["path", "--shapes", "2,24,-4,64"], "'2,24,-4,64'"),
        (["wall", "--rep", "0"], "--rep"),
        (["fox", "--seconds", "0"], "--seconds"),
        (["decode", "--official", "missing.py"], "missing.py"),
        (["cpu", "--length", "0"], "--length"),
        (["train"], "CONFIG"),
        (["train", "tiny", "--device", "tpu"], "'tpu'"),
    ],
)
def test_a_wrong_option_is_refused(arguments: list[str], part: str) -> None:
    ran = run(*arguments)
    assert ran.exit_code == 2
    assert part in ran.output


def test_a_peer_that_is_missing_or_broken_is_named_with_the_reason() -> None:
    missing: list[str] = []
    assert measure.load_peer("there", lambda: 3, missing) == 3
    assert measure.load_peer("gone", lambda: importlib.import_module("no_such_peer"), missing) is None
    assert measure.load_peer("broken", lambda: [][0], missing) is None
    assert measure.not_measured([*missing, *missing]) == [
        "Not measured: gone: not installed (No module named 'no_such_peer').",
        "Not measured: broken: IndexError('list index out of range').",
    ]


@pytest.mark.parametrize("command", [["fox"], ["generate"], ["gpt"], ["acp"], ["train", "tiny"]])
def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_is_measured(
    command: list[str], tmp_path: Path
) -> None:
    (tmp_path / "taken").write_text("a file")
    ran = run(*command, "--out", "taken/here")
    assert str(ran.exception).startswith("--out='taken/here': ")
    assert str(ran.exception).endswith("is not a folder")


def test_a_record_names_kernels_whatever_package_they_come_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla, "VERSION", "0.6.0")  # of fla-core
    monkeypatch.setattr(measure, "installed_triton", lambda: "3.7.1+git0")  # of pytorch-triton
    assert {name: measure.describe_versions()[name] for name in ("fla", "triton")} == {
        "fla": "0.6.0",
        "triton": "3.7.1+git0",
    }


def test_contenders_are_chosen_by_name_or_by_how_names_begin() -> None:
    names = ["fox", "fox + ACP", "fox, a window", "fox_rope", "fox_rope + ACP", "SDPA, RoPE"]

    def by(*only: str) -> list[str]:
        return measure.chosen_names(names, only)

    assert by() == names
    assert by("fox") == names[:2]
    assert by("fox + ACP") == ["fox + ACP"]
    assert by("fox,") == ["fox, a window"]
    assert by("SDPA", "fox_") == names[3:]
    with pytest.raises(ValueError, match=r"unknown contender 'sdpa'.*did you mean 'SDPA, RoPE'"):
        by("sdpa")


def test_a_name_that_leaves_out_others_that_begin_like_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["FLA", "FLA, TileLang", "ours", "ours + ACP", "ours, block", "SDPA"]

    def said(*only: str) -> str:
        measure.chosen_names(names, only)
        captured = capsys.readouterr()
        assert not captured.out
        return captured.err

    assert said("FLA") == "--only 'FLA' leaves out 'FLA, TileLang'\n"
    assert said("FLA", "FLA,") == said("FLA,") == said("SDPA") == said() == ""
    assert said("ours", "FLA").splitlines() == [
        "--only 'ours' leaves out 'ours, block'",
        "--only 'FLA' leaves out 'FLA, TileLang'",
    ]


def test_layers_with_one_pass_forgetting_are_chosen_alone() -> None:
    found = [x.name for x in measure.chosen(layers.contenders(), ["fox, One-Pass"])]
    assert found == [f"fox, One-Pass Forgetting, phase {phase}" for phase in (1, 2)]
    assert [x.name for x in measure.chosen(layers.contenders(), ["rope"])] == ["rope"]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_tables_of_the_documentation_are_what_their_numbers_give(folder: Path) -> None:
    module: ModuleType = importlib.import_module(f"attnzoo.benchmarks.{folder.name.rpartition('-')[2]}")
    assert module.table(json.loads((folder / "results.json").read_text())) == (folder / "results.md").read_text()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_table_is_written_of_what_has_come_so_far(folder: Path) -> None:
    module: ModuleType = importlib.import_module(f"attnzoo.benchmarks.{folder.name.rpartition('-')[2]}")
    result = json.loads((folder / "results.json").read_text())
    for rows in range(len(result["rows"])):
        part = {**result, "rows": result["rows"][:rows]}
        if "errors" in result:
            part["errors"] = result["errors"][: rows + 1]
        assert module.table(part) != module.table(result)


def test_what_was_measured_before_an_interruption_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    @dataclass
    class Contender:
        name: str

    def times(contender: Contender, x: None) -> dict[str, float] | None:
        if contender.name == "third":
            raise KeyboardInterrupt
        return {"both_ms": 1.0}

    def table(result: dict[str, Any]) -> str:
        return f"{len(result['rows'])} rows, {len(result['errors'])} errors, {result['missing']}\n"

    peers = [Contender(name) for name in ("first", "second", "third")]
    with pytest.raises(KeyboardInterrupt):
        measure.race(
            {}, peers, [(1, 2, 3, 4)], 60.0, draw=lambda *shape: None, errors=lambda peer, H, K: {"o": 0.0},
            limits={"o": 1.0}, common=lambda x: {}, times=times, keep=measure.keeper(tmp_path / "out", table),
        )  # fmt: skip
    rows = json.loads((tmp_path / "out/results.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["first", "second"]
    said = "['what comes after these rows: the run had not ended']"
    assert (tmp_path / "out/results.md").read_text() == f"2 rows, 3 errors, {said}\n"


@pytest.mark.parametrize("kv_heads", [None, 2])
def test_a_race_draws_and_compares_with_shared_keys(kv_heads: int | None) -> None:
    asked: list[dict[str, int]] = []

    def drawn(*shape: int, **heads: int) -> None:
        asked.append(heads)

    def errors(peer: Runner, H: int, K: int, **heads: int) -> dict[str, float]:
        assert (H, K) == (6, 64)
        asked.append(heads)
        return {"o": 0.0}

    result: dict[str, Any] = {}
    measure.race(
        result, [Runner("right")], [(1, 6, 8, 64)], 60, draw=drawn, errors=errors, limits={"o": 0.1}, kv_heads=kv_heads,
        common=lambda x: {}, times=lambda peer, x: {}, keep=lambda result: None,
    )  # fmt: skip
    assert asked == [{} if kv_heads is None else {"kv_heads": 2}] * 2
    assert result.get("kv_heads") == kv_heads


def test_key_heads_divide_the_heads_of_every_shape() -> None:
    shapes = [(1, 24, 8, 16), (1, 16, 8, 16)]
    measure.check_sharing(shapes, 8)
    with pytest.raises(ValueError, match=r"--kv-heads: expected a divisor of the 16 heads of \(1, 16, 8, 16\), got 6"):
        measure.check_sharing(shapes, 6)


@dataclass(frozen=True)
class Runner:
    name: str
    error: float = 0.0


def test_only_what_is_right_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    """One check per contender and size of heads; wrong and broken ones get no row, what is out of place none here."""
    checks: list[tuple[str, int, int]] = []

    def errors(peer: Runner, H: int, K: int) -> dict[str, float]:
        checks.append((peer.name, H, K))
        if peer.name == "silent":
            raise AssertionError
        return {"o": peer.error if peer.name != "broken" else 1 / 0}

    def times(peer: Runner, x: tuple[int, ...]) -> dict[str, Any] | None:
        return None if peer.name == "short" and x[2] > 10 else {"ms": x[2]}

    peers = [Runner("right"), Runner("wrong", 0.2), Runner("broken"), Runner("silent"), Runner("short")]
    result: dict[str, Any] = {}
    shapes = [(1, 2, 8, 64), (1, 2, 16, 64)]
    options: dict[str, Any] = {
        "errors": errors,
        "limits": {"o": 0.1},
        "common": lambda x: {"kept": 0.5},
        "keep": lambda result: None,
    }
    assert measure.race(result, peers, shapes, 60, draw=lambda *shape: shape, times=times, **options)
    assert [(r["name"], r["T"], r["ms"], r["kept"]) for r in result["rows"]] == [
        ("right", 8, 8, 0.5),
        ("short", 8, 8, 0.5),
        ("right", 16, 16, 0.5),
    ]
    assert checks == [(p.name, 2, 64) for p in peers]
    measure.race({}, peers[:1], [*shapes, (1, 4, 8, 64)], 60, draw=lambda *shape: shape, times=times, **options)
    assert checks[len(peers) :] == [("right", 2, 64), ("right", 4, 64)]
    assert [(e["H"], e["o"]) for e in result["errors"]] == [(2, "0.0e+00"), (2, "2.0e-01"), (2, "0.0e+00")]
    said = capsys.readouterr().out
    assert "WRONG: not timed" in said
    assert "ZeroDivisionError" in said
    assert "AssertionError in test_benchmarks.py, line " in said
    assert not measure.race(result, peers, shapes, -1, draw=lambda *shape: shape, times=times, **options)
    assert result["rows"] == []
    assert "out of time at (1, 2, 8, 64) right" in capsys.readouterr().out
    silent = result["missing"].pop(1)
    assert silent.startswith("silent at (1, 2, 8, 64): AssertionError in test_benchmarks.py, line ")
    assert silent.endswith(": raise AssertionError")
    assert result["missing"] == [
        "broken at (1, 2, 8, 64): ZeroDivisionError('division by zero')",
        "right at (1, 2, 8, 64) and what comes after it: no time was left",
    ]
    known = [{"name": "right", "K": 64, "o": "1e-3"}, {"name": "other", "K": 64, "dq": "2e-3"}]
    assert measure.error_lines({"errors": known}, ("o", "dq", "dk"))[2:] == [
        "| | K | o | dq |",
        "|---|---|---|---|",
        "| right | 64 | 1e-3 | - |",
        "| other | 64 | - | 2e-3 |",
    ]
    assert measure.error_lines({"errors": [{**known[0], "H": 2}]}, ("o",))[-1] == "| right | 2 | 64 | 1e-3 |"


def test_gates_as_trained_are_constant_and_mostly_local(tmp_path: Path) -> None:
    config = load_config(find_config("tiny", "train"), ["model.attention=path_fox", "model.num_heads=4"])
    trained_gates(config, tmp_path / "gates")
    model = LanguageModel(config.model)
    start_from(model, str(tmp_path / "gates"), config.data)
    for block in model.blocks:
        gate = block.attention.project(torch.randn(2, 5, config.model.hidden_size)).gate  # type: ignore[operator, union-attr]
        lengths = -1 / gate.log_decay
        assert lengths.shape == (2, 5, 4)
        assert (lengths == lengths[0, 0]).all()
        assert ((lengths[0, 0] > 7.9) & (lengths[0, 0] < 257)).sum() == 3
        assert ((lengths[0, 0] > 9e4) & (lengths[0, 0] < 1.1e6)).sum() == 1


def test_gates_as_trained_need_forget_gates() -> None:
    ran = run("train", "tiny", "model.attention=rope", "--trained-gates", "--device", "cpu")
    assert ran.exit_code != 0
    assert "expected layers with forget gates (fox, path_fox), got ['rope'" in str(ran.output) + str(ran.exception)
