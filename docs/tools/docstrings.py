"""Docstrings as Markdown: their maths, roles and literals are written for Sphinx."""

from __future__ import annotations

import re
import textwrap
from typing import Any

from griffe import Extension, Object

MATH_BLOCK = re.compile(
    r"^(?P<indent>[ ]*)\.\. math::(?P<first>[^\n]*)\n(?P<body>(?:[ ]*\n|(?P=indent)[ ]+[^\n]*\n?)*)", re.M
)
MATH = re.compile(r":math:`([^`]+)`")
ROLE = re.compile(r":(?:func|class|meth|mod|data|attr|exc):`~?([^`]+)`")


def to_markdown(text: str) -> str:
    """reStructuredText roles and maths, as far as this project uses them, as Markdown."""
    text = MATH_BLOCK.sub(_display, text)
    text = MATH.sub(r"$\1$", text)
    return ROLE.sub(r"`\1`", text)


def _display(match: re.Match[str]) -> str:
    tex = "\n".join(part for part in (match["first"].strip(), textwrap.dedent(match["body"]).strip()) if part)
    lines = ["", "$$", *tex.splitlines(), "$$", ""]
    return "\n".join(match["indent"] + line if line else "" for line in lines) + "\n"


class Markdown(Extension):
    """Rewrites every docstring as it is loaded."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)
