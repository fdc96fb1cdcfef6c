"""The interactive page, driven by hand, against the library: every number it shows is the oracle's."""

from __future__ import annotations

import math
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from driven import slide, tensor

from attnzoo import Gate, Prune, get, oracle, pairs
from attnzoo.algebra.pruning import dropped_mass, first_kept_keys
from attnzoo.registry.table import PAIRS, PRODUCTS

FIGURES = Path(__file__).parents[2] / "docs" / "figures"
PARTS = {"log_decay": "g", "log_diag": "a", "angle": "theta", "w": "w", "beta": "beta"}
SOFTMAX = [pair.softmax for pair in (*PAIRS, PRODUCTS[-1])]  # the last one has every part


@pytest.fixture
def play(reader):
    page = reader.open("interactive.html")
    page.locator("form[data-ready]").wait_for()
    page.locator("#pair").select_option("fox")
    yield page
    assert reader.complaints == []


def test_first_view_is_the_first_scene_with_its_words(reader):
    page = reader.open("interactive.html")
    page.locator("form[data-ready]").wait_for()
    assert page.locator("p[data-says]").inner_text() == page.locator("[data-scene]").first.get_attribute("data-says")
    assert page.evaluate("attnzoo.read().pair") == "nope"
    assert page.evaluate("location.hash") == ""
    assert reader.complaints == []


def test_a_slider_of_all_tokens_says_where_they_stand(play):
    said = play.locator("output[data-for=f-all]")
    assert said.inner_text() == "0.02 to 0.95"
    slide(play, "f-all", "Home")
    assert said.inner_text() == "0.00"
    slide(play, "f3", "End")
    assert said.inner_text() == "0.00 to 1.00"


@pytest.mark.parametrize("side", ["linear", "softmax"])
def test_the_readout_that_is_chosen_is_written(play, side):
    play.get_by_label(f"{side} side").check()
    shown = play.locator(".readouts .katex:visible")
    assert shown.count() == 1
    assert ("softmax" in shown.inner_text()) == (side == "softmax")


def test_both_memories_are_shown_token_by_token(play):
    now = check(play)
    gate = Gate(log_decay=tensor(now["gate"]["g"])[None, :, None])
    q, k, v = (tensor(now[name])[None, :, None] for name in "qkv")
    for side, name in (("linear", "mamba2"), ("softmax", "fox")):
        o = get(name).forms["parallel"](q, k, v, gate, scale=now["scale"])
        torch.testing.assert_close(tensor(now["outputs"][side]), o[0, :, 0], rtol=1e-9, atol=1e-9)
    S = torch.zeros(3, 4, dtype=torch.float64)
    for t, shown in enumerate(now["states"]):
        S = S * math.exp(now["gate"]["g"][t]) + torch.outer(v[0, t, 0], k[0, t, 0])
        torch.testing.assert_close(tensor(shown), S, rtol=1e-9, atol=1e-9)
    play.locator("[data-memory=token]").focus()
    play.locator("[data-memory=token]").press("Home")
    assert play.locator("[data-memory=cache] rect").count() == 7
    assert play.locator("[data-memory=state] rect").count() == 12
    play.locator("[data-memory=token]").press("End")
    assert play.locator("[data-memory=cache] rect").count() == 7 * 16
    assert play.locator("[data-memory=size]").inner_text() == "112 numbers"
    said = [float(x) for x in play.locator("[data-memory=said-linear]").inner_text().split(", ")]
    assert said == pytest.approx(now["outputs"]["linear"][15], abs=0.006)


def padded(rows, fill: float) -> torch.Tensor:
    """The rows of a triangle as a square matrix."""
    return tensor([[*row, *[fill] * (len(rows) - len(row))] for row in rows])


