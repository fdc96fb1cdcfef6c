"""The command line as tests use it: fixtures that run a command, and two small models to train."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from attnzoo import cli

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
    def run(*arguments: object, columns: int = 140) -> Ran:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "argv", ["attnzoo", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capsys.readouterr()
        return Ran(int(exit_.value.code or 0), captured.out, captured.err)

    return run


def write_tiny(folder: Path) -> Path:
    """The file, in a folder, of a comparison that trains two small models in seconds."""
    sentences = (f"line {i}: the gate of token {i * i % 97} closes\n" for i in range(2000))
    (folder / "text.txt").write_text("".join(sentences))
    config = folder / "tiny.yaml"
    config.write_text(TINY.format(folder=folder))
    return config


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A configuration that trains two small models in seconds."""
    return write_tiny(tmp_path)


@pytest.fixture
def tiny_train(tiny: Path, tmp_path: Path) -> Path:
    """The configuration of one of the tiny runs."""
    path = tmp_path / "train.yaml"
    body = tiny.read_text().partition("train:\n")[2].partition("evaluate")[0]
    path.write_text("\n".join(line[2:] for line in body.splitlines()))
    return path


def assert_refused(ran: Ran, *parts: str) -> None:
    assert ran.code == 2
    lines = ran.err.strip().splitlines()
    assert len(lines) == 1, ran.err
    assert lines[0].startswith("attnzoo: ")
    for part in parts:
        assert part in lines[0]
