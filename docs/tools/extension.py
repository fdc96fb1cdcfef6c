"""The build's own part of Markdown: maths, equations, links to code, source listings and figures for two schemes.

It is a plain extension of Python-Markdown, so any site generator that takes those can take it. None says which page it
converts: the page is found by its text.
"""

from __future__ import annotations

import atexit
import functools
import html
import logging
import posixpath
import re
from dataclasses import dataclass
from typing import Any

import yaml
from markdown import Extension, Markdown
from markdown.postprocessors import Postprocessor
from markdown.preprocessors import Preprocessor

from tools import equations, maths, sources

DOCS = sources.ROOT / "docs"
LISTING = re.compile(r"<!-- listing (\S+) -->")
HREF = re.compile(r'href="(src|test|eq):([^"]*)"')
FRONT = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
FIGURE = re.compile(
    r'<img (?P<before>[^>]*)src="(?P<path>[^"#]*figures/out/[^"#]*)\.svg(?:#only-light)?"(?P<after>[^>]*)>'
)
FLAG = re.compile(r"<code>(--?[a-z][^<]{0,28})</code>")  # which a narrow page would break behind its hyphens
CELL = re.compile(r"<td\b.*?</td>", re.DOTALL)
CODE = re.compile(r"<code>[^<]*</code>")
LONG = re.compile(r"(?<!<pre>)(?<!</span>)<code>[^<]{25,}</code>|(?<=-name\">)[\w.]{25,}(?=</span>)")  # or a heading
PHRASE = re.compile(r"(?<=[±✓✗○]) |(?<=\S) (?=/ )")  # a sign and its word, a slash and what is before it
# a reference in running text, or something in which it stays as it is
REFERENCE = re.compile(
    rf"{maths.FORMULA.pattern}|<(?P<element>a|code|pre|h[1-6]|script|style)\b.*?</(?P=element)>|<[^>]*>"
    r"|\((?P<tag>[a-z_]+\.\d+)\)",
    re.DOTALL,
)
log = logging.getLogger("mkdocs.zoo")  # a warning fails the strict build


@dataclass(frozen=True)
class Book:
    """All pages: their Markdown by text, their titles, and the equations on them in the order of the navigation."""

    pages: dict[str, str]
    titles: dict[str, str]
    equations: dict[str, equations.Equation]


def read_book() -> Book:
    """Every page below ``docs``, which says where equations are and what checks them."""
    order = {path: number for number, path in enumerate(_nav())}
    found = {
        path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8")
        for path in DOCS.rglob("*.md")
        if not {"node_modules", "benchmarks"} & set(path.relative_to(DOCS).parts[:1])
        or path.relative_to(DOCS).as_posix() in order
    }
    pages: dict[str, str] = {}
    titles: dict[str, str] = {}
    known: dict[str, equations.Equation] = {}
    for page in sorted(found, key=lambda page: (order.get(page, len(order)), page)):
        front = FRONT.match(found[page])
        meta = yaml.safe_load(front[1]) if front else {}
        markdown = found[page][front.end() if front else 0 :]
        pages[markdown.strip()] = page
        heading = re.search(r"^# (.+)$", markdown, re.MULTILINE)
        titles[page] = str(meta.get("title") or (heading[1] if heading else page))

        def complain(what: str, page: str = page) -> None:
            log.warning("%s: %s", page, what)

        for equation in equations.of_page(page, meta, markdown, complain):
            if equation.tag in known:
                complain(f"{equation.tag} is also on {known[equation.tag].page}")
            known[equation.tag] = equation
    return Book(pages, titles, known)


class _Settings(yaml.SafeLoader):
    """The loader of ``mkdocs.yml``, which reads no variables of the environment."""


_Settings.add_constructor("!ENV", lambda loader, node: None)


