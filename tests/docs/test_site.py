"""Every page of the built site, as a reader's browser shows it."""

from __future__ import annotations

import functools
import html
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin

import pytest
from thinning import in_long

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [path.relative_to(DOCS) for path in DOCS.rglob("*.md") if not {"node_modules", "source"} & set(path.parts)]
LISTED = ("benchmarks/log/", "benchmarks/results/", "results/2")  # shown as they are, like code
WRITTEN = sorted(str(path.with_suffix(".html")) for path in PAGES if not path.as_posix().startswith(LISTED))
SHOWN = [
    *WRITTEN,
    "source/index.html",
    "source/attnzoo/algebra/gate.py.html",
    "source/docs/benchmarks/log/fox.md.html",
    "source/docs/benchmarks/results/2026-11-21-h200-fox/results.md.html",
    "source/docs/results/2026-11-23-needle_memory-cpu.md.html",
]

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
# the page's width, equations whose number lies over them or that are cut, and pictures that are not there
SHOWN_NOW = """async () => {
  await document.fonts.ready;
  const shown = [...document.images].filter((i) => i.offsetParent);
  await Promise.all(shown.map((i) => i.decode().catch(() => {})));
  const covered = [...document.querySelectorAll(".katex-display > .katex > .katex-html")].filter((line) => {
    const tag = line.querySelector(":scope > .katex-tag");
    const box = tag && tag.getBoundingClientRect();
    return box && [...line.querySelectorAll(":scope > .katex-base")].some((part) => {
        const other = part.getBoundingClientRect();
        return other.right > box.left + 1 && other.left < box.right && other.bottom > box.top && other.top < box.bottom;
    });
  }).map((line) => line.closest(".maths").id);
  const cut = [...document.querySelectorAll("article div.maths")].filter((e) => e.scrollWidth > e.clientWidth + 1)
    .map((e) => e.id || e.textContent);
  return [document.documentElement.scrollWidth, covered, cut, shown.filter((i) => !i.naturalWidth).map((i) => i.src)];
}"""
OTHER_SCHEME = """() => {
  [...document.querySelectorAll("form[data-md-component=palette] label")].find((label) => !label.hidden).click();
}"""

# passages whose contrast with what is behind them is below 4.5, the least that the web's guidelines allow
PALE = """() => {
  const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  const known = new Map(), grounds = new Map([[null, []]]);  // few colours stand behind many passages
  const paint = (colours) => {
    if (!known.has(colours.join())) known.set(colours.join(), measured(colours));
    return known.get(colours.join());
  };
  const measured = (colours) => {
    pen.clearRect(0, 0, 1, 1);
    for (const colour of colours) { pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1); }
    const parts = [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3).map((x) => x / 255);
    const [r, g, b] = parts.map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (e) => {
    if (!grounds.has(e)) grounds.set(e, [...behind(e.parentElement), getComputedStyle(e).backgroundColor]);
    return grounds.get(e);
  };
  return [...document.querySelectorAll("article :is(h1, h2, h3, p, li, td, th, a, code, label, figcaption, .katex)")]
    .filter((e) => e.checkVisibility() && !e.matches(".headerlink, .md-icon, .md-content__button")).filter((e) => {
      const back = behind(e), text = paint([...back, getComputedStyle(e).color]), ground = paint(back);
      return (Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05) < 4.5;
    }).map((e) => `${e.tagName} ${e.textContent.slice(0, 40)}`);
}"""


WIDTHS = (1280, 360)


@pytest.mark.parametrize(("path", "width"), [(path, WIDTHS[number % 2]) for number, path in enumerate(SHOWN)])
def test_page_reads_well(reader, path, width):
    """No error, no request that leaves the site, all maths set, all pictures there; light and dark, wide and narrow.

    Pages take turns in which of the two schemes is wide, and which narrow."""
    reader.page.set_viewport_size({"width": width, "height": 900})
    page = reader.open(path)
    page.evaluate("document.querySelectorAll('details').forEach((e) => { e.open = true })")
    assert page.evaluate(RAW_TEX) == []
    assert page.locator(".katex-error, .arithmatex, merror").count() == 0
    assert all(width > 1 and height > 1 for width, height in page.evaluate(SIZES))
    assert page.evaluate("[...document.images].filter((i) => i.alt.trim().length < 20).map((i) => i.src)") == []
    first = page.locator("body").get_attribute("data-md-color-scheme")
    second = {"default": "slate", "slate": "default"}[first]
    other = sum(WIDTHS) - width
    for scheme, widths in in_long(
        ((first, (width,)), (second, (other,))), ((first, (width, other)), (second, (other, width)))
    ):
        if scheme == second:
            page.evaluate(OTHER_SCHEME)
        page.locator(f"body[data-md-color-scheme={scheme}]").wait_for()
        for width in widths:
            page.set_viewport_size({"width": width, "height": 900})
            wide, covered, cut, absent = page.evaluate(SHOWN_NOW)
            assert wide <= width
            assert covered == []
            assert cut == []
            assert absent == []
        assert page.evaluate(PALE) == []
    assert reader.complaints == []