def check(page) -> dict:
    """Compare all that the page computes now with the library; what the page says of itself."""
    now = page.evaluate("attnzoo.read()")
    pair = next(pair for pair in pairs() if pair.softmax == now["pair"])
    gate = Gate(**{part: tensor(now["gate"][PARTS[part]])[None, :, None] for part in pair.requires})
    q, k = (tensor(now[name])[None, :, None] for name in "qk")
    s, d = oracle.scores(q, k, gate, scale=now["scale"])
    s, d = s[0, 0], d[0, 0]
    below = torch.ones_like(s, dtype=torch.bool).tril()
    logits = s + d
    softmax = logits.softmax(-1)
    weights = softmax if now["readout"] == "softmax" else s * d.exp()
    for shown, expected, fill in (
        (now["s"], s, 0.0),
        (now["decay"], d.exp(), 0.0),
        (now["logits"], logits, -math.inf),
        (now["weights"], weights, 0.0),
    ):
        torch.testing.assert_close(padded(shown, fill)[below], expected[below], rtol=1e-12, atol=1e-12)
    prune = Prune(eps=math.exp(now["prune"]["logEps"]), bound=now["prune"]["bound"])
    g = gate.log_decay if gate.log_decay is not None else torch.zeros(1, len(s), 1, dtype=torch.float64)
    block = now["prune"]["block"]
    scaled = (q * now["scale"]).transpose(1, 2)
    first = first_kept_keys(scaled, k.transpose(1, 2), g.transpose(1, 2), prune, rows=block, cols=block)
    assert now["kept"] == first[0, 0].tolist()
    lost = float(dropped_mass(softmax[None, None], first, rows=block).max())
    assert now["dropped"] == pytest.approx(lost, rel=1e-9, abs=1e-300)
    assert lost <= prune.eps
    drawn = page.locator(".pruned path").count()
    caption = page.locator("[data-logits]").inner_text()
    if now["readout"] == "linear":
        assert drawn == 0
        assert caption == "scores s"
        assert not page.locator("[data-kept]").is_visible()
        assert not page.locator("[name=eps]").is_visible()
        return now
    assert caption == "logits s + d"
    assert drawn == int(first.sum()) // block
    blocks = len(s) // block
    assert page.locator("[data-kept]").inner_text() == (
        f"{blocks * (blocks + 1) // 2 - drawn} of {blocks * (blocks + 1) // 2} blocks computed"
    )
    return now


def test_every_pair_whose_parts_have_controls_can_be_chosen_on_either_side(play):
    offered = play.locator("#pair option").evaluate_all("options => options.map((o) => o.textContent)")
    chosen = [pair for pair in pairs() if not pair.softmax_module and set(pair.requires) <= set(PARTS)]
    assert [pair.softmax for pair in pairs() if pair not in chosen] == ["rwkv7_path"]
    assert offered == [f"{pair.linear} · {pair.softmax}" for pair in chosen]
    for pair in chosen:
        play.locator("#pair").select_option(pair.softmax)
        assert play.locator(".equation > div:visible .katex").count() == 1
        for side in ("linear", "softmax") if pair.softmax not in SOFTMAX else ():  # those are moved below
            play.get_by_label(f"{side} side").check()
            now = check(play)
            assert (now["pair"], now["readout"]) == (pair.softmax, side)


MOVES = {
    "nope": [],
    "alibi": [("slope", "End"), ("slope", "PageDown PageDown ArrowLeft")],
    "fox": [("f3", "Home"), ("f9", "PageDown PageDown"), ("f-all", "PageDown PageDown PageDown PageDown")],
    "wall": [("channel0", "PageDown"), ("channel2", "Home")],
    "rope": [("angle0", "End"), ("angle1", "PageUp PageUp PageUp")],
    "path": [("beta5", "End"), ("spread", "Home"), ("beta-all", "PageUp PageUp")],
    "rope_gated_path_wall": [("channel1", "Home"), ("angle0", "PageUp"), ("f-all", "PageDown"), ("beta2", "End")],
    "path_fox": [("beta7", "Home"), ("f4", "Home"), ("f-all", "PageDown PageDown"), ("spread", "PageDown")],
}


@pytest.mark.parametrize("pair", SOFTMAX)
def test_sliders_move_what_the_oracle_says(play, pair):
    play.locator("#pair").select_option(pair)
    before = check(play)
    for name, keys in MOVES[pair]:
        slide(play, name, keys)
        after = check(play)
        assert after["gate"] != before["gate"], name
        before = after
    play.get_by_label("linear side").check()
    assert check(play)["readout"] == "linear"
    play.get_by_label("softmax side").check()
    slide(play, "content", "PageUp PageUp PageUp")
    assert check(play)["scale"] > before["scale"]


@pytest.mark.parametrize("pair", ["alibi", "fox", "path_fox"])
def test_epsilon_and_bound_move_the_pruned_blocks(play, pair):
    play.locator("#pair").select_option(pair)
    slide(play, "slope" if pair == "alibi" else "f-all", "End" if pair == "alibi" else "Home " + "PageUp " * 3)
    counts = []
    for key in ("End", "PageDown PageDown PageDown", "Home"):
        slide(play, "eps", key)
        check(play)
        counts.append(play.locator(".pruned path").count())
    assert counts[0] > counts[2]
    assert counts == sorted(counts, reverse=True)
    slide(play, "eps", "End")
    tail = play.locator(".pruned path").count()
    play.get_by_label("the paper's threshold").check()
    check(play)
    assert play.locator(".pruned path").count() <= tail


