"""The HTML shell of all pages, with style and script inside, filled from a template."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

HERE = Path(__file__).parent


def render_template(template: str, **context: Any) -> str:
    """A page from a template of this folder that extends ``base.html.j2``.

    Args:
        template: file name.
        context: the template's variables; `title` is the heading.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters["prose"] = prose
    style, script = ((HERE / name).read_text(encoding="utf-8") for name in ("style.css", "script.js"))
    return environment.get_template(template).render(style=style, script=script, **context)


def prose(text: str) -> Markup:
    """The text with what stands between backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))
