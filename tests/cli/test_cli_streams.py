"""The command line where something around it is missing: a reader, a stream, a package."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from attnzoo import cli
from attnzoo.terminal import console

ROOT = Path(__file__).parents[2]


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["attnzoo", *words])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return int(exit_.value.code or 0)


@pytest.mark.parametrize("name", ["omegaconf", "accelerate"])
def test_a_missing_package_is_named_with_what_installs_it(
    monkeypatch: Any, capsys: Any, tmp_path: Path, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    assert run(monkeypatch, "train", "tiny", f"output_dir={tmp_path / 'run'}") == 2
    said = f"attnzoo: this needs {name}, which is not installed: pip install 'attnzoo[train]'\n"
    assert capsys.readouterr().err == said
    assert not (tmp_path / "run").exists()


def test_tensorboard_is_not_left_out_without_a_word(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.setattr("accelerate.utils.is_tensorboard_available", lambda: False)
    assert run(monkeypatch, "train", "tiny", f"output_dir={tmp_path / 'run'}") == 2
    assert "needs tensorboard" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_extras_install_what_the_command_line_says_they_do() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    given = {
        line.partition(">")[0].replace("pyyaml", "yaml").replace("-", "_"): extra
        for extra in ("hf", "serve", "train", "eval", "tables")
        for line in extras[extra]
        if not line.startswith("attnzoo")
    }
    assert given == cli.EXTRAS


@pytest.mark.parametrize("command", ["--help", "list"])  # one is written by click, the other by rich
def test_a_reader_who_has_gone_is_no_failed_check(command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as stdout:
        ran = subprocess.run([sys.executable, "-m", "attnzoo", command], stdout=stdout, stderr=subprocess.PIPE)
    assert (ran.returncode, ran.stderr) == (141, b"")


def test_a_full_disk_behind_the_output_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "attnzoo", "--help"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (ran.returncode, ran.stderr) == (2, "attnzoo: [Errno 28] No space left on device\n")


def test_files_are_not_opened_in_the_place_of_closed_streams(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "for number in range(3):\n"
        "    os.close(number)\n"
        "sys.stdin = sys.stdout = sys.stderr = None\n"
        "from attnzoo.cli import _ready_streams\n"
        "_ready_streams()\n"
        "print('nobody reads this', flush=True)\n"
        "print('nor this', file=sys.stderr, flush=True)\n"
        "with open('file', 'w') as file:\n"
        "    print(file.fileno() > 2, file=file)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "file").read_text() == "True\n"


def test_out_of_memory_is_one_line(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    words = [
        "train",
        "tiny",
        f"output_dir={tmp_path / 'run'}",
        "model.vocab_size=2147483647",
        "model.hidden_size=65536",
    ]
    assert run(monkeypatch, *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("attnzoo: out of memory: ")


def test_a_table_is_shown_by_a_stream_that_cannot_encode_it(monkeypatch: Any) -> None:
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", narrow)
        cli._ready_streams()
        console().print("loss ± s.e.")
        narrow.flush()
    assert narrow.buffer.getvalue() == b"loss ? s.e.\n"