def test_marked_cell_is_reached_by_pointer_and_by_keys(play):
    now = check(play)
    play.locator("[data-matrix=weights] rect").nth(30).hover()  # row 8 starts at cell 28
    assert play.locator("[data-cell]").inner_text() == "query 8, key 3"
    assert play.locator('[data-value="weight"]').inner_text() == f"{now['weights'][7][2]:.4f}"
    play.mouse.move(1, 1)  # the focus scrolls, and the pointer would come to lie on another cell
    play.locator(".matrices").focus()
    play.keyboard.press("ArrowDown")
    play.keyboard.press("ArrowRight")
    assert play.locator("[data-cell]").inner_text() == "query 9, key 4"
    assert play.locator('[data-value="logit"]').inner_text() == f"{now['logits'][8][3]:.4f}"


def test_colours_follow_the_values(play):
    now = check(play)
    opacity = play.locator("[data-matrix=decay] rect").evaluate_all(
        "cells => cells.map(c => +c.getAttribute('fill-opacity'))"
    )
    decay = [value for row in now["decay"] for value in row]
    assert len(opacity) == len(decay)
    order = sorted(range(len(decay)), key=lambda i: decay[i])
    assert all(opacity[a] <= opacity[b] for a, b in pairwise(order))
    assert max(opacity) == 1.0


def test_reset_and_link_choose_the_pair(play, reader):
    slide(play, "f2", "Home")
    changed = check(play)
    play.get_by_role("button", name="Start again").click()
    assert check(play)["gate"] != changed["gate"]
    reader.open("interactive.html#path")
    play.wait_for_function("attnzoo.read().pair === 'path'")  # the page hears of its new address after the browser
    assert play.locator("#path").is_visible()
    assert not play.locator("#fox").is_visible()


def test_the_address_keeps_what_was_moved(play, reader):
    play.locator("#pair").select_option("path_fox")
    slide(play, "f2", "Home")
    slide(play, "beta4", "End")
    play.get_by_label("linear side").check()
    play.locator(".matrices").press("ArrowUp")
    moved = check(play)
    address = play.evaluate("location.hash")
    play.goto("about:blank")
    reader.open(f"interactive.html{address}")
    again = check(play)
    assert (again["pair"], again["readout"], again["gate"]) == (moved["pair"], moved["readout"], moved["gate"])
    assert play.locator("[data-cell]").inner_text() == "query 15, key 12"


def test_one_file_holds_the_page_whole(browser, site, tmp_path):
    """From a folder of its own, with nothing beside it and no network."""
    sys.path.insert(0, str(FIGURES.parent))
    from tools.standalone import standalone

    (tmp_path / "duality.html").write_text(standalone(site), encoding="utf-8")
    page = browser.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: asked.append(str(error)))
    page.goto((tmp_path / "duality.html").as_uri())
    page.locator("form[data-ready]").wait_for()
    page.locator("[data-scene]").nth(2).click()
    assert page.evaluate("attnzoo.read().pair") == "fox"
    assert page.locator(".katex").count() > 16
    assert [url for url in asked if not url.startswith("data:")] == [(tmp_path / "duality.html").as_uri()]
    page.close()


def test_scenes_are_what_their_names_say(play):
    scenes = play.locator("[data-scene]")
    assert scenes.count() == 5
    seen, said = [], set()
    for n in range(5):
        scenes.nth(n).click()
        seen.append(check(play))
        said.add(play.locator("p[data-says]").inner_text())
    assert len(said) == 5
    assert all(value == 1 for row in seen[0]["decay"] for value in row)
    assert seen[1]["pair"] == "alibi"
    assert seen[2]["decay"][-1][0] < 0.05**2  # behind two line breaks
    assert all(abs(value) < 1e-12 for row in seen[3]["logits"] for value in row[:-1])
    assert play.locator(".pruned path").count() > 3


def middles(locator) -> list[float]:
    return [box["x"] + box["width"] / 2 for box in (each.bounding_box() for each in locator.all())]


def test_a_slider_stands_over_its_column_or_is_wide_enough_for_a_thumb(play):
    sliders = play.locator("[data-tokens=f] input")
    last_row = play.locator("[data-matrix=decay] rect").all()[-16:]
    columns = [box["x"] + box["width"] / 2 for box in (cell.bounding_box() for cell in last_row)]
    assert middles(sliders) == pytest.approx(columns, abs=1.5)
    words = middles(play.locator("[data-tokens=f] code"))
    assert words == pytest.approx(columns, abs=1.5)
    play.set_viewport_size({"width": 360, "height": 800})
    assert all(each.bounding_box()["width"] >= 38 for each in sliders.all())


def test_every_control_has_a_name(play):
    names = play.evaluate(
        """() => [...document.querySelectorAll("#play input, #play select, #play button")].map((e) =>
            [e.ariaLabel, e.textContent, ...[...(e.labels ?? [])].map((l) => l.textContent)].join(""))"""
    )
    assert len(names) > 40
    assert all(re.search(r"\w", name) for name in names)
