"""Every page of the built site, as a reader's browser shows it."""

from __future__ import annotations

import functools
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin

import pytest

DOCS = Path(__file__).parents[2] / "docs"
WRITTEN = sorted(
    str(path.relative_to(DOCS).with_suffix(".html")) for path in DOCS.rglob("*.md") if "node_modules" not in path.parts
)
SHOWN = [*WRITTEN, "source/attnzoo/gate.py.html"]
PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}

# what a reader would see: text nodes outside code, scripts and the formulas' own markup
RAW_TEX = r"""() => {
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode;
    if (node.parentElement.closest("code, pre, script, style, template, svg, .katex-mathml")) continue;
    if (/\\[a-zA-Z(\[]|\$[^$]*[\\_^][^$]*\$|\$\$/.test(node.data)) found.push(node.data.trim().slice(0, 80));
  }
  return found;
}"""
SIZES = """() => [...document.querySelectorAll("article .maths > .katex, article .maths .katex-display")]
    .filter((formula) => !formula.closest("[hidden]")).map((formula) => formula.getBoundingClientRect())
    .map((box) => [box.width, box.height])"""
# equations whose number lies over them
COVERED = """() => [...document.querySelectorAll(".katex-display > .katex > .katex-html")].filter((line) => {
    const tag = line.querySelector(":scope > .katex-tag");
    const box = tag && tag.getBoundingClientRect();
    return box && [...line.querySelectorAll(":scope > .katex-base")].some((part) => {
        const other = part.getBoundingClientRect();
        return other.right > box.left + 1 && other.left < box.right && other.bottom > box.top && other.top < box.bottom;
    });
}).map((line) => line.closest(".maths").id)"""


@pytest.mark.parametrize("path", SHOWN)
@pytest.mark.parametrize(
    "reader", [{"color_scheme": "light"}, {"color_scheme": "dark"}], indirect=True, ids=["light", "dark"]
)
def test_page_shows_whole(reader, path):
    """No error, no request that leaves the site, all maths set, all pictures there, and legible in its scheme."""
    page = reader.open(path)
    page.evaluate("document.querySelectorAll('details').forEach((e) => { e.open = true })")
    page.evaluate("document.fonts.ready")
    assert reader.complaints == []
    assert page.evaluate(RAW_TEX) == []
    assert page.locator(".katex-error, .arithmatex, merror").count() == 0
    assert all(width > 1 and height > 1 for width, height in page.evaluate(SIZES))
    assert page.evaluate(COVERED) == []
    pictures = page.evaluate("[...document.images].filter((i) => i.offsetParent && !i.naturalWidth).map((i) => i.src)")
    assert pictures == []
    assert page.evaluate("[...document.images].every((i) => i.alt.trim().length > 20)")


@pytest.mark.parametrize("path", SHOWN)
@pytest.mark.parametrize("reader", [PHONE], indirect=True, ids=["phone"])
def test_page_fits_a_phone(reader, path):
    page = reader.open(path)
    page.evaluate("document.querySelectorAll('details').forEach((e) => { e.open = true })")
    page.evaluate("document.fonts.ready")
    assert page.evaluate(COVERED) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["viewport"]["width"]
    assert reader.complaints == []


def test_search_finds_a_page_without_a_server(reader):
    page = reader.open("equations.html")
    page.locator("input[name=query]").fill("equation")
    page.locator(".md-search-result__item").first.wait_for()
    assert reader.complaints == []


class Links(HTMLParser):
    """Anchors and internal targets of one page."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = {""}
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {value for value in (values.get("id"), values.get("name") if tag == "a" else None) if value}
        for key in ("href", "src"):
            target = values.get(key)
            if target is not None and tag != "base":
                self.targets.append(target)


@functools.cache
def links_of(path: Path) -> Links:
    links = Links()
    links.feed(path.read_text(encoding="utf-8"))
    return links


def test_every_internal_link_and_anchor_leads_somewhere(site):
    dead = []
    for path in sorted(set(site.rglob("*.html")) - {site / "404.html"}):  # which is for a server alone
        for target in links_of(path).targets:
            if target.startswith(("https://", "data:", "mailto:")):
                continue
            url, anchor = urldefrag(urljoin(path.as_uri(), target))
            assert url.startswith("file://"), f"{path}: {target}"
            goal = Path(unquote(url.removeprefix("file://")))
            goal = goal / "index.html" if goal.is_dir() else goal
            if not goal.is_file() or (goal.suffix == ".html" and unquote(anchor) not in links_of(goal).anchors):
                dead.append(f"{path.relative_to(site)}: {target}")
    assert dead == []


def test_links_to_code_open_at_the_line(reader, site):
    """The first link to code and the first to a test of each page, followed by a click."""
    followed = 0
    for path in WRITTEN:
        for kind in ("to-src", "to-test"):
            page = reader.open(path)
            links = page.locator(f"article a.{kind}")
            if links.count() == 0:
                continue
            links.first.click()
            page.wait_for_load_state()
            line = page.evaluate("location.hash.slice(1)")
            if line:
                box = page.locator(f'[id="{line}"]').bounding_box()
                assert box is not None
                assert 0 <= box["y"] < 900
            assert reader.complaints == []
            followed += 1
    assert followed > 0


def test_every_figure_is_shown_in_both_schemes(site):
    drawn = {path.name for path in (DOCS / "figures" / "out").glob("*.svg")}
    shown = {
        name.split("/")[-1] for path in WRITTEN for name in (urldefrag(x)[0] for x in links_of(site / path).targets)
    }
    assert drawn - shown == set()
    assert {name.replace(".svg", ".dark.svg") for name in drawn if ".dark." not in name} <= drawn
