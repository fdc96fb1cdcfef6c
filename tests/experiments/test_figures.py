"""Figures: what is drawn says what the arrays say."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from itertools import combinations

import numpy as np
import pytest

from attnzoo.experiments import figures, run_figures
from attnzoo.experiments.figures import Dot, Line, Look, to_svg
from attnzoo.registry.table import BUILT_IN

SIDES = ("linear", "softmax")
LOOK = Look(figures.PAIR_COLORS[2], ())


def line(key: str, end: float, points: int = 20) -> Line:
    return Line(key, key, np.linspace(1, 100, points), np.linspace(3.0, end, points), LOOK)


def test_duals_share_a_hue_and_differ_in_dash() -> None:
    looks = figures.looks([("fox", 3, "softmax"), ("mamba2", 3, "linear"), ("path", 6, "softmax")])
    assert looks["fox"].color == looks["mamba2"].color != looks["path"].color
    assert looks["fox"].dash == looks["path"].dash == ()
    assert looks["mamba2"].dash != ()


def test_same_variant_twice_is_told_apart() -> None:
    looks = figures.looks([("fox", 3, "softmax"), ("fox-acp", 3, "softmax")])
    assert looks["fox"] != looks["fox-acp"]


def test_all_pairs_of_the_table_are_told_apart() -> None:
    """There are more of them than hues."""
    every = [
        (name, n, side)
        for n, p in enumerate(BUILT_IN, 1)
        for name, side in zip((p.linear, p.softmax), SIDES, strict=True)
    ]
    assert len(set(figures.looks(every).values())) == len(every) > 2 * len(figures.PAIR_COLORS)


def test_every_color_of_a_figure_follows_the_theme() -> None:
    figure = figures.curves([line("fox", 1.0)], xlabel="x", ylim=(0, 4), mark=(50, "here"))
    svg = to_svg(figure, "one", "title")
    bare = re.sub(r"var\(--[\w-]+, #[0-9a-f]{6}\)", "", svg)
    assert not re.search(r"(?:fill|stroke): #(?!000000|ffffff)", bare)
    assert "var(--pair-3, #d6451b)" in svg


def test_svg_is_well_formed_and_scales() -> None:
    svg = to_svg(figures.curves([line("fox", 1.0)], xlabel="x < y", ylim=(0, 4)), "one", 'a "title" & more')
    root = ElementTree.fromstring(svg)
    assert root.get("aria-label") == 'a "title" & more'
    assert "viewBox" in root.attrib
    assert not {"width", "height"} & root.attrib.keys()


def test_ids_of_two_figures_on_a_page_differ() -> None:
    decay = np.tril(np.full((8, 8), 0.5))
    svgs = [to_svg(figures.decay_map(decay, 64, {}), name, "title") for name in ("one", "two")]
    first, second = (set(re.findall(r' id="([^"]*)"', svg)) for svg in svgs)
    assert first
    assert not first & second


def test_figures_are_the_same_each_time() -> None:
    draw = [to_svg(figures.curves([line("fox", 1.0)], xlabel="x", ylim=(0, 4)), "one", "t") for _ in range(2)]
    assert draw[0] == draw[1]


def test_line_names_do_not_collide_and_keep_the_order_of_the_ends() -> None:
    lines = [line(f"v{i}", 1.0 + 0.001 * i) for i in (3, 0, 4, 1, 2)]
    svg = to_svg(figures.curves(lines, xlabel="x", ylim=(0, 4)), "one", "t")
    heights = {}
    for key in ("v0", "v1", "v2", "v3", "v4"):
        label = re.search(rf"translate\([\d.]+ ([\d.]+)\)[^>]*>{key}</text>|y=\"([\d.]+)\"[^>]*>{key}</text>", svg)
        assert label is not None
        heights[key] = float(label[1] or label[2])
    order = [heights[f"v{i}"] for i in range(5)]
    assert order == sorted(order, reverse=True)  # SVG's y grows downwards
    assert np.diff(sorted(order)).min() >= 11


LONG = "path_fox (acp={'bound': 'paper', 'eps': 0.0001, 'block': 128}, window=4096, kv_shift=True, number 1)"


@pytest.mark.parametrize("end", ["1", "2"])
def test_a_long_name_leaves_room_for_the_curve(end: str) -> None:
    lines = [line(LONG[:-2] + other + ")", 1.0) for other in "12"]
    names = {text.get_text() for text in figures.curves(lines, xlabel="x", ylim=(0, 4)).axes[0].texts}
    assert any(name.startswith("path_fox (acp=") and name.endswith(f"number {end})") for name in names)
    figures_of = [
        figures.curves(lines, xlabel="x", ylim=(0, 4), names_width=len(LONG)),
        run_figures.runs([run_figures.Runs(LONG, LONG, np.ones(3), LOOK, True)], xlabel="x"),
    ]
    for figure in figures_of:
        box = figure.axes[0].get_position()
        assert box.width > 0.3
        assert 0 <= box.x0 < box.x1 <= 1


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("FoX (Pro), 0.001, twice the tokens", "FoX (Pro), 0.001, twice the tokens"),
        ("Transformer (Pro), 0.001, twice the tokens", "Transformer (Pro), 0.001, twice … tokens"),
        ("x" * 60, "x" * 24 + "…" + "x" * 15),
    ],
)
def test_a_long_name_is_cut_between_words_where_it_has_any(name: str, shown: str) -> None:
    assert figures.shortened(name) == shown


def test_names_of_dots_do_not_collide_and_stay_inside_the_panel() -> None:
    names = ["fox", "fox (acp)", "fox (window=64)", LONG]
    rows = [
        [Dot(name, name, 1.5 + 0.001 * i, 0.0, LOOK, filled) for i, name in enumerate(names)]
        for filled in (True, False)
    ]
    figure = figures.pairs([*rows, [Dot("rope", "rope", 2.5, 0.0, LOOK, True)]], xlabel="loss")
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(boxes) == 9
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.width and box.y1 <= figure.bbox.height for box in boxes)


def test_one_dot_has_an_axis_of_whole_numbers() -> None:
    """Not of what must be added to a number that stands elsewhere."""
    figure = figures.pairs([[Dot("fox", "fox", 10.0834, 0.0, LOOK, True)]], xlabel="speed")
    figure.canvas.draw()
    low, high = figure.axes[0].get_xlim()
    ticks = [float(tick.get_text()) for tick in figure.axes[0].get_xticklabels()]
    assert all(low - 1 <= tick <= high + 1 for tick in ticks)
    assert high - low > 0.1


def test_letters_that_one_font_lacks_are_left_to_the_reader_s(recwarn: pytest.WarningsRecorder) -> None:
    svg = to_svg(figures.curves([line("日本語", 1.0)], xlabel="x", ylim=(0, 4)), "one", "t")
    assert ">日本語</text>" in svg
    assert not recwarn.list


def test_dot_is_drawn_at_its_value_filled_or_hollow() -> None:
    rows = [[Dot("fox", "fox", 1.5, 0.01, LOOK, True), Dot("mamba2", "mamba2", 1.75, 0.01, LOOK, False)]]
    figure = figures.pairs(rows, xlabel="loss")
    drawn = {str(artist.get_gid()): artist for artist in figure.axes[0].lines if artist.get_marker() == "o"}
    assert float(drawn["series:fox"].get_xdata()[0]) == 1.5  # type: ignore[index]
    assert drawn["series:fox"].get_markerfacecolor() != "none"
    assert drawn["series:mamba2"].get_markerfacecolor() == "none"


def test_the_bar_of_an_error_larger_than_all_differences_is_drawn_whole() -> None:
    figure = figures.pairs(
        [[Dot("fox", "fox", 1.5, 0.4, LOOK, True)], [Dot("rope", "rope", 1.51, 0.3, LOOK, True)]], xlabel=""
    )
    low, high = figure.axes[0].get_xlim()
    assert low < 1.1
    assert high > 1.9


def test_boundary_is_drawn_where_the_keys_are_cut() -> None:
    decay = np.tril(np.ones((16, 16)))
    figure = figures.decay_map(decay, 64, {"tail": np.array([0.0, 0.0, 16.0, 32.0]), "paper": np.zeros(4)}, block=16)
    tail = figure.axes[0].lines[1]
    x, y = np.asarray(tail.get_xdata()), np.asarray(tail.get_ydata())
    for row, first in ((8, 0), (40, 16), (60, 32)):  # in the middle of a block of rows
        crossing = [x[i] for i in range(len(x) - 1) if y[i] <= row < y[i + 1]]
        assert crossing == [first]


def test_future_keys_are_blank_in_a_decay_map() -> None:
    figure = figures.decay_map(np.ones((6, 6)), 6, {})
    shown = figure.axes[0].images[0].get_array()
    assert shown is not None
    np.testing.assert_array_equal(np.ma.getmaskarray(shown), np.triu(np.ones((6, 6), dtype=bool), 1))


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_bar_is_as_high_as_the_share_kept(share: float) -> None:
    figure = figures.kept_blocks(["1.1"], {"tail": np.array([share]), "paper": np.array([1.0])}, LOOK)
    bars = figure.axes[0].patches
    assert [bar.get_height() for bar in bars] == [share, 1.0]  # type: ignore[attr-defined]


def test_crowded_names_stay_inside_the_panel() -> None:
    placed = figures.spread([0.0, 0.0, 0.0, 1.0], 12.0, 200.0)
    assert min(placed) >= 0
    assert max(placed) <= 200
