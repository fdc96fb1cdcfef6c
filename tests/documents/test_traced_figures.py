"""Every measured number that the README and the pages quote comes from a record of the repository."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
RECORDS = ("benchmarks/log", "benchmarks/results", "results/2")  # these are what is quoted
SHOWS_ITS_OUTPUT = {"docs/tutorials/first_fox.md": {"14%"}}  # of the block of text above it
PAGES = [
    ROOT / "README.md",
    *(
        path
        for path in sorted((ROOT / "docs").rglob("*.md"))
        if not {"node_modules", "source"} & set(path.parts)
        and not path.relative_to(ROOT / "docs").as_posix().startswith(RECORDS)
    ),
]


@pytest.fixture
def quoted(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "figures"))
    monkeypatch.delitem(sys.modules, "quoted", raising=False)
    import quoted

    return quoted


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_figure_of_a_page_is_what_its_record_says(quoted: ModuleType, page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    allowed = SHOWS_ITS_OUTPUT.get(page.relative_to(ROOT).as_posix(), set())
    assert not [wrong for line in quoted.traced(text) if (wrong := quoted.wrong(*line))]
    for heading, section in quoted.sections(text):
        shown = quoted.quoted(section, decimals=page.name == "README.md")
        assert not set(shown) - set(dict(quoted.traced(section))) - allowed, f"{heading}: numbers without a source"


def test_a_figure_without_a_record_is_found(quoted: ModuleType) -> None:
    text = "# One\n\nIt is 2.27 times as fast, in 3 to 4 ms, at 35% and `7 ms`, by r = 0.5.\n\n```text\n9 ms\n```\n"
    assert quoted.quoted(text) == ["2.27", "3", "4", "35%"]
    assert set(quoted.quoted(text, decimals=True)) == {"2.27", "0.5", "3", "4", "35%"}
    table = "<!-- table of speeds: make -->\n\n| 5 ms |\n|---|\n| 6 ms |\n"
    assert quoted.quoted(f"{table}\nAt 36%.\n\n- In 8 ms.\n") == ["36%", "8"], "what stands below a table counts"
    traced = quoted.traced(text + "<!-- traced\n2.27 = 2 + 0.274\n35% = 0.36\n4 = none\n-->\n")
    assert [bool(quoted.wrong(*line)) for line in traced] == [False, True, True]
    assert quoted.wrong("1,234", "1234.4") == ""
    assert "expected the text" in quoted.wrong("7", 'logged("fox", "no such words 7")')
    assert "expected one row" in quoted.wrong("7", 'ms("2026-11-26-h200-fox", "ours")')
    assert quoted.wrong("7", "float('nan')")


def test_tables_of_speeds_are_those_of_the_records(quoted: ModuleType) -> None:
    """Without drawing anything: the generators of the page of benchmarks and of the README."""
    import speeds

    page, readme = ((ROOT / name).read_text(encoding="utf-8") for name in ("docs/benchmarks/index.md", "README.md"))
    assert all(f"\n{table()}\n" in page for table in speeds.TABLES.values())
    assert f"\n{speeds.five()}\n" in readme


def test_rows_of_one_table_stand_beside_peers_of_the_same_run(quoted: ModuleType) -> None:
    """A ratio of two runs is no speed: each row names one record, and its machine."""
    import speeds

    for name in ("fox", "path", "wall"):
        for folder, record, _, rows in speeds.shaped(name, ("official", "FLA PaTH", "FLA Wall")):
            assert all(row in record["rows"] for row in rows.values()), folder


def test_errors_of_path_are_below_its_peers(quoted: ModuleType) -> None:
    import speeds

    compared = 0
    for _, record in speeds.records("path"):
        errors = {(each["name"], each["K"]): each for each in record["errors"]}
        for (name, K), ours in errors.items():
            peer = errors.get((f"FLA {name.partition(',')[0]}", K)) if name.startswith("PaTH") else None
            for key in set(peer or ()) - {"name", "K"}:
                assert float(ours[key]) < float(peer[key]), (name, K, key)  # type: ignore[index]
                compared += 1
    assert compared > 50
