"""The report: one page, whole in itself, that says what was measured."""

from __future__ import annotations

import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from html_pages import assert_whole, parse
from rich.console import Console

from attnzoo.evaluation import GateMap, PruneMap
from attnzoo.experiments.report import Facts, RunResult, load_result, render, save_result, terminal_table, write_report
from attnzoo.terminal import print_table

CONTEXT, LENGTH, WINDOWS, HEADS, BLOCK = 64, 256, 6, 3, 16
NAMES = (
    ("nope", "softmax", 1, "linear_attention", 0.00),
    ("rope", "softmax", 5, "complex_linear", -0.25),
    ("alibi", "softmax", 2, "retnet", -0.30),
    ("fox", "softmax", 3, "mamba2", -0.45),
    ("path", "softmax", 6, "deltanet", -0.35),
    ("path_fox", "softmax", 7, "gated_deltanet", -0.50),
    ("linear_attention", "linear", 1, "nope", 0.15),
    ("retnet", "linear", 2, "alibi", -0.10),
    ("mamba2", "linear", 3, "fox", -0.20),
    ("gla", "linear", 4, "wall", -0.22),
    ("deltanet", "linear", 6, "path", -0.24),
    ("gated_deltanet", "linear", 7, "path_fox", -0.34),
)
GATED = ("alibi", "fox", "path_fox", "retnet", "mamba2", "gla", "gated_deltanet")


def make_result(name: str, side: str, pair: int, dual: str, offset: float) -> RunResult:
    """A made-up run with curves of a plausible shape."""
    random = np.random.default_rng(sum(map(ord, name)))
    index = np.arange(1, LENGTH + 1)
    runs_away = np.maximum(index / CONTEXT - 1, 0) * (1.8 if name in ("nope", "rope") else 0.0)
    losses = 1.6 + offset + 2.2 * index**-0.6 + runs_away + random.normal(0, 0.3, (WINDOWS, LENGTH))
    steps = np.arange(1.0, 41)
    curve = np.stack([steps * 4096, 1.7 + offset + 3.5 * np.exp(-steps / 8) + random.normal(0, 0.03, 40)])
    gates = tuple(make_gate(layer, side == "softmax", random) for layer in range(2)) if name in GATED else ()
    facts = Facts(
        key=name, label="fox (acp)" if name == "fox" else name, variant=name, side=side, pair=pair, dual=dual,
        parameters=400_000 + pair, context=CONTEXT, steps=40, tokens=163_840, seconds=12.0 + pair,
        tokens_per_second=9000.0 + 700 * pair, unit="byte",
        model="2 layers", parts=["output norm"] if side == "linear" else [],
        text="made up", settings=f"model:\n  attention: {name}\n",
        command="attnzoo compare demo.yaml", machine={"processor": "a <processor>", "cores": "2"},
        heldout="the same",
    )  # fmt: skip
    return RunResult(facts, losses, curve, gates)


