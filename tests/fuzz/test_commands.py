"""Random commands: done, or refused in one line that names what is wrong; never a traceback or half a file."""

import dataclasses
import io
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest
from damages import damage
from test_configs import KEYS, VALUES
from tiny_processes import environment
from tiny_runs import SMALL, config_of, write_text

from attnzoo import cli, list_variants
from attnzoo.layer.config import AttentionConfig
from attnzoo.training import load_run, read_metrics, train

ODD = [
    *("", " ", "-", "--", "---", "-x", "--no", "-h", "--help", "--seed", "--jobs=0", "--jobs=2.5", "-o", "--to", "-1"),
    *("..", "/", "/dev/null", "/proc/x/y", "~", "*", "???", "a/b", "=", "==3", "steps", "steps=", ".=1", "a.b.c=1"),
    *("\n", "\t", "é", "€" * 300, "\udcff", "'", '"', "${x}", "{", "[1]", "None", "nan", "0", "$x$", "<b>", "a=b=c"),
]
OPTIONS = [f"model.attention_options.{field.name}" for field in dataclasses.fields(AttentionConfig)]
EVALUATIONS = ("loss", "lengths", "haystack", "pruning", "eps", "context", "maps", "harness", "flip_flop", "", "los:")
HUGE = (
    "steps",
    "batch_size",
    "length",
    "size",
    "num_",
    "tokens",
    "repeat",
    "warmup",
)  # an honest answer takes too long


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with all that a command may be about: a text, runs, and files that are none of these."""
    world = tmp_path_factory.mktemp("world")
    write_text(world)
    one = train(config_of(world, "runs/one", "steps=2", "optimizer.warmup_steps=1"))
    shutil.copytree(one, world / "runs" / "two")
    (world / "empty").mkdir()
    (world / "empty.yaml").write_text("")
    (world / "noise.yaml").write_bytes(bytes(range(256)))
    (world / "noise.npy").write_bytes(b"\x93NUMPY\x01\x00" + bytes(range(200)))
    (world / "folder.yaml").mkdir()
    lines = [f"data.source: {world / 'text.txt'}", *(line.replace("=", ": ", 1) for line in SMALL)]
    flat = dict(line.split(": ", 1) for line in lines if "." not in line.split(":")[0])
    body = "".join(f"{key}: {value}\n" for key, value in {**flat, "steps": "2"}.items())
    body += f"data: {{source: {world / 'text.txt'}, context_length: 16}}\n"
    body = body.replace("warmup_steps: 2", "warmup_steps: 1")
    (world / "train.yaml").write_text(body)
    nested = "".join(f"  {line}\n" for line in body.splitlines())
    (world / "compare.yaml").write_text(f"variants: [nope, fox]\nevaluate: {{tokens: 64}}\ntrain:\n{nested}")
    return world


def command(rng, world):
    """The words of a good command; those that train and measure write into the current folder."""
    name = rng.choice([*list_variants(), "fox"])
    files = [str(path) for path in [*world.iterdir(), *(world / "runs").iterdir()]]
    train_words = ["train", str(world / "train.yaml"), f"model.attention={name}", "output_dir=run"]
    odd = rng.choice(VALUES)
    keys = [key for key in [*KEYS, *OPTIONS] if odd != "9" * 30 or not any(part in key for part in HUGE)]
    odd = [f"{rng.choice(keys)}={odd}"]
    return rng.choice(
        [
            ["list"],
            ["show", name],
            ["verify", name, "--examples", "1", "--seed", "3"] if rng.random() < 0.1 else ["verify", "--seed", "x"],
            train_words,
            train_words + odd,
            train_words + odd,
            ["train", rng.choice(files), *train_words[2:], "steps=2"],
            ["compare", str(world / "compare.yaml"), "output_dir=out", rng.choice(["variants=[nope]", *odd])],
            ["compare", rng.choice(files), "output_dir=out"],
            ["report", str(world / "runs" / "one"), "-o", "page.html"],
            ["report", str(world / "runs"), "-o", "page.html", "--title", rng.choice(ODD)],
            ["report", rng.choice(files), rng.choice(files), "-o", "page.html"],
            ["export", str(world / "runs" / "one"), "--to", "model"] if rng.random() < 0.2 else ["export", name],
            ["import", rng.choice(files), "--to", "imported"],
            ["bench", rng.choice(["fox", "path", "decode", "cpu"]), "--shapes", rng.choice(ODD)],
            ["--version"],
            ["train", "--help"],
            ["bench"],
        ]
    )


def spoiled(rng, words):
    """The same words with a mistake or two of a hurried hand."""
    words = list(words)
    for _ in range(rng.choice([0, 1, 1, 2])):
        at = rng.randrange(len(words) + 1)
        kind = rng.choice(["insert", "drop", "twice", "replace", "letter", "swap"])
        if kind == "insert" or at == len(words):
            words.insert(at, rng.choice(ODD))
        elif kind == "drop":
            del words[at]
        elif kind == "twice":
            words.insert(at, words[at])
        elif kind == "replace":
            words[at] = rng.choice(ODD)
        elif kind == "letter" and words[at]:
            letter = rng.randrange(len(words[at]))
            words[at] = words[at][:letter] + rng.choice(["", "x", "-", "="]) + words[at][letter + 1 :]
        elif kind == "swap":
            other = rng.randrange(len(words))
            words[at], words[other] = words[other], words[at]
    return words


def run(monkeypatch, words):
    """Exit code, standard output and standard error of a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "argv", ["attnzoo", *words])
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as exit_:
        cli.main()
    return exit_.value.code or 0, out.getvalue(), err.getvalue()


