"""The build refuses what is not so: formulas, equations and links to code that do not exist."""

from __future__ import annotations

import importlib
import re
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("mkdocs", reason="the documentation's tools are not installed: run `make docs-install`")


@pytest.fixture(scope="module")
def tools():
    sys.path.insert(0, str(ROOT / "docs"))
    from tools import docstrings, equations, maths, sources

    yield {"docstrings": docstrings, "equations": equations, "maths": maths, "sources": sources}
    sys.path.remove(str(ROOT / "docs"))


PAGE = textwrap.dedent(
    r"""
    # A page

    $$ a = b \tag{fox.1} $$

    $$ c = d \tag{fox.2} $$

    ```python
    assert 1 + 1 == 2
    ```
    """
)
GOOD = {
    "fox.1": {
        "says": "one",
        "code": "attnzoo/algebra/gate.py#Gate.dense",
        "test": "tests/forms/test_laws.py::test_causality",
    },
    "fox.2": {"says": "two", "test": "page"},
}


def complaints(tools, meta, text=PAGE) -> list[str]:
    found: list[str] = []
    tools["equations"].of_page("page.md", {"equations": meta}, text, found.append)
    return found


def test_a_true_page_passes(tools):
    existing = next(name for name in tools["sources"].symbols("tests/forms/test_laws.py") if name.startswith("test_"))
    meta = GOOD | {"fox.1": GOOD["fox.1"] | {"test": f"tests/forms/test_laws.py::{existing}"}}
    assert complaints(tools, meta) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"fox.1": GOOD["fox.1"] | {"code": "attnzoo/algebra/gate.py#Gate.sparse"}},
            "no Gate.sparse in attnzoo/algebra/gate.py",
        ),
        ({"fox.1": GOOD["fox.1"] | {"code": "attnzoo/gates/none.py"}}, "no file attnzoo/gates/none.py"),
        ({"fox.1": GOOD["fox.1"] | {"test": "tests/forms/test_laws.py::test_nothing"}}, "no test_nothing"),
        ({"fox.1": GOOD["fox.1"] | {"test": "tests/forms/test_laws.py"}}, "expected path::test_name"),
        ({"fox.1": {"code": None, "test": None}}, "expected {says"),
        ({"fox.1": {"says": "one"}}, "expected a test"),
        ({"fox.3": {"says": "three", "test": None}}, "no equation of the page has it"),
    ],
)
def test_a_name_that_does_not_exist_is_refused(tools, change, words):
    assert any(words in complaint for complaint in complaints(tools, GOOD | change))


def test_every_link_of_a_page_to_code_names_what_exists(tools):
    pages = [path for path in (ROOT / "docs").rglob("*.md") if not {"node_modules", "source"} & set(path.parts)]
    links = [found for path in pages for found in re.findall(r"\]\((src|test):([^)]+)\)", path.read_text("utf-8"))]
    assert len(links) > 100
    for kind, target in links:
        tools["sources"].locate(target, kind)  # raises for what does not exist


def test_the_build_counts_its_warnings():
    """MkDocs drops them under ``--quiet``, and ``--strict`` then has nothing to refuse."""
    (line,) = [line for line in (ROOT / "Makefile").read_text("utf-8").splitlines() if "mkdocs build" in line]
    assert "--strict" in line
    assert "--quiet" not in line


def test_numbering_and_missing_assertions_are_refused(tools):
    assert any("not in its front matter" in x for x in complaints(tools, {"fox.1": {"says": "one", "test": None}}))
    swapped = PAGE.replace("fox.1", "fox.9").replace("fox.2", "fox.1").replace("fox.9", "fox.2")
    assert any("without gaps" in x for x in complaints(tools, GOOD, swapped))
    assert any("two equations" in x for x in complaints(tools, GOOD, PAGE.replace("fox.2", "fox.1")))
    unchecked = PAGE.replace("assert 1 + 1 == 2", "print(1)")
    assert any("no python block with an assert" in x for x in complaints(tools, GOOD, unchecked))


def test_formulas_are_set_and_wrong_ones_refused(tools):
    found: list[str] = []
    renderer = tools["maths"].Renderer()
    try:
        html = tools["maths"].render(
            r'<p><span class="arithmatex">\(f_t &lt; 1\)</span></p>'
            r'<div class="arithmatex">\[ x \tag{path_fox.2} \]</div>'
            r'<span class="arithmatex">\(\nosuchcommand\)</span>',
            renderer,
            found.append,
        )
    finally:
        renderer.close()
    assert html.count('class="katex"') == 2
    assert 'id="path_fox.2"' in html
    assert len(found) == 1
    assert "nosuchcommand" in found[0]


def test_symbols_of_a_file_have_their_lines(tools):
    lines = (ROOT / "attnzoo/algebra/pruning.py").read_text(encoding="utf-8").splitlines()
    symbols = tools["sources"].symbols("attnzoo/algebra/pruning.py")
    assert lines[symbols["first_kept_keys"] - 1].startswith("def first_kept_keys")
    assert lines[symbols["Prune.log_eps"] - 1].strip().startswith("def log_eps")
    assert lines[symbols["Bound"] - 1].startswith("Bound =")
    listing = tools["sources"].listing("attnzoo/algebra/pruning.py")
    assert listing.count('id="L-') == len(lines)


