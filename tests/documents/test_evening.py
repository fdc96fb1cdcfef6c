"""The page that computes by hand: each number on it is computed again by its own check, and none escapes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/derivations/evening.md"
FENCE = re.compile(r"^ *```python\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)


def recomputed(code: str) -> set[str]:
    """The numbers that the check names: the keys of its table of values."""
    tables = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Dict)]
    (table,) = [node for node in tables if len(node.keys) > 20]
    return {key.value for key in table.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}


def test_no_number_on_the_page_escapes_its_check() -> None:
    text = PAGE.read_text()
    (block,) = FENCE.findall(text)
    code = re.sub(r"^ {4}", "", block, flags=re.MULTILINE)
    prose = FENCE.sub("", text).partition("\n## Whose is what")[0]
    prose = re.sub(r"(\w|\}|\$) - (?=\d)", r"\1 minus ", prose)  # a difference, not a sign
    printed = set(re.findall(r"-?\d+\.\d+", prose))
    assert len(printed) > 30
    assert printed == recomputed(code)
