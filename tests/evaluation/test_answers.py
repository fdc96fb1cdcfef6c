"""What a model answers is counted as it was, and a row is printed as it is."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_runs
import torch
from click.testing import CliRunner

from attnzoo.cli import app
from attnzoo.config import load_config
from attnzoo.data.tasks import TASKS, Examples, build_task
from attnzoo.data.tasks.task import Task, asked
from attnzoo.evaluation import answers, scores
from attnzoo.evaluation.answers import measure_answers, measure_guess
from attnzoo.experiments.evaluate.answers import evaluate
from attnzoo.training import train


class Forgetful(torch.nn.Module):
    """Says the parity so far with a logit of 3, but in rows that begin with 1 what is wrong from token 2 on."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, tokens):
        said = tokens.cumsum(1) % 2
        wrong = (tokens[:, :1] == 1) & (torch.arange(tokens.shape[1]) >= 2)
        return SimpleNamespace(logits=3.0 * torch.nn.functional.one_hot(said ^ wrong.long(), 2))


@pytest.mark.parametrize(("held", "tokens"), [(1, 1), (6, 12), (2**26, 2**15)])
def test_wrong_answers_are_counted(monkeypatch, held, tokens):
    monkeypatch.setattr(scores, "LOGITS", held)
    monkeypatch.setattr(answers, "TOKENS", tokens)
    examples = Examples(build_task("parity"), 5, held_out=True)
    found = measure_answers(Forgetful(), examples, 40)
    starts = np.array([examples[index][0][0] for index in range(40)])
    share = starts.mean()
    assert 0 < share < 1
    assert (found.length, found.rows, found.asked) == (5, 40, 200)
    assert found.error == pytest.approx(share * 3 / 5)
    assert found.whole == pytest.approx(1 - share)
    assert found.uncertainty == pytest.approx((starts * 3 / 5).std(ddof=1) / math.sqrt(40))
    right = math.log1p(math.exp(-3))
    assert found.loss == pytest.approx(right + 3 * found.error)


def test_rows_with_more_answers_count_more():
    class Zero(Forgetful):
        def forward(self, tokens):
            return SimpleNamespace(logits=torch.nn.functional.one_hot(torch.full_like(tokens, 3), 5).float())

    examples = Examples(build_task("flip_flop", {"p_ignore": 0.5}), 64)
    targets = examples.batch(range(30))[1]
    found = measure_answers(Zero(), examples, 30)
    assert found.asked == (targets >= 0).sum()
    assert found.error == pytest.approx((targets == 4).sum() / found.asked)


def test_guess_is_the_most_frequent_answer_of_training_counted_where_questions_are_held_out():
    """A task whose held-out side answers otherwise, so that another choice or another count gives another number."""

    def draw(random, T):
        held_out = random.bit_generator.seed_seq.entropy[1]
        share = 0.25 if held_out else 0.75
        return asked(np.zeros(T, dtype=np.int64), slice(T - 4, T), (random.random(4) >= share).astype(np.int64))

    examples = Examples(Task(("a", "b"), draw, 8), 8, seed=3, held_out=True)
    right = np.array([(examples[row][1] == 0).sum() for row in range(50)])
    found = measure_guess(examples, 50)
    assert found.wrong == pytest.approx(1 - right.sum() / 200)
    assert found.wrong > 0.6
    assert found.uncertainty == pytest.approx((right / 4).std(ddof=1) / math.sqrt(50))
    assert math.isnan(measure_guess(examples, 1).uncertainty)
    with pytest.raises(ValueError, match="rows: expected at least 1, got 0"):
        measure_guess(examples, 0)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    tiny_runs.write_text(folder)
    task = ("data.source=task:flip_flop", "data.task_options.p_ignore=0.5", "model.vocab_size=5")
    train(load_config(None, [f"output_dir={folder / 'run'}", *task, *tiny_runs.SMALL]))
    train(tiny_runs.config_of(folder, "text", "steps=3"))
    return folder / "run"


def test_run_is_asked_its_own_task_with_its_own_options(run):
    ((title, found),) = evaluate(run, rows=5)
    assert title == "flip_flop, p_ignore=0.5"
    assert (found.length, found.rows) == (16, 5)
    held = Examples(build_task("flip_flop", {"p_ignore": 0.5}), 16, held_out=True)
    assert found.asked == (held.batch(range(5))[1] >= 0).sum()


