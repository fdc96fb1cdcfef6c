"""The code in the README and the other documents runs, each document as one session."""

import re
from pathlib import Path

import pytest
from mktestdocs import check_md_file
from test_doc_outputs import GENERATED, blocks

from attnzoo.registry import BUILT_IN, pairs, unregister

ROOT = Path(__file__).parents[1]
PAGES = [path for path in (ROOT / "docs").rglob("*.md") if not GENERATED & set(path.parts)]
SHOWN = [path for path in PAGES if any(text is not None for _, text in blocks(path.read_text()))]  # run over there
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