def make_gate(layer: int, prunable: bool, random: np.random.Generator) -> GateMap:
    samples = 48
    log_decay = -random.gamma(1.0, 0.4, (HEADS, samples)) * np.array([0.05, 0.4, 2.0])[:, None]
    total = log_decay.cumsum(1)
    decay = np.tril(np.exp(np.minimum(total[:, :, None] - total[:, None, :], 0)))
    row = np.arange(LENGTH // BLOCK)
    prune = {}
    for bound, slack in (("tail", 0.0), ("paper", 3.0)):
        first = np.maximum(row[None] - np.array([40.0, 6.0 + slack, 2.0 + slack])[:, None], 0)
        prune[bound] = PruneMap(first * BLOCK, ((row - first + 1) / (row + 1)).mean(1), BLOCK)
    return GateMap(layer, decay, LENGTH, LENGTH, prune if prunable else {})


@pytest.fixture(scope="module")
def results() -> list[RunResult]:
    return [make_result(*row) for row in NAMES]


@pytest.fixture(scope="module")
def page(results: list[RunResult]) -> str:
    return render(results, title="a <test>", command="attnzoo compare demo.yaml steps=40")


def test_page_is_whole(page: str) -> None:
    assert_whole(page)


def test_every_run_is_in_the_table_and_in_every_curve_figure(results: list[RunResult], page: str) -> None:
    svgs = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    for result in results:
        series = f'data-series="{result.facts.key}"'
        assert f"<tr {series}" in page
        assert sum(series in svg for svg in svgs) == 5  # the duals' loss and speed, training, L(i), P(l)
        assert f"{result.final_loss[0]:.4f}" in page


def test_groups_stand_side_by_side_each_with_the_looks_of_its_own(results: list[RunResult]) -> None:
    results = [replace(result, gates=()) for result in results if result.facts.pair == 3]
    plain = render(results)
    assert "<th>group</th>" not in plain
    facts = [replace(result.facts, key=f"{result.facts.key}-2", group="bare <layers>") for result in results]
    again = [replace(result, facts=other) for result, other in zip(results, facts, strict=True)]
    both = [replace(result, facts=replace(result.facts, group="own layers")) for result in results] + again
    page = render(both)
    parsed = parse(page)
    assert parsed.open == []
    assert len(parsed.ids) == len(set(parsed.ids))
    assert page.count("<svg") == 2 * plain.count("<svg")
    for caption in (
        "Own layers: softmax side",
        "Bare &lt;layers&gt;: linear side",
        "Own layers: loss: left is",
    ):
        assert caption in page
    colors = dict(re.findall(r'<tr data-series="([\w-]+)" style="--c: var\(--([\w-]+)\)"', page))
    for result in results:
        assert colors[result.facts.key] == colors[f"{result.facts.key}-2"]
    console = Console(file=StringIO(), width=120)
    print_table(terminal_table(both), console)
    assert console.file.getvalue().count("bare <layers>") == len(results)


def test_narrow_terminal_gets_every_word_and_number_of_the_table(results: list[RunResult]) -> None:
    again = [
        replace(result, facts=replace(result.facts, label=f"{result.facts.label} (in a block)")) for result in results
    ]
    both = [
        replace(result, facts=replace(result.facts, key=f"{group}-{result.facts.key}", group=f"{group} layers"))
        for group, side in (("own", results), ("equal", again))
        for result in side
    ]
    wide, narrow = (Console(file=StringIO(), width=width) for width in (200, 40))
    for console in (wide, narrow):
        print_table(terminal_table(both), console)
    rows, cut = (
        [" ".join(row.split()) for row in c.file.getvalue().splitlines() if "layers" in row] for c in (wide, narrow)
    )
    assert len(rows) == len(both)
    assert cut == rows


def test_one_run_has_no_duals_to_compare(results: list[RunResult], page: str) -> None:
    alone = render(results[:1])
    assert "Duals side by side" in page
    assert "Duals side by side" not in alone
    parse(alone)


def test_a_long_name_does_not_cover_the_numbers_on_a_narrow_screen(page: str) -> None:
    """Names stay at the left while numbers are scrolled, so that they must be narrower than the screen."""
    narrow = page.partition("@media (max-width: 760px)")[2].partition("@media")[0]
    rule = re.search(r"tbody th {([^}]*)}", narrow)
    assert rule is not None
    assert re.search(r"max-width: [1-5]\dvw", rule[1])
    assert "white-space: normal" in rule[1]


def test_rows_stand_from_the_lowest_loss_to_the_highest(page: str) -> None:
    losses = [float(x) for x in re.findall(r'<td class="n"><b>([\d.]+)<', page)]
    assert len(losses) == len(NAMES)
    assert losses == sorted(losses)


def test_distance_behind_the_best_is_paired_window_by_window(results: list[RunResult]) -> None:
    best = results[5]
    shifted = replace(best, losses=best.losses + 0.25, facts=replace(best.facts, key="other", label="other"))
    behind, error = shifted.behind(best)
    assert behind == pytest.approx(0.25)
    assert error == pytest.approx(0, abs=1e-12) != best.final_loss[1]
    assert re.search(r"\+0\.250 <small>± 0\.000", render([best, shifted]))


def test_summary_names_the_measured_best_and_worst(results: list[RunResult], page: str) -> None:
    best = min(results, key=lambda r: r.losses[:, :CONTEXT].mean())
    worst = max(results, key=lambda r: r.losses[:, :CONTEXT].mean())
    assert f"{best.facts.label}, {best.final_loss[0]:.3f} nats per byte. Highest: {worst.facts.label}" in page


def test_gate_matrices_are_drawn_for_gated_variants_only(page: str) -> None:
    for name, *_ in NAMES:
        label = "fox (acp)" if name == "fox" else name
        drawn = page.count(f'aria-label="Forget gate of {label}, head')
        assert drawn == (2 * HEADS if name in GATED else 0)


def test_kept_blocks_of_both_bounds_are_stated(results: list[RunResult], page: str) -> None:
    fox = next(r for r in results if r.facts.key == "fox")
    assert f"tail bound, {fox.kept('tail'):.1%} on average" in page
    assert fox.kept("tail") < fox.kept("paper")
    assert f"{fox.gates[0].prune['tail'].kept[1]:.0%} / {fox.gates[0].prune['paper'].kept[1]:.0%}" in page


def test_parts_that_only_some_layers_have_are_stated(results: list[RunResult], page: str) -> None:
    linear = [name for name, side, *_ in NAMES if side == "linear"]
    assert f"output norm in {', '.join(linear)}" in page
    assert "differ in more than their gates" not in render([r for r in results if r.facts.side == "linear"])


def test_text_from_outside_is_escaped(page: str) -> None:
    for text in ("test", "processor"):
        assert f"a &lt;{text}&gt;" in page
        assert f"<{text}>" not in page


def test_page_says_machine_command_and_budget(page: str, results: list[RunResult]) -> None:
    assert "attnzoo compare demo.yaml steps=40" in page
    assert "163,840 tokens each in 40 steps" in page
    assert "163,840 tokens in 40 steps" in render(results[:1])
    assert page.count("<dt>machine</dt>") == 1


def test_saved_result_reads_back(tmp_path: Path, results: list[RunResult]) -> None:
    fox = next(r for r in results if r.facts.key == "fox")
    save_result(fox, tmp_path)
    back = load_result(tmp_path)
    assert back.facts == fox.facts
    np.testing.assert_allclose(back.losses, fox.losses, rtol=1e-6)
    np.testing.assert_allclose(back.gates[1].decay, fox.gates[1].decay, atol=1e-3)
    np.testing.assert_array_equal(back.gates[1].prune["paper"].first, fox.gates[1].prune["paper"].first)


def test_run_that_is_not_evaluated_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path))):
        load_result(tmp_path)
    (tmp_path / "evaluation.json").write_text("{}")
    (tmp_path / "evaluation.npz").write_bytes(b"")
    with pytest.raises(ValueError, match="not readable"):
        load_result(tmp_path)


