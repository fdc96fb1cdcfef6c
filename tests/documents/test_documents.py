"""The code in the README and the other documents runs, each document as one session."""

import re
from pathlib import Path

import pytest
from mktestdocs import check_md_file
from pages import GENERATED, blocks

from attnzoo.registry import pairs, unregister
from attnzoo.registry.table import BUILT_IN

ROOT = Path(__file__).parents[2]
PAGES = [path for path in (ROOT / "docs").rglob("*.md") if not GENERATED & set(path.parts)]
SHOWN = [path for path in PAGES if any(text is not None for _, text in blocks(path.read_text()))]  # run over there
RECORDS = {"benchmarks", "results"}  # these name what there was when they were written
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *sorted(str(path.relative_to(ROOT)) for path in {*PAGES} - {*SHOWN})]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        check_md_file(ROOT / name, memory=True)
    finally:
        for pair in pairs()[len(BUILT_IN) :]:
            unregister(pair)


def test_every_link_in_the_documents_leads_somewhere():
    for document in ROOT.glob("*.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+)\)", document.read_text()):
            assert (ROOT / target).exists(), f"{document.name}: {target}"


def test_every_link_of_a_page_to_a_file_of_the_repository_leads_to_its_page(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    from tools import sources

    of_pages = {(page.name, target) for page in PAGES for target in re.findall(r"\]\(src:([^)#]+)", page.read_text())}
    assert of_pages
    assert not [(page, target) for page, target in of_pages if target not in sources.paths()]
    shown = [path for path in PAGES if str(path.relative_to(ROOT)) in sources.paths()]
    beside = r"\]\(([^)#:.]+\.md)"  # to another such file, which stands elsewhere on the site
    assert shown
    assert not [(page.name, found) for page in shown for found in re.findall(beside, page.read_text())]


def test_every_kernel_that_a_page_names_exists():
    code = "".join(path.read_text() for path in (ROOT / "kernels").rglob("*.py"))
    kernels = {*re.findall(r"^def (\w+_kernel)\(", code, re.MULTILINE)}
    named = {
        (page.name, name)
        for page in PAGES
        if not RECORDS & set(page.parts)
        for name in re.findall(r"`(\w+_kernel)`", page.read_text())
    }
    assert named
    assert not [(page, name) for page, name in named if name not in kernels]


def test_every_number_of_arxiv_is_a_link():
    for page in [ROOT / "README.md", *PAGES]:
        if not RECORDS & set(page.relative_to(ROOT).parts[1:2]):
            bare = re.findall(r"(?<!\[)arXiv:\d{4}\.\d{5}", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
            assert not bare, page.name
