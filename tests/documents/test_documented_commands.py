"""Every command that a page shows in a block of its own is one: its names, its options and what it sets exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
from pages import FENCE, GENERATED

from attnzoo.cli import app
from attnzoo.config import TrainConfig, load_config
from attnzoo.experiments.builtin import built_in, find_config
from attnzoo.experiments.compare import CompareConfig, plan
from attnzoo.models import presets

ROOT = Path(__file__).parents[2]
PAGES = [
    path
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
    if not GENERATED & set(path.parts)
]
ENDS = {"|", ">", "&&", "2>", ";", "&"}  # of a command, in a line of the shell


def commands(page: Path) -> list[list[str]]:
    """The words behind `attnzoo`, for each line of a page's blocks for a shell."""
    found = []
    for block in (match[2] for match in FENCE.finditer(page.read_text()) if match[1] == "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):  # settings of the environment
                words = words[1:]
            if words[:1] == ["attnzoo"] and "..." not in words:
                end = next((at for at, word in enumerate(words) if word in ENDS), len(words))
                found.append([word for word in words[1:end] if not word.startswith("$")])  # no variables of the shell
    return found


def parsed(words: list[str]) -> tuple[str, dict[str, object]]:
    """The command's name, such as "bench train", and its arguments by name."""
    command: click.Command = app
    context, path = click.Context(app, info_name="attnzoo", **app.context_settings), []
    while words[0] in [word for option in app.params for word in option.opts]:  # --with FILE.py
        words = words[2:]
    while isinstance(command, click.Group):
        inner = command.get_command(context, words[0])
        assert inner is not None, words[0]
        command, words, path = inner, words[1:], [*path, words[0]]
    made = command.make_context(path[-1], list(words), parent=context)
    return " ".join(path), made.params


def check(words: list[str]) -> None:
    """A command that is refused before it does anything fails here."""
    try:
        name, given = parsed(words)
    except click.exceptions.Exit:  # --list and the like are done at once
        return
    kind = {"train": "train", "bench train": "train", "compare": "compare"}.get(name)
    if kind is None:
        return
    config, overrides = str(given["config"]), given["overrides"]
    known = config in (*built_in(kind), *(presets.names() if kind == "train" else ()))
    schema: type = TrainConfig if kind == "train" else CompareConfig
    load_config(find_config(config, kind) if known else None, overrides, schema)  # type: ignore[arg-type]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_every_command_of_a_page_is_one(page: Path) -> None:
    for words in commands(page):
        check(words)


@pytest.mark.parametrize("line", ["trian tiny", "train tiny --jobz 2", "train tiny model.hiden_size=3", "bench fxo"])
def test_a_command_that_is_none_is_found(line: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```bash\nX=1 attnzoo {line} > file  # a remark\n```\n")
    with pytest.raises((AssertionError, click.UsageError, ValueError)):
        check(*commands(page))


def test_runs_of_the_demo_on_pages_are_those_that_make_demo_writes() -> None:
    config = load_config(built_in("compare")["demo"], schema=CompareConfig)
    written = {f"{config.output_dir}/{run.key}" for run in plan(config)}
    named = {run for page in PAGES for run in re.findall(r"runs/demo/[\w.=-]*\w(?![\w.])", page.read_text())}
    assert f"{config.output_dir}/fox" in named
    assert named - {f"{config.output_dir}/report.html"} <= written