def test_every_picture_has_a_light_and_a_dark_form(site):
    pictures = {path: re.findall(r"<img [^>]*>", (site / path).read_text(encoding="utf-8")) for path in WRITTEN}
    alone = {path: [tag for tag in tags if "#only-" not in tag] for path, tags in pictures.items()}
    assert sum(map(len, pictures.values())) > 100
    assert {path: tags for path, tags in alone.items() if tags} == {}


@pytest.mark.parametrize("path", ["benchmarks/index.html", "results/both_sides.html"])
def test_a_wide_table_is_scrolled_below_its_first_column(reader, path):
    reader.page.set_viewport_size({"width": 360, "height": 900})
    page = reader.open(path)
    scrolled, lost = page.evaluate(
        """() => {
          const all = [...document.querySelectorAll(".md-typeset__scrollwrap")];
          const wide = all.filter((e) => e.scrollWidth > e.clientWidth);
          wide.forEach((e) => { e.scrollLeft = e.scrollWidth });
          const first = wide.flatMap((e) => [...e.querySelectorAll("tr > :first-child")]);
          return [wide.length, first.filter((e) => e.getBoundingClientRect().left < 0).map((e) => e.textContent)];
        }"""
    )
    assert scrolled > 3
    assert lost == []


def test_a_table_without_headings_begins_with_its_first_row(reader):
    page = reader.open("reference/index.html")
    assert page.locator("article table").first.evaluate("(e) => e.tHead.offsetHeight") == 0


def test_claims_stand_one_below_the_other_on_a_phone(reader):
    reader.page.set_viewport_size({"width": 360, "height": 900})
    row = reader.open("results/index.html").locator(".claims tr:has(td a)").first
    cells = [cell for cell in row.locator("td").all() if cell.is_visible()]
    boxes = [cell.bounding_box() for cell in cells]
    assert len({box["x"] for box in boxes}) == 1
    assert sorted(boxes, key=lambda box: box["y"]) == boxes


def test_light_and_dark_are_a_click_apart_and_kept(reader):
    page = reader.open("equations.html")
    before = page.locator("body").get_attribute("data-md-color-scheme")
    page.locator("form[data-md-component=palette] label:visible").click()
    after = {"default": "slate", "slate": "default"}[before]
    page.locator(f"body[data-md-color-scheme={after}]").wait_for()
    reader.open("index.html").locator(f"body[data-md-color-scheme={after}]").wait_for()
    assert reader.complaints == []


def test_search_finds_a_page_without_a_server(reader):
    page = reader.open("equations.html")
    page.locator("input[name=query]").fill("equation")
    page.locator(".md-search-result__item").first.wait_for()
    assert reader.complaints == []


def test_a_reference_shows_its_equation(reader):
    page = reader.open("derivations/fox.html")
    link = page.locator('article p a.to-eq[href="#fox.2"]').first
    link.hover()
    card = page.locator(".preview")
    assert card.is_visible()
    assert card.locator(".katex").count() == 1
    page.mouse.move(2, 2)
    assert not card.is_visible()
    page.locator('[id="fox.2"] .katex-tag').click()
    assert page.evaluate("location.hash") == "#fox.2"
    assert reader.complaints == []


def test_the_reference_shows_defaults_and_no_overloads(site):
    text = html.unescape(re.sub(r"<[^>]+>", "", (site / "reference/kernels.html").read_text(encoding="utf-8")))
    signatures = re.findall(
        r"^(?:fox_attention|path_attention|wall_attention|rotate)\($.*?^\)", text, re.MULTILINE | re.DOTALL
    )
    assert len(signatures) == 4
    assert not [signature for signature in signatures if "= ..." in signature]
    assert 'impl: Impl = "auto"' in signatures[0]