def test_tasks_and_lengths_are_all_asked(run):
    on = ["--on", "flip_flop:p_ignore=0.9", "--on", "flip_flop"]
    lengths = ["--length", "8", "--length", "32"]
    done = CliRunner().invoke(app, ["evaluate", str(run), *on, *lengths, "--rows", "3", "--json"])
    rows = [json.loads(line) for line in done.output.splitlines()]
    assert [(row["evaluation"], row["options"]) for row in rows] == [
        ("flip_flop", {"p_ignore": 0.9, "length": [8, 32], "rows": 3}),
        ("flip_flop", {"length": [8, 32], "rows": 3}),
    ]
    assert [[found["length"] for found in row["result"]["answers"]] for row in rows] == [[8, 32]] * 2
    (same,) = evaluate(run, [("flip_flop", {})], [32], 3)
    assert rows[1]["result"]["answers"][1]["loss"] == pytest.approx(same[1].loss, rel=1e-5)
    done = CliRunner().invoke(app, ["evaluate", str(run), "--rows", "3"])
    assert [line.split()[0] for line in done.output.splitlines()[:3]] == ["flip_flop", "length", "16"]


@pytest.mark.parametrize(
    ("on", "message"),
    [
        ([("parity", {})], "'flip_flop', whose tokens are others than those of 'parity'"),
        ([("flipflop", {})], "did you mean 'flip_flop'"),
        ([("flip_flop", {"p": 1})], "expected one of p_ignore"),
    ],
)
def test_question_that_has_no_answer_is_refused(run, on, message):
    with pytest.raises(ValueError, match=message):
        list(evaluate(run, on))


def test_option_that_gives_the_same_task_other_tokens_is_named(tmp_path):
    task = ("data.source=task:mqar", "data.task_options={vocab_size: 16, pairs: 2}", "model.vocab_size=16", "steps=3")
    trained = train(load_config(None, [f"output_dir={tmp_path / 'run'}", *tiny_runs.SMALL, *task]))
    with pytest.raises(ValueError, match="'mqar', whose tokens are others than those of 'mqar, vocab_size=32"):
        list(evaluate(trained, [("mqar", {"vocab_size": 32})]))


def test_model_of_texts_is_asked_no_task(run):
    for on in ((), [("flip_flop", {})]):
        with pytest.raises(ValueError, match="not of a task"):
            list(evaluate(run.parent / "text", on))
    with pytest.raises(FileNotFoundError, match="a run or a model folder"):
        list(evaluate(run.parent / "nothing"))


def test_exported_model_says_what_its_run_says(run, tmp_path):
    pytest.importorskip("transformers")
    from attnzoo.trained.exchange import export_run

    folder = export_run(run, tmp_path / "folder")
    ((_, there),) = evaluate(folder, [("flip_flop", {"p_ignore": 0.5})], [16], rows=5)
    ((_, here),) = evaluate(run, rows=5)
    assert there.loss == pytest.approx(here.loss, rel=1e-5)
    assert not (folder / "tokenizer.json").exists()
    with pytest.raises(ValueError, match="does not say on which"):
        list(evaluate(folder))
    with pytest.raises(ValueError, match="'word_problem' has 120 tokens, the model 5"):
        list(evaluate(folder, [("word_problem", {})]))


@pytest.mark.parametrize("name", TASKS)
def test_shown_row_is_the_row(name):
    done = CliRunner().invoke(app, ["data", "show", name, "--seed", "3", "--index", "2"], catch_exceptions=False)
    _, *lines, last = done.output.splitlines()
    task = build_task(name)
    tokens, targets = Examples(task, task.length, seed=3)[2]
    cells = [cell for line in lines for cell in line.split()[1:]]
    words = [task.words[token] for token in tokens]
    asked = ["" if target < 0 else f">{task.words[target]}" for target in targets]
    assert cells == [word + answer for word, answer in zip(words, asked, strict=True)]
    assert max(map(len, lines)) <= 100
    assert last.endswith(f"at {(targets >= 0).sum()} of {task.length}")


def test_every_task_is_listed_with_its_options():
    listed = CliRunner().invoke(app, ["data", "list"]).output
    for name in TASKS:
        assert f"{name}: " in listed
    assert "p_ignore=0.8" in listed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["needel"], "did you mean 'needle'"),
        (["needle", "dept=1"], "did you mean 'depth'"),
        (["needle", "depth"], "expected key=value"),
        (["flip_flop", "--length", "7"], "expected an even number of tokens"),
    ],
)
def test_mistake_in_what_to_show_is_named(arguments, message):
    assert message in str(CliRunner().invoke(app, ["data", "show", *arguments]).exception)