def test_runs_of_different_contexts_are_refused(results: list[RunResult]) -> None:
    other = replace(results[1], facts=replace(results[1].facts, context=128))
    with pytest.raises(ValueError, match="one training context, got 64, 128"):
        render([results[0], other])
    other = replace(results[1], losses=results[1].losses[:-1])
    with pytest.raises(ValueError, match="one number of held-out windows, got 5, 6"):
        render([results[0], other])
    with pytest.raises(ValueError, match="distinct names"):
        render([results[0], results[0]])
    with pytest.raises(ValueError, match="at least one run"):
        render([])


def test_runs_measured_on_different_text_are_refused(results: list[RunResult]) -> None:
    other = replace(results[1], facts=replace(results[1].facts, heldout="other"))
    with pytest.raises(ValueError, match=r"same held-out text, got one for nope, alibi; others for rope"):
        render([results[0], other, results[2]])
    unknown = replace(results[1], facts=replace(results[1].facts, heldout=""))
    with pytest.raises(ValueError, match=r"rope: measured by a version that did not note"):
        render([results[0], unknown])
    render([unknown])


@pytest.mark.parametrize("count", [1, 2])
def test_few_runs_make_a_page_too(tmp_path: Path, results: list[RunResult], count: int) -> None:
    path = write_report(results[:count], tmp_path / "new" / "report.html")
    assert parse(path.read_text()).open == []


