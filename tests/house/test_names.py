"""A name that is unknown is refused with all that there are, and the nearest."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from attnzoo import build_attention, get, list_variants
from attnzoo.data.config import DataConfig
from attnzoo.data.sources import build_data
from attnzoo.errors import nearest, no_run, unknown
from attnzoo.experiments.builtin import find_config
from attnzoo.registry import from_file
from attnzoo.registry.table import KNOWN_AS, OUTSIDE
from attnzoo.samples import random_inputs
from attnzoo.trained.model import load_trained
from attnzoo.training import load_run, read_metrics
from attnzoo.training.small import what_is_there


@pytest.mark.parametrize("name", [None, 1, [], {}])
def test_a_name_that_is_no_string_is_refused(name: Any) -> None:
    with pytest.raises(TypeError, match="name: expected the name of a variant, got "):
        get(name)


@pytest.mark.parametrize(
    ("given", "meant"), [("foks", "fox"), ("FoX", "fox"), ("mamba-2", "mamba2"), ("path-fox", "path_fox")]
)
def test_an_unknown_variant_is_told_the_nearest_and_what_lists_all(given: str, meant: str) -> None:
    every = len(list_variants()) + len(list_variants("other"))
    with pytest.raises(ValueError, match=f"^unknown variant '{given}'") as error:
        get(given)
    said = f"unknown variant '{given}' (did you mean '{meant}'?): expected one of the {every} that `attnzoo list` shows"
    assert str(error.value) == said


def test_of_many_names_the_nearest_stands_first() -> None:
    many = [f"n{number}" for number in range(20)] + ["fox"]
    assert str(unknown("thing", "foks", many)).startswith(
        "unknown thing 'foks' (did you mean 'fox'?): expected one of n0, n1"
    )
    assert str(unknown("thing", "zz", many, "a file", see="x list")) == (
        "unknown thing 'zz': expected one of the 21 that `x list` shows, or a file"
    )
    with pytest.raises(
        ValueError, match=r"^unknown option 'blok' of 'fox' \(did you mean 'block'\?\): expected one of"
    ):
        build_attention("fox", blok="pro")


def test_name_unlike_any_is_refused_without_a_guess() -> None:
    with pytest.raises(ValueError, match="unknown variant 'zzzzzz'") as error:
        get("zzzzzz")
    assert "did you mean" not in str(error.value)
    assert str(error.value).endswith(" shows, or one of a file of yours (`attnzoo --with FILE.py ...`)")


@pytest.mark.parametrize(
    ("given", "here"),
    [
        ("gated_deltaproduct", "'gated_deltanet' with num_householder=2 or more"),
        ("Kimi-Linear", "'kda'"),
        ("MoBA", "none of these pairs: docs/derivations/outside.md"),
    ],
)
def test_a_name_that_others_use_is_told_what_it_is_here(given: str, here: str) -> None:
    with pytest.raises(ValueError, match=rf"unknown variant .*\('{given}' is {here}"):
        get(given)


def test_every_other_name_is_that_of_no_pair_and_leads_to_one() -> None:
    """Names in quotes are variants, and their layers take what stands beside them."""
    assert not set(KNOWN_AS) & set(list_variants())
    for told in KNOWN_AS.values():
        for name, option, value in re.findall(r"(?<!=)'(\w+)'(?: with (\w+)=('?\w+'?))?", told):
            options = {option: ast.literal_eval(value)} if option else {}
            build_attention(name, hidden_size=16, num_heads=2, **options)
    assert (Path(__file__).parents[2] / OUTSIDE.split()[4]).is_file()


def test_unknown_side_is_refused() -> None:
    with pytest.raises(
        ValueError, match="unknown side 'sotfmax': expected one of linear, softmax, other; did you mean 'softmax'"
    ):
        list_variants("sotfmax")  # type: ignore[arg-type]


def test_unknown_regime_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown regime 'opne': .*did you mean 'open'"):
        random_inputs("fox", regime="opne")  # type: ignore[arg-type]


def test_nearest_ignores_case_and_gives_up_when_far() -> None:
    assert nearest("PATH", ["path", "fox"]) == "path"
    assert nearest("qqq", ["path", "fox"]) is None
    assert nearest(None, []) is None


def test_nearest_of_equally_close_options_is_the_first() -> None:
    assert nearest("mamba", ["fox", "mamba2", "mamba3"]) == "mamba2"
    assert nearest("mamba", ["fox", "mamba3", "mamba2"]) == "mamba3"


def test_a_path_where_nothing_is_leads_to_the_nearest_beside_it(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/first", "runs/rope", "texts"):
        Path(folder).mkdir(parents=True)
    for file in ("first.yaml", "sandwich.py"):
        Path(file).touch()
    for ask, given, meant in (
        (lambda given: find_config(given, "train"), "frist.yaml", "first.yaml"),
        (lambda given: find_config(given, "train"), "first.yml", "first.yaml"),
        (lambda given: find_config(given, "train"), "tinny.yaml", "tiny"),
        (from_file, "sandwhich.py", "sandwich.py"),
        (load_trained, "runs/frist", "runs/first"),
        (load_trained, "fox-smal", "fox-small"),
        (read_metrics, "runs/frist", "runs/first"),
        (load_run, "runs/rop", "runs/rope"),
        (lambda given: build_data(DataConfig(source=given)), "textss", "texts"),
    ):
        with pytest.raises(FileNotFoundError) as error:
            ask(given)
        assert str(error.value).endswith(f"; did you mean {meant!r}?"), error.value
    for far in ("elsewhere/qqqq.yaml", "others", "runs", "texts"):  # a folder is not offered in its own place
        with pytest.raises(FileNotFoundError) as error:
            find_config(far, "compare")
        assert "did you mean" not in str(error.value)


def test_unknown_with_no_options_says_so() -> None:
    assert str(unknown("key", "x", [])) == "unknown key 'x': none is expected"


def test_for_a_missing_run_folders_alone_are_offered(tmp_path: Path) -> None:
    (tmp_path / "fox-run.txt").write_text("a text")
    (tmp_path / "fox-runs").mkdir()
    for missing in (no_run(tmp_path / "fox-run", "config.yaml"), what_is_there(tmp_path / "fox-run")):
        assert f"did you mean '{tmp_path / 'fox-runs'}'?" in str(missing)


def test_an_empty_name_is_no_folder() -> None:
    with pytest.raises(FileNotFoundError, match="^no configuration file ''"):
        find_config("", "train")
