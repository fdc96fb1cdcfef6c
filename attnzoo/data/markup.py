"""The text of HTML, extracted in time proportional to its length for any input."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

BLOCKS = frozenset(["br", "dd", "div", "dl", "dt", "h1", "h2", "h3", "h4", "li", "ol", "p", "pre", "tr", "ul"])
# elements without tags inside
RAW = {name: re.compile(rf"</{name}(?=[\s/>])", re.IGNORECASE) for name in ("script", "style")}
TAG = re.compile(r"""</?([a-zA-Z][^\s/>]*)(?:=\s*"[^"]*"|=\s*'[^']*'|[^>])*+>""")
# comments, declarations and end tags, which are dropped
OTHERS = (("<!--", "-->"), ("<!", ">"), ("<?", ">"), ("</", ">"))


def plain(text: str) -> str:
    """The text of HTML without its tags, a new line where a block begins or ends.

    An unclosed tag and all after it is text.
    """
    lines = (" ".join(line.split()) for line in "".join(_pieces(text)).split("\n"))
    return "\n".join(line for line in lines if line)


def _pieces(text: str) -> Iterator[str]:
    at = 0
    while (start := text.find("<", at)) >= 0:
        yield _unescaped(text[at:start])
        tag = TAG.match(text, start)
        if tag is not None:
            name, at = tag[1].lower(), tag.end()
            if name in BLOCKS:
                yield "\n"
            if name in RAW and text[start + 1] != "/":
                closing = RAW[name].search(text, at)
                start, at = at, closing.start() if closing else len(text)
                yield text[start:at]
            continue
        end = next((end for begin, end in OTHERS if text.startswith(begin, start)), None)
        if end is None and not re.match("[a-zA-Z]", text[start + 1 : start + 2]):
            yield "<"
            at = start + 1
        elif end is not None and (found := text.find(end, start)) >= 0:
            at = found + len(end)
        else:
            at = start
            break
    yield _unescaped(text[at:])


def _unescaped(text: str) -> str:
    try:
        return html.unescape(text)
    except ValueError:  # a character reference with thousands of digits
        return text