def test_what_was_measured_is_shown_as_tables(tools):
    results = tools["sources"].stub("docs/benchmarks/results/2026-11-21-h200-fox/results.md")
    assert "\n# 2026-11-21-h200-fox\n" in results
    assert re.search(r"\n\n\| \|[^\n]*ms[^\n]*\|\n\|---", results)
    notes = tools["sources"].stub("docs/benchmarks/log/path.md")
    assert not re.search(r"^[^|\n].*\n\|", notes, re.MULTILINE)  # a blank line before each table
    links = re.findall(r"\]\((\.\.[^)#]*)", notes)
    assert links
    assert all((ROOT / "docs" / "source" / "docs" / "benchmarks" / "log" / link).resolve().is_file() for link in links)


def test_docstrings_become_markdown(tools):
    text = ":func:`~attnzoo.get` and :math:`x_t`.\n\n.. math:: a = b\n   + c\n\nend"
    link = '<autoref optional identifier="attnzoo.get"><code>get</code></autoref>'
    assert tools["docstrings"].to_markdown(text) == f"{link} and $x_t$.\n\n\n$$\na = b\n+ c\n$$\n\nend"
    assert 'identifier="attnzoo.algebra.gate.Gate"' in tools["docstrings"].to_markdown(
        ":class:`Gate`", "attnzoo.algebra.gate"
    )


def test_the_reference_says_where_a_name_is_imported_from(tools):
    import griffe

    library = griffe.load("attnzoo", search_paths=[ROOT])
    fox = griffe.load("kernels", search_paths=[ROOT])["fox.api.fox_attention"]
    homes = {tools["docstrings"].home(fox): ["fox_attention"]}
    for module in ("layer.build", "algebra.gate", "algebra.pruning", "evaluation.losses", "training.loop"):
        for name, member in library[module].members.items():
            if not member.is_alias and (member.is_function or member.is_class) and not name.startswith("_"):
                homes.setdefault(tools["docstrings"].home(member), []).append(name)
    assert {"attnzoo", "attnzoo.kernels.fox", "attnzoo.evaluation", "attnzoo.training"} <= set(homes)
    assert "build_attention" in homes["attnzoo"]
    assert all(hasattr(importlib.import_module(home), name) for home, names in homes.items() for name in names)


@pytest.mark.parametrize(("directories", "link"), [(False, "algebra.html#algebra.4"), (True, "../algebra/#algebra.4")])
def test_any_converter_of_markdown_makes_the_pages(tools, directories, link):
    """No site generator is asked: the page is known by its text."""
    import markdown

    own = {"tools.extension": {"directory_urls": directories}, "pymdownx.arithmatex": {"generic": True}}
    md = markdown.Markdown(extensions=[*own, "toc", "md_in_html", "tables"], extension_configs=own)
    html = md.convert((ROOT / "docs/derivations/wall.md").read_text(encoding="utf-8").split("---\n", 2)[2])
    assert f'(<a class="to-eq" href="{link}" title="linear readout">algebra.4</a>)' in html
    assert '(<a class="to-eq" href="#wall.2" title="unrolled: one distance per channel">wall.2</a>)' in html
    assert 'id="wall.8"' in html
    assert "inside-outside.dark.svg#only-dark" in html
    assert "Every equation of this page" in html
    assert 'href="src:' not in html
    docstring = md.reset().convert("as in (wall.2), $x$")
    assert "to-eq" not in docstring


def test_a_narrow_page_breaks_lines_between_phrases(tools):
    import markdown

    md = markdown.Markdown(extensions=["tools.extension", "tables", "md_in_html"])
    html = md.convert((ROOT / "docs/results/both_sides.md").read_text(encoding="utf-8").strip())
    cells = re.findall(r"<td>([^<]*±[^<]*/[^<]*)</td>", html)
    assert len(cells) > 20
    assert all(re.fullmatch(r"[\d.]+(\xa0±\xa0[\d.]+)?\xa0/ (–|[\d.]+(\xa0±\xa0[\d.]+)?)", cell) for cell in cells)
    md.reset()
    html = md.convert((ROOT / "docs/results/index.md").read_text(encoding="utf-8").strip())
    assert "✓\xa0confirmed" in html
    assert not re.search("[✓✗○] ", html.partition("A picture of each")[0].partition('class="claims"')[2])


def test_long_names_may_break_behind_their_dots(tools):
    import markdown

    md = markdown.Markdown(extensions=["tools.extension", "fenced_code"])
    html = md.convert((ROOT / "docs/how-to/train.md").read_text(encoding="utf-8").strip())
    assert "<code>attnzoo.<wbr>data.<wbr>shards.<wbr>read_" in html
    assert not re.search(r"<pre>(?:(?!</pre>).)*<wbr>", html, re.DOTALL)


def test_every_derivation_ends_with_whose_is_what():
    for path in (ROOT / "docs/derivations").glob("*.md"):
        headings = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("## ")]
        assert headings[-1] == "## Whose is what", path.name


def test_folders_behind_links_are_listed_once(tools):
    assert "kernels/fox/api.py" in tools["sources"].paths()
    assert not any(path.startswith(("attnzoo/kernels", "attnzoo/recurrences")) for path in tools["sources"].paths())


def test_who_publishes_the_site_says_where_it_and_the_repository_are(monkeypatch):
    from mkdocs.config import load_config

    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    monkeypatch.chdir(ROOT)
    for name in ("REPOSITORY_URL", "SITE_URL"):
        monkeypatch.delenv(name, raising=False)
    plain = load_config("mkdocs.yml")
    monkeypatch.setenv("REPOSITORY_URL", "https://example.org/attnzoo")
    monkeypatch.setenv("SITE_URL", "https://example.org/docs/")
    given = load_config("mkdocs.yml")
    assert (plain.repo_url, plain.site_url) == (None, "")
    assert (given.repo_url, given.site_url) == ("https://example.org/attnzoo", "https://example.org/docs/")
