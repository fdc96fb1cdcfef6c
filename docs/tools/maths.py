"""Maths set by KaTeX while the site is built, so that a page needs no script to show a formula."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).parent
KATEX = HERE.parent / "node_modules" / "katex" / "dist"
SHIM = HERE.parent / "node_modules" / "iframe-worker" / "shim" / "index.js"
TAG = re.compile(r"\\tag\{([a-z_]+\.\d+)\}")
# what pymdownx.arithmatex (generic) leaves in the page
FORMULA = re.compile(
    r'(?P<before>\(?)<span class="arithmatex">\\\((?P<inline>.*?)\\\)</span>(?P<after>[.,;:?!)]*)'
    r'|<div class="arithmatex">\s*\\\[(?P<display>.*?)\\\]\s*</div>',
    re.DOTALL,
)
PLAIN = re.compile(r"(?P<before>)\\\((?P<inline>.*?)\\\)(?P<after>)(?P<display>(?!))?", re.DOTALL)
SHORT = 40  # characters of TeX that stay on one line, together with the punctuation around them


class Renderer:
    """KaTeX in one Node.js process for the whole build.

    Raises:
        FileNotFoundError: Node.js or KaTeX is not installed.
    """

    def __init__(self) -> None:
        beside = Path(sys.executable).with_name("node")
        node = str(beside) if beside.exists() else shutil.which("node")
        if node is None or not KATEX.exists():
            raise FileNotFoundError("docs: expected Node.js and docs/node_modules/katex; run `make docs-install`")
        self.process = subprocess.Popen(
            [node, str(HERE / "katex.mjs")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )

    def __call__(self, formulas: Sequence[tuple[str, bool]]) -> list[dict[str, str]]:
        """``{"html": ...}`` or ``{"error": ...}`` of each (tex, display)."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(formulas) + "\n")
        self.process.stdin.flush()
        answer: list[dict[str, str]] = json.loads(self.process.stdout.readline())
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def render(text: str, renderer: Renderer, complain: Callable[[str], None], pattern: re.Pattern[str] = FORMULA) -> str:
    """``text`` with every formula set; a numbered one gets its tag as anchor.

    Args:
        text: HTML out of Markdown.
        renderer: sets the formulas.
        complain: told about each formula that KaTeX refuses.
        pattern: how formulas are marked; its groups are ``inline`` and ``display``.
    """
    found = list(pattern.finditer(text))
    formulas = [(_tex(m["inline"] or m["display"] or ""), m["display"] is not None) for m in found]
    pieces, end = [], 0
    for match, (tex, display), answer in zip(found, formulas, renderer(formulas) if formulas else [], strict=True):
        if "error" in answer:
            complain(f"{answer['error']}\n    in: {tex}")
        tag = TAG.search(tex.replace("\\_", "_"))
        element = "div" if display else "span"
        anchor = f' id="{tag[1]}"' if tag else ""
        opening = f'<{element} class="maths"{anchor} data-search-exclude>'
        formula = f"{opening}{answer.get('html', html.escape(tex))}</{element}>"
        if not display:
            formula = f"{match['before']}{formula}{match['after']}"
            formula = f'<span class="together">{formula}</span>' if len(tex) <= SHORT else formula
        pieces += [text[end : match.start()], formula]
        end = match.end()
    return "".join([*pieces, text[end:]])


def _tex(escaped: str) -> str:
    """The formula as KaTeX wants it: an underscore in a tag is text."""
    return TAG.sub(lambda tag: tag[0].replace("_", "\\_"), html.unescape(escaped).strip())