@pytest.mark.parametrize("label", ["$\\frac{", "a_$b^$", "100 $"])
def test_a_label_is_shown_as_it_is_and_not_as_mathematics(results: list[RunResult], label: str) -> None:
    page = render([replace(results[3], facts=replace(results[3].facts, label=label))])
    assert page.count(label) > 5


def test_the_page_is_not_written_over_a_folder(tmp_path: Path, results: list[RunResult]) -> None:
    with pytest.raises(ValueError, match="output: expected a file, got the folder"):
        write_report(results[:1], tmp_path)
    assert list(tmp_path.parent.glob("*.part")) == list(tmp_path.parent.glob(".*.part")) == []


def test_a_run_without_a_logged_step_has_a_page(results: list[RunResult]) -> None:
    bare = replace(results[0], curve=np.empty((2, 0)))
    assert "No step was logged" in render([bare])
    page = render([bare, results[1]])
    lost = page.count('data-series="rope"') - page.count('data-series="nope"')
    assert lost == 2  # a line and the name at its end


def test_results_that_changed_since_are_refused(tmp_path: Path, results: list[RunResult]) -> None:
    save_result(results[0], tmp_path)
    text = (tmp_path / "evaluation.json").read_text()
    (tmp_path / "evaluation.json").write_text(text.replace('"parameters": 400001', '"parameters": 400101'))
    with pytest.raises(ValueError, match="content is not what was written"):
        load_result(tmp_path)
    (tmp_path / "evaluation.json").write_text(text)
    other = tmp_path / "other"
    other.mkdir()
    save_result(results[1], other)
    (tmp_path / "evaluation.npz").write_bytes((other / "evaluation.npz").read_bytes())
    with pytest.raises(ValueError, match="evaluation.npz is not what was written with it"):
        load_result(tmp_path)


def test_infinite_loss_is_reported_not_hidden(results: list[RunResult]) -> None:
    losses = results[0].losses.copy()
    losses[:, CONTEXT:] = np.inf
    page = render([replace(results[0], losses=losses), *results[1:3]])
    assert "not finite" in page


def test_brackets_in_names_are_text_in_the_terminal(results: list[RunResult]) -> None:
    """And no styles, which rich would take away, or fail at."""
    named = [replace(x, facts=replace(x.facts, label=f"{x.facts.variant} [beta]", group="a [/b]")) for x in results[:2]]
    named.append(results[2])
    console = Console(record=True, width=200, file=StringIO())
    print_table(terminal_table(named), console)
    text = console.export_text()
    for result in named[:2]:
        assert result.facts.label in text
    assert text.count("a [/b]") == 2


@pytest.mark.parametrize("width", [20, 80])
def test_terminal_table_is_sorted_and_complete(results: list[RunResult], width: int) -> None:
    console = Console(width=width, record=True, file=StringIO())
    print_table(terminal_table(results), console)
    text = console.export_text()
    assert all(f"{r.facts.tokens_per_second:,.0f}" in text for r in results)
    order = [text.index(f" {r.facts.label} ") for r in sorted(results, key=lambda r: r.final_loss[0])]
    assert order == sorted(order)


def test_loss_of_a_single_window_has_no_error_in_the_terminal(results: list[RunResult]) -> None:
    console = Console(width=100, record=True, file=StringIO())
    print_table(terminal_table([replace(result, losses=result.losses[:1]) for result in results]), console)
    text = console.export_text()
    assert text.count("–") == len(results)
    assert "nan" not in text
