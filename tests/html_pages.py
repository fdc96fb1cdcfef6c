"""HTML pages as tests read them: what they load, their ids, and their tags."""

from __future__ import annotations

import re
from html.parser import HTMLParser


class Loads(HTMLParser):
    """Collects what a browser would fetch, the ids, and the tags that stay open."""

    VOID = frozenset({"meta", "br", "img", "link", "hr", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif name in ("src", "href", "srcset", "data", "action") and value:
                self.loads.append(value)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1:] == [tag], f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()


def parse(page: str) -> Loads:
    parser = Loads()
    parser.feed(page)
    return parser


def assert_whole(page: str) -> None:
    """A page loads nothing; its tags are balanced; its ids are unique and there."""
    parsed = parse(page)
    assert [url for url in parsed.loads if not url.startswith(("#", "data:"))] == []
    assert not re.search(r"@import|url\((?!#)|\bfetch\(|https?://", page)
    assert parsed.open == []
    assert len(parsed.ids) == len(set(parsed.ids))
    assert set(re.findall(r'(?:url\(|href=")#([^)"]+)', page)) <= set(parsed.ids)
