"""Docstrings as Markdown: their maths, roles and literals are written for Sphinx."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

from griffe import Extension, Object

MATH_BLOCK = re.compile(
    r"^(?P<indent>[ ]*)\.\. math::(?P<first>[^\n]*)\n(?P<body>(?:[ ]*\n|(?P=indent)[ ]+[^\n]*\n?)*)", re.M
)
MATH = re.compile(r":math:`([^`]+)`")
ROLE = re.compile(r":(?:func|class|meth|mod|data|attr|exc):`(~?)([^`]+)`")
ROOT = Path(__file__).parents[2]


def to_markdown(text: str, module: str = "") -> str:
    """reStructuredText roles and maths, as far as this project uses them, as Markdown.

    Args:
        text: a docstring.
        module: where it stands; a role without a dot means a name of this module.
    """

    def role(match: re.Match[str]) -> str:
        target = match[2] if "." in match[2] or not module else f"{module}.{match[2]}"
        shown = match[2].rpartition(".")[2] if match[1] else match[2]
        # optional: a link where the target is on a page of the reference, else the name alone
        return f'<autoref optional identifier="{target}"><code>{shown}</code></autoref>'

    text = MATH_BLOCK.sub(_display, text)
    text = MATH.sub(r"$\1$", text)
    return ROLE.sub(role, text)


def _display(match: re.Match[str]) -> str:
    tex = "\n".join(part for part in (match["first"].strip(), textwrap.dedent(match["body"]).strip()) if part)
    lines = ["", "$$", *tex.splitlines(), "$$", ""]
    return "\n".join(match["indent"] + line if line else "" for line in lines) + "\n"


def home(obj: Object) -> str:
    """The module that a function or class is imported from: the outermost package that offers it."""
    module = place = obj.module
    while module.parent is not None:
        module = module.parent.module
        offered = module.members.get(obj.name)
        if offered is not None and offered.is_alias and offered.target_path == obj.path:
            place = module
    return place.path if place.path.startswith("attnzoo") else f"attnzoo.{place.path}"


class Markdown(Extension):
    """Rewrites every docstring as it is loaded, links each function and class of a module to its source, and shows the
    signature that has the defaults."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.is_function:
            obj.overloads = None  # they have `...` for every default: the signature that is called says them
        if obj.docstring is None:
            return
        obj.docstring.value = to_markdown(obj.docstring.value, obj.module.path)
        if (obj.is_function or obj.is_class) and obj.parent is not None and obj.parent.is_module:
            path = Path(str(obj.filepath)).resolve().relative_to(ROOT)
            obj.docstring.value += f"\n\nIn `{home(obj)}` ([source](src:{path}#{obj.name}))"
