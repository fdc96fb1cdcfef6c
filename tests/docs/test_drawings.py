"""The committed figures are what their code draws, where that needs no training."""

from __future__ import annotations

import importlib
import re
import sys
from importlib import metadata
from pathlib import Path

import matplotlib
import pytest

from attnzoo import Pair, get, register
from attnzoo.registry import unregister
from attnzoo.registry.table import PAIRS

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs" / "figures"


@pytest.fixture
def code(monkeypatch, tmp_path):
    """The drawing code, which writes to a temporary folder here."""
    monkeypatch.syspath_prepend(str(FIGURES))
    for path in FIGURES.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    import lattice
    import make
    import style

    monkeypatch.setattr(style, "OUT", tmp_path)
    return {"lattice": lattice, "make": make, "style": style, "out": tmp_path}


@pytest.mark.parametrize("name", ["forgotten", "generation", "lattice", "schematics", "zoo"])
def test_committed_figures_are_drawn_anew_to_the_letter(code, name):
    pinned = re.search(r"^matplotlib==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    if metadata.version("matplotlib") != pinned[1]:
        pytest.skip(f"drawn with matplotlib {pinned[1]}, installed is {metadata.version('matplotlib')}")
    code["make"].main([name])
    drawn = sorted(code["out"].glob("*.svg"))
    assert len(drawn) >= 2
    for path in drawn:
        assert path.read_bytes() == (FIGURES / "out" / path.name).read_bytes(), path.name


def test_make_docs_trains_nothing(code):
    """What it draws reads committed data; the drawings that need models have a target of their own."""
    drawn = [name for name in code["make"].DRAWINGS if name not in code["make"].TRAINED]
    for name in drawn:
        assert "model_of" not in code["make"].DRAWINGS[name].__code__.co_names, name
    for module, function in code["make"].SINGLE.values():
        assert "model_of" not in getattr(importlib.import_module(module), function).__code__.co_names, function
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    docs = makefile.partition("\ndocs: ")[2].partition("\n\n")[0]
    assert "make.py fox" not in docs
    assert "compare" not in docs


def test_letters_are_matplotlibs_own(code, monkeypatch):
    """Also where the cached list lacks them, as after a process whose matplotlib was deleted meanwhile."""
    from matplotlib.font_manager import findfont, fontManager

    monkeypatch.setattr(fontManager, "ttflist", [])
    fontManager._findfont_cached.cache_clear()
    code["style"].own_fonts()
    for family in ("DejaVu Sans", "cmr10", "cmmi10", "cmsy10"):
        assert Path(findfont(family, fallback_to_default=False)).is_relative_to(matplotlib.get_data_path())


def test_tables_of_results_are_those_of_the_records(code):
    import results

    assert results.TABLES
    for page in results.TABLES:
        assert results.with_tables(page) == page.read_text(encoding="utf-8"), (
            f"{page.name}: python docs/figures/make.py results"
        )


def test_every_built_in_pair_has_its_place_in_the_lattice(code):
    assert sorted(code["lattice"].PLACES) == sorted(pair.linear for pair in PAIRS)


def test_every_reduction_has_words_and_follows_from_arrows(code):
    """What the lattice leaves out is made of the arrows it draws."""
    edges = code["lattice"].reductions()
    assert all(edges.values())
    for side in ("linear", "softmax"):
        of_side = [edge for edge in edges if get(edge[0]).side == side]
        drawn = {edge for edge in of_side if not code["lattice"].implied(edge, of_side)}
        reached = set(drawn)
        for _ in range(len(of_side)):
            reached |= {(a, d) for a, b in reached for c, d in drawn if b == c}
        assert set(of_side) <= reached


def test_a_registered_pair_is_in_the_drawing_the_table_and_the_pages(code, monkeypatch):
    """All sets of parts have names already, so it shares a box and a cell."""
    pytest.importorskip("mkdocs", reason="the documentation's tools are not installed: run `make docs-install`")
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    from parts import parts
    from tools import pairs

    def drawn():
        (axes,) = parts(code["style"].LIGHT).axes
        return [text.get_text() for text in axes.texts]

    before = drawn()
    register(pair := Pair("slow_mamba", "slow_fox", ("log_decay", "angle"), paper="nobody, 2026"))
    try:
        assert sorted(drawn()) == sorted([*before, "slow_mamba", "slow_fox"])
        row = next(line for line in pairs.table("derivations/products.md").splitlines() if line.startswith("| $P$"))
        assert row.endswith("<br>`slow_mamba`, [`slow_fox`](../reference/pairs.md#slow_fox) |")
        own = pairs.every("reference/pairs.md").partition("## slow_mamba, slow_fox { #slow_fox }")[2]
        assert "Rₜ  = Rot(θₜ)" in own
        assert "nobody, 2026" in own
        assert "gate='forget'" in own.partition("Of `slow_fox`:")[2]
        assert '"softmax": "slow_fox"' in pairs.script()
        assert 'id="slow_fox"' in pairs.equations()
    finally:
        unregister(pair)


def test_weights_of_the_home_page_are_what_its_script_writes(code):
    import home

    script = home.OUT.read_text(encoding="utf-8")
    assert len(script) <= 350 * 1024
    model, facts = home.read(script)
    assert home.write(model, facts) == script
    assert facts == home.facts_of(model, home.home_config(), facts.bits)
    page = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert f"{facts.parameters / 1e3:.0f} thousand weights" in page
    assert f"{facts.tokens / 1e6:.1f} million bytes" in page
    assert f"{facts.bits:.1f} bits" in page
