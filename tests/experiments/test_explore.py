"""The page of a pair: whole in itself, true to the oracle, for whatever is registered."""

from __future__ import annotations

import html
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import assert_refused
from html_pages import assert_whole

from attnzoo import get, list_variants, registry
from attnzoo.algebra.parts import PARTS
from attnzoo.data.tasks import build_task
from attnzoo.experiments.explore import measures
from attnzoo.experiments.explore.probe import LENGTH, LONGER, StateProbe
from attnzoo.registry import pairs
from attnzoo.testing import LAWS

pytest_plugins = ("command_line",)

MINE = """
from attnzoo import Pair, register
from attnzoo.algebra.transitions import Transition

class Half(Transition):
    parts = ("log_diag",)
    symbol = "(I + Diag(exp(a_t))) / 2"

    def apply(self, gate, state):
        return (1 + gate.log_diag.exp()[..., None]) / 2 * state

class Wrong(Half):
    def block(self, q, k, gate):
        form = super().block(q, k, gate)
        form.k.neg_()
        return form

register(Pair("half", "half_wall", ("log_diag",), transition=Half(), linear_layer={"gate": ()}))
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file of one's own with a pair whose linear layer has no gate projection."""
    monkeypatch.setenv(registry.FILES, "")
    monkeypatch.setattr(measures, "LENGTHS", (8,))
    monkeypatch.setattr("attnzoo.verify.LAWS", {law: LAWS[law] for law in ("oracle", "pruning", "layer")})
    (file := tmp_path / "half_pair.py").write_text(MINE)
    yield file
    for pair in {registry.get(name).pair for name, of in registry._digests.items() if of}:
        registry.unregister(pair)
    sys.modules.pop("half_pair", None)


def words(page: str) -> str:
    return " ".join(html.unescape(re.sub(r"<(style|script).*?</\1>|<[^>]+>", " ", page, flags=re.DOTALL)).split())


def test_a_page_of_a_file_is_whole_and_says_what_does_not_apply(run: Any, mine: Path, tmp_path: Path) -> None:
    page = tmp_path / "out" / "half.html"
    ran = run("explore", mine, "-o", page, "--examples", "1", "--steps", "2")
    assert (ran.code, ran.err) == (0, "")
    assert_whole(text := page.read_text())
    said = words(text)
    assert "half and half_wall" in said
    assert "Rₜ = (I + Diag(exp(aₜ))) / 2" in said
    assert "has no closed form for a block of tokens" in said
    assert "pruning of half_wall: it has no scalar decay" in said
    assert "Not run: a model of half: its layer names no gate projection" in said
    assert re.search("All ..? checks of laws that apply hold", said), said[:3000]
    assert "half | half_wall aₜ = 0 is linear_attention | nope" in said
    assert "half | half_wall the same gate is not gla | wall" in said
    figures = re.findall(r"<figure><figcaption>(.+?)</figcaption>(<svg.*?</svg>)", text, flags=re.DOTALL)
    assert len(figures) >= 12
    for caption, svg in figures:  # a title, and words at both axes
        labels = re.findall(r"<text[^>]*>([^<]+)</text>", svg)
        assert caption
        assert sum(bool(re.search("[a-z]{3}", label)) for label in labels) >= 2, caption


def test_a_broken_law_is_on_the_page_with_its_smallest_case(run: Any, mine: Path, tmp_path: Path) -> None:
    mine.write_text(MINE.replace("transition=Half()", "transition=Wrong()"))
    page = tmp_path / "half.html"
    ran = run("explore", f"{mine}:half_wall", "-o", page, "--examples", "3", "--probe", "none")
    assert ran.code == 1
    said = words(page.read_text())
    assert "Broken: oracle of half" in said
    assert "the probe was left out" in said
    repeated = re.search(rf"check\('oracle', Case\('half', ([^)]*)\), '[^']*{mine.name}'\)", said)
    assert repeated is not None
    assert int(re.search(r"\bT=(\d+)", repeated[1])[1]) <= 3  # type: ignore[index]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["foks"], ["'foks'", "did you mean 'fox'"]),
        (["fox", "gla"], ["expected variants of one pair, such as mamba2 and fox, got 'gla' too"]),
        (["missing.py"], ["'missing.py'"]),
        (["fox", "--probe", "parety"], ["'parety'", "did you mean 'parity'"]),
        (["fox", "--probe", "mqar"], ["--probe: expected a task for short rows"]),
        (["fox", "-o", "/dev/null/x.html"], ["--output"]),
        ([], ["NAME"]),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], parts: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(run("explore", *arguments), *parts)
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_somebody_else_stays(run: Any, tmp_path: Path) -> None:
    (page := tmp_path / "thesis.html").write_text("my own")
    assert_refused(run("explore", "nope", "-o", page), "--output", "somebody else's")
    assert page.read_text() == "my own"


