"""The messages of commands that the page of troubleshooting shows are those that the commands print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from command_line import run  # noqa: F401 - a fixture

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "troubleshooting.md"
SHOWN = re.findall(r"^\$ attnzoo (.+)\n(attnzoo: .+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize(("command", "message"), SHOWN, ids=[command.split()[0] for command, _ in SHOWN])
def test_a_command_prints_the_message_that_the_page_shows(
    command: str,
    message: str,
    run: Any,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.txt").write_text("one and two. " * 500)
    ran = run(*shlex.split(command))
    expected = re.escape(message).replace(re.escape("..."), ".*")
    assert ran.code != 0
    assert re.fullmatch(expected, ran.err.strip().splitlines()[-1])


def test_the_page_shows_twenty_messages() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert len(re.findall(r"^says\(", text, re.MULTILINE)) + len(SHOWN) >= 20
    assert "\nOUT\n" not in text