def assert_told(code, out, err, words):
    """What a command may say."""
    if code == 2 and not err:
        assert out.startswith("Usage: "), words  # a group of commands without one
        return
    if code == 2:
        (line,) = err.splitlines()
        assert line.startswith("attnzoo: "), line
        split = [re.findall(r"[^=.:\s]+", word) for word in words]
        pieces = [piece for word, parts in zip(words, split, strict=True) for piece in [word, word[:2], *parts]]
        named = [piece for piece in pieces if repr(piece) in line or (piece and piece in line)]
        blank = not all(word.strip() for word in words)  # which no message can show
        assert named or blank or "Missing" in line, line
    else:
        assert code == 0, (code, err)
        assert out, words


def assert_whole(folder, runs=True):
    """What a command may leave behind: whole runs, whole pages, or runs that have not reached a checkpoint."""
    for path in folder.rglob("*"):
        assert path.suffix not in (".part", ".tmp"), path
        if path.suffix == ".html":
            assert path.read_text().rstrip().endswith("</html>"), path
        if runs and path.name.startswith("step-"):
            load_run(path.parents[1])
            losses = [row["loss"] for row in read_metrics(path.parents[1])]
            assert all(map(math.isfinite, losses)), path


def test_random_commands_are_done_or_refused_in_one_line(fuzz, world, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    done = 0
    for rng in fuzz(20):
        folder = tmp_path / f"case{fuzz.seed}"
        folder.mkdir()
        monkeypatch.chdir(folder)
        words = spoiled(rng, command(rng, world))
        before = {path: path.stat().st_mtime_ns for path in world.rglob("*") if "evaluation" not in path.name}
        code, out, err = run(monkeypatch, words)
        assert_told(code, out, err, words)
        assert_whole(folder)
        changed = [path for path, stamp in before.items() if path.exists() and path.stat().st_mtime_ns != stamp]
        assert not [path for path in changed if path.is_file() and path.name != ".lock"], words
        done += code == 0
        monkeypatch.chdir(tmp_path)
        shutil.rmtree(folder)
    assert done > fuzz.done // 8 or fuzz.done == 1


def test_random_evaluations_are_done_or_refused_in_one_line(fuzz, world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = [str(path) for path in [*world.iterdir(), *(world / "runs").iterdir()]]
    for rng in fuzz(4):
        option = rng.choice(["eps", "tokens", "bound", "mode", "depths", "task", "layer"])
        odd = rng.choice([value for value in VALUES if value != "9" * 30])
        on = rng.choice(EVALUATIONS)
        on = rng.choice(["loss", "maps:tokens=4", on, f"{on}:{option}={odd}"])
        what = rng.choice([*[str(world / "runs" / "one")] * 9, *files])
        words = ["evaluate", what, "--on", on, "--length", rng.choice(["8", "16"]), "--out", "out"]
        code, out, err = run(monkeypatch, words)
        assert_told(code, out, err, words)
        assert_whole(tmp_path)
        assert (tmp_path / "out").exists() == (code == 0), words
        shutil.rmtree(tmp_path / "out", ignore_errors=True)


def test_reports_of_damaged_runs_are_whole_or_refused_in_one_line(fuzz, world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for rng in fuzz(4):
        shutil.copytree(world / "runs", tmp_path / "runs")
        files = sorted(path for path in (tmp_path / "runs").rglob("*") if path.is_file() and path.name != ".lock")
        story = damage(rng.choice(files), rng)
        code, out, err = run(monkeypatch, ["report", "runs", "-o", "page.html"])
        assert_told(code, out, err, ["report", "runs", "-o", story])
        assert_whole(tmp_path, runs=False)
        assert (tmp_path / "page.html").exists() == (code == 0), story
        (tmp_path / "page.html").unlink(missing_ok=True)
        shutil.rmtree(tmp_path / "runs")


def test_random_streams_and_signals_end_a_process_as_said(fuzz, tmp_path):
    for rng in fuzz(2):
        words = rng.choice([["train", "missing.yaml"], ["--help"], ["train", "tiny", "stepz=\udcff"], ["compare", "é"]])
        streams = {name: rng.choice([subprocess.PIPE, subprocess.DEVNULL]) for name in ("stdin", "stdout", "stderr")}
        closed = [number for number in range(3) if rng.random() < 0.3]

        def close(closed=closed):
            for number in closed:
                os.close(number)

        encoding = {"PYTHONIOENCODING": rng.choice(["utf-8", "ascii", "latin-1"])}
        words = [os.fsencode(word) for word in words]
        process = subprocess.Popen(
            [sys.executable, "-m", "attnzoo", *words],
            cwd=tmp_path,
            env=environment() | encoding,
            preexec_fn=close,
            **streams,
        )
        blow = rng.choice([0, 0, signal.SIGINT, signal.SIGTERM])
        if blow:
            try:
                process.wait(timeout=rng.random() * 0.1)
            except subprocess.TimeoutExpired:
                process.send_signal(blow)
        _, err = process.communicate(timeout=300)
        expected = {0 if words == [b"--help"] else 2, 130, 1 if blow == signal.SIGINT else 0, -blow}
        assert process.returncode in expected, (words, closed, blow, process.returncode, err)
        if process.returncode == 2 and err is not None and 2 not in closed:
            *before, last = err.splitlines()
            assert not before or blow == signal.SIGINT, err  # Python says so where an interrupt came to nothing
            assert last.startswith(b"attnzoo: "), err
        assert list(tmp_path.iterdir()) == []