@pytest.mark.parametrize("pair", pairs(), ids=lambda pair: pair.softmax)
def test_pictures_of_every_pair_follow_from_its_transitions(pair: Any) -> None:
    variant = get(pair.linear)
    A = measures.steps(variant, "open", 3)
    P = dict(enumerate(measures.products(A, 2)))
    assert torch.allclose(P[2][5], A[5] @ A[6], rtol=0, atol=1e-14)
    q, k, gate = measures.drawn(pair.linear, "open", 3)
    scores = measures.weights(variant, 3, alike=False)
    assert scores[7, 5] == pytest.approx(float(k[0, 5, 0] @ A[6] @ A[7] @ q[0, 7, 0]) / measures.K**0.5)
    state = measures.states(variant, 3)[measures.T]
    last = measures.T - 1
    assert np.allclose(state[:, last - 1], A[last].mT[:, (last - 1) % measures.K])
    average, most = measures.left_over(variant, "open", 3)
    assert average[0] == most[0] == 1
    assert (average <= most + 1e-12).all()
    longest = np.inf if variant.expands else 1 + 1e-9
    assert most.max() <= longest
    if not any(PARTS[part].decays for part in pair.requires) and "w" not in pair.requires:
        assert np.allclose(average, 1)  # nothing is forgotten
    assert max(np.abs(found).max() for found in measures.eigenvalues(variant, 3).values()) <= longest
    shares = measures.weights(get(pair.softmax), 3, alike=True)
    assert np.allclose(shares.sum(1), 1)
    assert [measures.grows(get(name)) for name in (pair.linear, pair.softmax)] == [False, True]


def test_other_readouts_are_drawn_beside_both_sides_of_their_gate(run: Any, tmp_path: Path, monkeypatch: Any) -> None:
    for name in list_variants("other"):
        variant = get(name)
        drawn = measures.weights(variant, 3, alike=False)
        assert np.isfinite(drawn).all()
        assert variant.causal == (not np.triu(drawn, 1).any()) == (measures.grows(variant) is not None)
    monkeypatch.setattr(measures, "LENGTHS", (8,))
    monkeypatch.setattr("attnzoo.verify.LAWS", {"oracle": LAWS["oracle"]})
    ran = run("explore", "bidirectional_fox", "-o", tmp_path / "both.html", "--examples", "1", "--probe", "none")
    assert (ran.code, ran.err) == (0, "")
    said = words((tmp_path / "both.html").read_text())
    assert (
        "read in three ways: mamba2 is the linear side, fox is the softmax side, bidirectional_fox is another" in said
    )
    assert "bidirectional_fox reads later tokens and takes no steps" in said


def test_reductions_are_measured_both_ways() -> None:
    found = {(row.whole, row.part): row for row in measures.reductions(get("fox").pair, 0)}
    row = found[("gated_deltanet", "path_fox"), ("mamba2", "fox")]
    assert (row.where, row.error) == ("wₜ = 0, βₜ = 0", 0)
    assert found[("mamba2", "fox"), ("linear_attention", "nope")].where == "gₜ = 0"
    assert found[("mamba2", "fox"), ("retnet", "alibi")].where == ""
    [kda] = [row for row in measures.reductions(get("rwkv7").pair, 0) if row.part == ("kda", "path_wall")]
    assert kda.where == "uₜ = wₜ"
    assert kda.error <= 1e-14
    assert (("gla", "wall"), ("mamba2", "fox")) not in found  # neither has the other's parts


def test_a_form_that_takes_long_is_not_timed_on_longer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "LENGTHS", (4, 8))
    assert list(measures.timed(get("nope"), "recurrent").seconds) == [4, 8]
    monkeypatch.setattr(measures, "PATIENCE", 0.0)
    assert list(measures.timed(get("nope"), "recurrent").seconds) == [4]
    refused = measures.timed(get("mamba2"), "fla")
    assert bool(refused.refused) == (not torch.cuda.is_available())


def test_a_probe_is_of_its_seed_and_guesses_by_the_most_frequent_answer() -> None:
    probe = StateProbe("parity", build_task("parity"), 3, seed=1)
    (wrong, loss), again = probe.trained("nope"), probe.trained("nope")
    assert np.array_equal(wrong, again[0])
    assert (len(wrong), len(loss)) == (LENGTH * LONGER, 3)
    assert np.isfinite(loss).all()
    assert abs(probe.guess().mean() - 0.5) < 0.05