@dataclass(frozen=True)
class Links:
    """Anchors and targets of one page."""

    anchors: set[str]
    targets: list[str]


# every tag with an anchor or a target; a full parser takes ten times as long over the listings
TAG = re.compile(r"<(?P<name>[a-z][a-z0-9]*)\b(?P<rest>[^<>]*\s(?:id|name|href|src)=[^<>]*)>")
ATTRIBUTE = re.compile(r'(?<=\s)(?P<key>id|name|href|src)=(?:"(?P<quoted>[^"]*)"|(?P<bare>[^\s"\'>]+))')


@functools.cache
def links_of(path: Path) -> Links:
    anchors, targets = {""}, []
    for tag in TAG.finditer(path.read_text(encoding="utf-8")):
        for attribute in ATTRIBUTE.finditer(tag["rest"]):
            key, value = attribute["key"], html.unescape(attribute["quoted"] or attribute["bare"] or "")
            if key == "id" or (key == "name" and tag["name"] == "a"):
                anchors.add(value)
            elif key in ("href", "src") and tag["name"] != "base":
                targets.append(value)
    return Links(anchors, targets)


@functools.cache
def goal_of(folder: str, target: str) -> tuple[Path, str] | None:
    """The file and the anchor that a link from ``folder`` means; None where it leaves the site."""
    if target.startswith(("https://", "data:", "mailto:")):
        return None
    url, anchor = urldefrag(urljoin(folder, target))
    assert url.startswith("file://"), f"{folder}: {target}"
    goal = Path(unquote(url.removeprefix("file://")))
    return (goal / "index.html" if goal.is_dir() else goal), unquote(anchor)


@functools.cache
def is_file(path: Path) -> bool:
    return path.is_file()


def test_every_internal_link_and_anchor_leads_somewhere(site):
    dead = []
    for path in sorted(set(site.rglob("*.html")) - {site / "404.html"}):  # which is for a server alone
        for target in links_of(path).targets:
            found = (
                (path, unquote(target[1:])) if target.startswith("#") else goal_of(f"{path.parent.as_uri()}/", target)
            )
            if found is None:
                continue
            goal, anchor = found
            if not is_file(goal) or (goal.suffix == ".html" and anchor not in links_of(goal).anchors):
                dead.append(f"{path.relative_to(site)}: {target}")
    assert dead == []


@pytest.mark.parametrize("kind", ["to-src", "to-test"])
def test_links_to_code_open_at_the_line(kind, reader, site):
    """A link to a line of code, or of a test, followed by a click, from one page of each folder."""
    folders = {}
    for path in WRITTEN:
        if re.search(rf'href="[^"]*#L-[0-9]+" class="{kind}"', (site / path).read_text(encoding="utf-8")):
            folders.setdefault(Path(path).parent, path)
    assert folders
    for path in folders.values():
        page = reader.open(path)
        page.evaluate("document.querySelectorAll('details').forEach((e) => { e.open = true })")
        page.locator(f'article a.{kind}[href*="#L-"]').first.click()
        page.wait_for_url("**/source/**#L-*")
        line = page.evaluate("location.hash.slice(1)")
        box = page.locator(f'[id="{line}"]').bounding_box()
        assert box is not None
        assert 0 <= box["y"] < 900
        assert reader.complaints == []


@pytest.mark.parametrize("path", ["index.html", "derivations/fox.html"])
def test_a_link_to_a_page_is_shown_with_its_card(path, site):
    head = (site / path).read_text(encoding="utf-8").partition("</head>")[0]
    card = re.search(r'<meta property="og:image" content="([^"]+)">', head)
    icon = re.search(r'<link rel="icon" href="([^"]+)">', head)
    assert card
    assert icon
    assert all((site / path).parent.joinpath(found[1]).resolve().is_file() for found in (card, icon))
    assert re.search(r'<meta property="og:title" content="[^"]*attnzoo">', head)


def test_every_figure_is_shown_in_both_schemes(site):
    drawn = {path.name for path in (DOCS / "figures" / "out").glob("*.svg")}
    shown = {
        name.split("/")[-1] for path in WRITTEN for name in (urldefrag(x)[0] for x in links_of(site / path).targets)
    }
    assert drawn - shown == set()
    assert {name.replace(".svg", ".dark.svg") for name in drawn if ".dark." not in name} <= drawn
