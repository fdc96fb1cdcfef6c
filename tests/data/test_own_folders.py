"""What attnzoo writes into a folder of texts is none of them: runs, tokens, models and pages may lie there."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from tiny_runs import StoppedError, config_of, outcome, said, stop_at

from attnzoo.benchmarks.measure import describe_versions, save
from attnzoo.cli import app
from attnzoo.data.texts import text_files
from attnzoo.experiments.outcome import Outcome, save_outcome
from attnzoo.training import train


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """A folder of texts, in which commands are run."""
    monkeypatch.chdir(tmp_path)
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(f"{number} and one is {number + 1}.\n" * 80)
    return tmp_path


def run(*words):
    done = CliRunner().invoke(app, [*map(str, words)])
    assert done.exit_code == 0, (done.output, done.exception)
    return done


def of(folder, name, *overrides):
    return config_of(folder, name, "data.source=.", f"output_dir={name}", *overrides)


def test_a_run_in_the_folder_of_its_data_goes_on_and_is_measured(texts, caplog):
    pytest.importorskip("transformers")
    config = of(texts, "runs/x")
    with pytest.raises(StoppedError):
        train(config, on_row=stop_at(5))
    caplog.clear()
    train(config)
    assert "left out of the texts in '.', as attnzoo has written it: 'runs/x' (a run)" in said(caplog)
    run("evaluate", "runs/x", "--on", "loss")
    run("report", "runs/x")
    run("export", "runs/x", "--to", "model")
    run("tokenize", ".", "--to", "tokens", "--vocab-size", "256")
    train(of(texts, "runs/y"))
    assert outcome("runs/y") == outcome("runs/x")
    train(config)


@pytest.mark.parametrize("command", ["tokenize", "corpus"])
def test_texts_give_the_same_tokens_when_they_are_written_among_them(command, texts):
    for name in ("tokens", "again"):
        run(command, ".", "--to", name, "--vocab-size", "256")
    for path in (texts / "tokens").iterdir():
        assert path.read_bytes() == (texts / "again" / path.name).read_bytes()


def test_a_run_whose_files_would_be_its_own_data_is_refused(texts):
    for output in (".", str(texts)):
        with pytest.raises(ValueError, match=r"output_dir=.*expected another folder than that of the data, '\.'"):
            train(config_of(texts, "x", "data.source=.", f"output_dir={output}"))
    assert len([*texts.iterdir()]) == 4
    train(of(texts, ".", 'data.pattern="*.txt"'))


def test_folders_of_others_with_such_names_are_texts(texts):
    for number, name in enumerate(("site/config.yaml", "model/config.json", "list/shards.json", "page/report.html")):
        (texts / name).parent.mkdir()
        (texts / name).write_text(f"a text of somebody, {number}\n" * 9)
    assert run("tokenize", ".", "--to", "tokens", "--vocab-size", "256").output.startswith("8 files of")


def test_results_among_texts_are_no_texts(texts, caplog):
    save(texts / "bench", {"machine": describe_versions(), "rows": []}, "| a table |\n")
    (texts / "measured").mkdir()
    save_outcome(Outcome("copy", "cpu", (), (), "2026-01-31", "", {}, ""), texts / "measured/result.json")
    (texts / "measured/result.md").write_text("# Copying\n")
    assert [*text_files(texts)] == ["0.txt", "1.txt", "2.txt", "3.txt"]
    assert "'bench/results.json' (a result)" in caplog.text
    for name in ("result.json", "notes.md", "loss.json"):
        (texts / name).write_text('{"experiment": "ours"}\n')
    assert len(text_files(texts)) == 7


def test_an_evaluation_among_the_texts_changes_no_run(texts):
    pytest.importorskip("transformers")
    train(of(texts, "run"))
    run("evaluate", "run", "--on", "loss", "--out", ".")
    (texts / "loss.svg").write_text("its picture")
    train(of(texts, "run"))
    run("evaluate", "run", "--on", "loss", "--out", ".")


NAMES = ("report.html", "results.json", "results.md", "other/maps.svg", "e/result.md")


def test_no_command_writes_over_a_file_that_attnzoo_has_not_written(texts):
    for name in NAMES:
        (texts / name).parent.mkdir(exist_ok=True)
        (texts / name).write_text("mine\n")
    train(of(texts, "run", 'data.pattern="*.txt"'))
    for words in (
        ["report", "run"],
        ["compare", "demo", "output_dir=."],
        ["bench", "train", "tiny", "--device", "cpu", "--out", "."],
        ["evaluate", "run", "--on", "maps", "--out", "other"],
        ["experiment", "run", "recall", "--out", "e"],
    ):
        done = CliRunner().invoke(app, words)
        text = f"{done.output} {done.exception}"
        assert done.exit_code != 0, words
        assert any(f"expected no {name!r}" in text for name in NAMES), (words, text)
    assert all((texts / name).read_text() == "mine\n" for name in NAMES)
    (texts / "report.html").write_text("")
    run("report", "run")