def _nav() -> list[str]:
    """The pages of the navigation, in its order."""

    def paths(item: Any) -> list[str]:
        if isinstance(item, str):
            return [item]
        return [path for part in (item.values() if isinstance(item, dict) else item or []) for path in paths(part)]

    return paths(yaml.load((sources.ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _Settings)["nav"])


@functools.cache
def _renderer() -> maths.Renderer:
    renderer = maths.Renderer()
    atexit.register(renderer.close)
    return renderer


class ZooExtension(Extension):
    """Finds the page that is converted, and works on its Markdown first and on its HTML last."""

    book: Book | None = None  # shared: a build makes one converter per page

    def __init__(self, **options: Any) -> None:
        self.config = {"directory_urls": [False, "whether page.md becomes page/ and not page.html"]}
        super().__init__(**options)
        self.page = ""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 - the library's name
        md.registerExtension(self)
        md.preprocessors.register(Before(md, self), "zoo", 35)  # while the text is as it stands in the file
        md.postprocessors.register(After(md, self), "zoo", -10)

    def reset(self) -> None:
        self.page = ""

    def find(self, markdown: str) -> Book:
        """The book, with :attr:`page` set: empty for a text that is no page, as a docstring."""
        cls = type(self)
        if cls.book is None or (markdown.startswith("# ") and markdown not in cls.book.pages):
            cls.book = read_book()
        self.page = cls.book.pages.get(markdown, "")
        return cls.book

    def complain(self, what: str) -> None:
        log.warning("%s: %s", self.page, what)

    def url(self, page: str, anchor: str) -> str:
        """Where ``page`` is, relative to this one."""
        directories = self.getConfig("directory_urls")

        def place(path: str) -> str:
            stem = path.removesuffix(".md")
            if not directories:
                return f"{stem}.html"
            return "" if stem == "index" else f"{stem.removesuffix('/index')}/"

        here = posixpath.dirname(place(self.page)) or "."
        link = "" if page == self.page else posixpath.relpath(place(page) or ".", here)
        if directories and link:
            link += "/"
        return link + (f"#{anchor}" if anchor else "")


class Before(Preprocessor):
    """Puts the tables of equations where a page asks for them."""

    def __init__(self, md: Markdown, zoo: ZooExtension) -> None:
        super().__init__(md)
        self.zoo = zoo

    def run(self, lines: list[str]) -> list[str]:
        text = "\n".join(lines)
        book = self.zoo.find(text.strip())
        if not self.zoo.page:
            return lines
        known = book.equations.values()
        own = [equation for equation in known if equation.page == self.zoo.page]
        text = text.replace("<!-- equations -->", equations.folded(own))
        if "pairs -->" in text or "pair -->" in text:
            from tools import pairs  # imports the library

            text = text.replace("<!-- equations of the pairs -->", pairs.equations())
            text = text.replace("<!-- table of the pairs -->", pairs.table(self.zoo.page))
            text = text.replace("<!-- every pair -->", pairs.every(self.zoo.page))
        if "<!-- all equations -->" in text:
            parts = [equations.summary(known)]
            for path in {equation.page: None for equation in known}:
                link = posixpath.relpath(path, posixpath.dirname(self.zoo.page) or ".")
                table = equations.table((e for e in known if e.page == path), elsewhere=True)
                parts += [f"## [{book.titles[path]}]({link})", table]
            text = text.replace("<!-- all equations -->", "\n\n".join(parts))
        return text.split("\n")


class After(Postprocessor):
    """Sets the maths, resolves links to code, tests and equations, and shows source files."""

    def __init__(self, md: Markdown, zoo: ZooExtension) -> None:
        super().__init__(md)
        self.zoo = zoo

    def run(self, text: str) -> str:
        if not self.zoo.page:
            return text
        if self.zoo.page.startswith("source/"):
            return LISTING.sub(lambda m: sources.listing(m[1]), text)
        for item in getattr(self.md, "toc_tokens", []):
            self._set_titles(item)
        text = LONG.sub(_may_break, CELL.sub(lambda cell: _hold(CODE.sub(_may_break, cell[0])), text))
        text = FLAG.sub(r'<code class="together">\1</code>', self._link_references(text))
        text = FIGURE.sub(
            r'<img \g<before>src="\g<path>.svg#only-light"\g<after>>'
            r'<img \g<before>src="\g<path>.dark.svg#only-dark"\g<after>>',
            text,
        )
        text = HREF.sub(lambda m: f'href="{self._url(m[1], m[2])}" class="to-{m[1]}"', text)
        return maths.render(text, _renderer(), self.zoo.complain)

    def _set_titles(self, item: dict[str, Any]) -> None:
        item["name"] = maths.render(item["name"], _renderer(), self.zoo.complain, maths.PLAIN)
        for child in item["children"]:
            self._set_titles(child)

    def _url(self, kind: str, target: str) -> str:
        """Where a link to code, a test or an equation leads."""
        book = ZooExtension.book
        assert book is not None
        if kind == "eq":
            if target not in book.equations:
                self.zoo.complain(f"no equation {target}")
                return "#"
            return self.zoo.url(book.equations[target].page, target)
        try:
            path, line = sources.locate(target, kind)
        except ValueError as error:
            self.zoo.complain(str(error))
            return "#"
        return self.zoo.url(sources.page_of(path), f"L-{line}" if line else "")

    def _link_references(self, text: str) -> str:
        """Make ``(fox.3)`` in running text a link to the equation."""
        book = ZooExtension.book
        assert book is not None
        keys = {tag.partition(".")[0] for tag in book.equations}

        def link(match: re.Match[str]) -> str:
            tag = match["tag"]
            if tag is None or tag.partition(".")[0] not in keys:
                return match[0]
            says = html.escape(re.sub(r"[$`*]", "", book.equations[tag].says)) if tag in book.equations else ""
            return f'(<a class="to-eq" href="{self._url("eq", tag)}" title="{says}">{tag}</a>)'

        return REFERENCE.sub(link, text)


def _may_break(code: re.Match[str]) -> str:
    """Code with the places at which a narrow page may break it."""
    return re.sub(r"(?<=\w[_/=(,])(?=[\w&])|(?<=[a-z]\.)(?=[A-Za-z])", "<wbr>", code[0])


def _hold(cell: str) -> str:
    """A cell of a table with phrases that a narrow page keeps on one line; of two numbers, each with its error."""
    return PHRASE.sub("\u00a0", cell.replace(" ±", "\u00a0±") if " / " in cell else cell)


def makeExtension(**options: Any) -> ZooExtension:  # noqa: N802 - the library's name
    return ZooExtension(**options)
