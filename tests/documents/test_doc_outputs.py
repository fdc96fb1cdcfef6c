"""The output that a page shows below a block of code is what the block prints."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
from pages import DOCS, GENERATED, blocks

from attnzoo.registry import pairs, unregister
from attnzoo.registry.table import BUILT_IN

PAGES = sorted(
    path
    for path in DOCS.rglob("*.md")
    if "node_modules" not in path.parts and any(text is not None for _, text in blocks(path.read_text()))
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_shown_output_is_what_the_code_prints(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    session: dict[str, Any] = {"__name__": "__main__"}
    try:
        for code, text in blocks(page.read_text()):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, str(page), "exec"), session)
            if text is not None:
                assert printed.getvalue().strip() == text.strip(), code
    finally:
        for pair in pairs()[len(BUILT_IN) :]:
            unregister(pair)


def test_no_block_of_code_escapes_being_run() -> None:
    for path in DOCS.rglob("*.md"):
        if not GENERATED & set(path.parts):
            for fence in re.findall(r"^\s*```+[ {]*\.?py.*$", path.read_text(), flags=re.MULTILINE):
                assert fence.strip() == "```python", f"{path.relative_to(DOCS)}: {fence} is skipped by mktestdocs"


def test_pages_are_found() -> None:
    assert {path.parent.name for path in PAGES} >= {"tutorials"}
    assert blocks("```python\n1\n```\n\n```text\n2\n```\n```python\n3\n```\nno\n```text\n4\n```") == [
        ("1\n", "2\n"),
        ("3\n", None),
    ]
