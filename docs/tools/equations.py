"""The numbered equations: what each says, where it is in code, and which test checks it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tools.maths import TAG
from tools.sources import locate

FENCE = re.compile(r"^ *(?P<fence>`{3,})(?P<info>[^\n]*)\n(?P<code>.*?)^ *(?P=fence) *$", re.DOTALL | re.MULTILINE)
FIELDS = {"says", "code", "test"}


@dataclass(frozen=True)
class Equation:
    """One numbered equation.

    Args:
        tag: page key, dot, number, as in ``\\tag{fox.3}``.
        page: the Markdown file, relative to the docs folder.
        says: what it states, in Markdown.
        code: where it is implemented, ``path`` or ``path#symbol``.
        test: what checks it: ``path::test_name``, or ``page`` for a code block of its own page.
    """

    tag: str
    page: str
    says: str
    code: tuple[str, ...]
    test: tuple[str, ...]


def of_page(page: str, meta: Mapping[str, Any], markdown: str, complain: Callable[[str], None]) -> list[Equation]:
    """The equations of a page, in order.

    Args:
        page: the Markdown file, relative to the docs folder.
        meta: its front matter.
        markdown: its text.
        complain: told about every disagreement between front matter, text, code and tests.
    """
    listed = meta.get("equations") or {}
    text = FENCE.sub("", markdown)
    tags = TAG.findall(text)
    for tag in [*{tag: 0 for tag in tags if tags.count(tag) > 1}]:
        complain(f"{tag} is the tag of two equations")
    for tag in [*(set(tags) - set(listed))]:
        complain(f"{tag} is numbered on the page and not in its front matter")
    for tag in [*(set(listed) - set(tags))]:
        complain(f"{tag} is in the front matter and no equation of the page has it")
    by_key: dict[str, list[int]] = {}
    for tag in tags:
        key, _, number = tag.partition(".")
        by_key.setdefault(key, []).append(int(number))
    for key, numbers in by_key.items():
        if numbers != list(range(1, len(numbers) + 1)):
            complain(f"{key}: expected numbers from 1 on without gaps, in the order of the page, got {numbers}")
    asserts = any(m["info"].strip() == "python" and "assert" in m["code"] for m in FENCE.finditer(markdown))
    return [_equation(tag, page, listed[tag], asserts, complain) for tag in tags if tag in listed]


def _equation(tag: str, page: str, fields: object, asserts: bool, complain: Callable[[str], None]) -> Equation:
    if not isinstance(fields, dict) or not isinstance(fields.get("says"), str) or not set(fields) <= FIELDS:
        complain(f"{tag}: expected {{says: ..., code: ..., test: ...}}, got {fields!r}")
        fields = {"says": ""}
    if "test" not in fields:
        complain(f"{tag}: expected a test, or `test: null`")
    equation = Equation(tag, page, fields["says"], _tuple(fields.get("code")), _tuple(fields.get("test")))
    for kind, targets in (("src", equation.code), ("test", equation.test)):
        for target in targets:
            if kind == "test" and target == "page":
                if not asserts:
                    complain(f"{tag}: is said to be checked by the page, which has no python block with an assert")
                continue
            try:
                locate(target, kind)
            except ValueError as error:
                complain(f"{tag}: {error}")
    return equation


def _tuple(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    return tuple(str(item) for item in value) if isinstance(value, list) else (str(value),)


def table(equations: Iterable[Equation], *, elsewhere: bool = False) -> str:
    """A Markdown table of ``equations``.

    Args:
        equations: its rows.
        elsewhere: the table is on another page than the equations.
    """
    rows = [["equation", "says", "in code", "checked by"], ["---"] * 4]
    for equation in equations:
        code = ", ".join(f"[{_name(target)}](src:{target})" for target in equation.code)
        test = ", ".join(_checked_by(target, elsewhere) for target in equation.test) or "*no test*"
        rows.append([f"[{equation.tag}](eq:{equation.tag})", equation.says.replace("|", "\\|"), code, test])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(['<div class="equations" markdown>', "", *lines, "", "</div>"])


def folded(equations: Iterable[Equation]) -> str:
    """The table of a page's own equations, in Markdown, closed until a reader opens it."""
    summary = "<summary>Every equation of this page, its code and its test</summary>"
    return f'\n<details class="info" markdown>\n{summary}\n\n{table(equations)}\n\n</details>\n'


def _checked_by(target: str, elsewhere: bool) -> str:
    if target == "page":
        return "code on its page" if elsewhere else "code on this page"
    return f"[{_name(target)}](test:{target})"


def _name(target: str) -> str:
    """The last part of a link to code as HTML, breakable at its underscores and dots."""
    name = re.split("#|::", target)[-1] if "#" in target or "::" in target else target.split("/")[-1]
    return "<code>" + name.replace(".", ".<wbr>").replace("_", "&#95;<wbr>") + "</code>"


def summary(equations: Iterable[Equation]) -> str:
    """How many there are, and which have no test, in Markdown."""
    equations = list(equations)
    bare = [equation for equation in equations if not equation.test]
    text = f"{len(equations)} numbered equations, of which {len(equations) - len(bare)} are checked"
    if not bare:
        return text + "."
    return text + ". Without a test: " + ", ".join(f"[{e.tag}](eq:{e.tag}) ({e.says})" for e in bare) + "."
