"""The parts of the build that are this project's own: maths, equations, and links to code."""

from __future__ import annotations

import logging
import posixpath
import re
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url
from mkdocs.utils.meta import get_data
from tools import equations, maths, sources

log = logging.getLogger("mkdocs.hooks")  # a warning fails the strict build
HREF = re.compile(r'href="(src|test|eq):([^"]*)"')
FIGURE = re.compile(
    r'<img (?P<before>[^>]*)src="(?P<path>[^"#]*figures/out/[^"#]*)\.svg(?:#only-light)?"(?P<after>[^>]*)>'
)
# a reference in running text, or something in which it stays as it is
REFERENCE = re.compile(
    rf"{maths.FORMULA.pattern}|<(?P<element>a|code|pre|h[1-6]|script|style)\b.*?</(?P=element)>|<[^>]*>"
    r"|\((?P<tag>[a-z_]+\.\d+)\)",
    re.DOTALL,
)

_known: dict[str, equations.Equation] = {}
_titles: dict[str, str] = {}
_renderer: list[maths.Renderer] = []


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Read the equations of all pages, and add the source pages and what the site carries with it."""
    _known.clear()
    _titles.clear()
    order = {path: number for number, path in enumerate(_paths(config.nav))}
    pages = [file for file in files.documentation_pages() if file.abs_src_path is not None]
    for file in sorted(pages, key=lambda file: order.get(file.src_uri, len(order))):
        markdown, meta = get_data(file.content_string)
        heading = re.search(r"^# (.+)$", markdown, re.MULTILINE)
        _titles[file.src_uri] = str(meta.get("title") or (heading[1] if heading else file.name))

        def complain(what: str, page: str = file.src_uri) -> None:
            log.warning("%s: %s", page, what)

        for equation in equations.of_page(file.src_uri, meta, markdown, complain):
            if equation.tag in _known:
                complain(f"{equation.tag} is also on {_known[equation.tag].page}")
            _known[equation.tag] = equation
    for path in sources.paths():
        files.append(File.generated(config, sources.page_of(path), content=sources.stub(path)))
    if not maths.KATEX.exists():
        raise FileNotFoundError("docs: expected docs/node_modules/katex; run `make docs-install`")
    carried = {"katex/katex.min.css": maths.KATEX / "katex.min.css", "katex/LICENSE": maths.KATEX.parent / "LICENSE"}
    carried |= {f"katex/fonts/{font.name}": font for font in sorted((maths.KATEX / "fonts").glob("*.woff2"))}
    carried |= {"iframe-worker/shim.js": maths.SHIM, "iframe-worker/LICENSE": maths.SHIM.parents[1] / "LICENSE"}
    for name, path in carried.items():
        files.append(File.generated(config, f"assets/{name}", abs_src_path=str(path)))
    return files


def _paths(nav: Any) -> list[str]:
    """The pages of the navigation, in its order."""
    if isinstance(nav, str):
        return [nav]
    items = nav.values() if isinstance(nav, dict) else nav or []
    return [path for item in items for path in _paths(item)]


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Put the tables of equations where the pages ask for them."""
    own = [equation for equation in _known.values() if equation.page == page.file.src_uri]
    markdown = markdown.replace("<!-- equations -->", equations.folded(own))
    if "<!-- all equations -->" in markdown:
        parts = [equations.summary(_known.values())]
        for path in {equation.page: None for equation in _known.values()}:
            link = posixpath.relpath(path, posixpath.dirname(page.file.src_uri) or ".")
            table = equations.table((e for e in _known.values() if e.page == path), elsewhere=True)
            parts += [f"## [{_titles[path]}]({link})", table]
        markdown = markdown.replace("<!-- all equations -->", "\n\n".join(parts))
    return markdown


def on_page_content(html: str, page: Page, files: Files, **_: Any) -> str:
    """Set the maths, resolve links to code, tests and equations, and show source files."""

    def complain(what: str) -> None:
        log.warning("%s: %s", page.file.src_uri, what)

    if page.file.src_uri.startswith("source/"):
        return html + sources.listing(page.file.src_uri.removeprefix("source/").removesuffix(".md"))
    if not _renderer:
        _renderer.append(maths.Renderer())
    for item in page.toc:
        _set_titles(item, complain)
    html = _link_references(html, page, files, complain)
    html = FIGURE.sub(
        r'<img \g<before>src="\g<path>.svg#only-light"\g<after>>'
        r'<img \g<before>src="\g<path>.dark.svg#only-dark"\g<after>>',
        html,
    )
    html = HREF.sub(lambda m: f'href="{_url(m[1], m[2], page, files, complain)}" class="to-{m[1]}"', html)
    return maths.render(html, _renderer[0], complain)


def on_post_build(**_: Any) -> None:
    """Stop KaTeX."""
    while _renderer:
        _renderer.pop().close()


def _set_titles(item: Any, complain: Any) -> None:
    item.title = maths.render(item.title, _renderer[0], complain, maths.PLAIN)
    for child in item.children:
        _set_titles(child, complain)


def _url(kind: str, target: str, page: Page, files: Files, complain: Any) -> str:
    """Where a link to code, a test or an equation leads, relative to ``page``."""
    if kind == "eq":
        if target not in _known:
            complain(f"no equation {target}")
            return "#"
        source, anchor = _known[target].page, target
    else:
        try:
            path, line = sources.locate(target, kind)
        except ValueError as error:
            complain(str(error))
            return "#"
        source, anchor = sources.page_of(path), f"L-{line}" if line else ""
    file = files.get_file_from_path(source)
    assert file is not None
    return get_relative_url(file.url, page.url) + (f"#{anchor}" if anchor else "")


def _link_references(html: str, page: Page, files: Files, complain: Any) -> str:
    """Make ``(fox.3)`` in running text a link to the equation."""
    keys = {tag.partition(".")[0] for tag in _known}

    def link(match: re.Match[str]) -> str:
        tag = match["tag"]
        if tag is None or tag.partition(".")[0] not in keys:
            return match[0]
        return f'(<a class="to-eq" href="{_url("eq", tag, page, files, complain)}">{tag}</a>)'

    return REFERENCE.sub(link, html)
