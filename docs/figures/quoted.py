"""What pages quote of the records, and what the records say.

A section that quotes measured numbers ends in a comment that says where each comes from, a line for each number:

    <!-- traced
    2.27 = over("2026-11-26-h200-fox", "official", "ours", K=64, T=16384)
    -->

The right side is Python over the functions of `NAMES`. It must round to what the left side shows; `%` means hundredths.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from attnzoo.experiments.claims import Correlated, Value
from attnzoo.experiments.experiment import find
from attnzoo.experiments.outcome import Outcome, load_outcome
from attnzoo.experiments.sizes import gains_by_size
from attnzoo.experiments.statistics import correlation, correlation_seen, difference_seen, without_each

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
BENCHMARKS = DOCS / "benchmarks" / "results"
TRACED = re.compile(r"<!-- traced\n(.*?)-->", re.DOTALL)
NUMBER = r"\d[\d,]*(?:\.\d+)?"
UNITS = r"ms\b|GiB\b|GB\b|%|×|x as|times\b|nats\b|tokens/s|tokens per second|tokens a second|TB/s|TFLOP"
SEVERAL = rf"{NUMBER}%?(?:(?:,| to|, and| and| or) {NUMBER}%?)*"
QUOTED = re.compile(rf"(?<![\w.,\\^{{(/-])({SEVERAL})(?:\s|\\,|~|\*\*)*(?:{UNITS})|({NUMBER}%)")
RELEASES = re.compile(r"(?:Python|PyTorch|Triton|torch|capability|version|from|FLA|attention|arXiv:)\s?\d[\d.]*")
SKIPPED = re.compile(  # code, tables that are generated, comments, formulas, pictures' words, addresses, tags
    r"^ *```.*?^ *```|<!-- table of [^>]*-->\n\n(?:\|[^\n]*\n)*|<!--.*?-->|\$\$.*?\$\$|\$[^$\n]*\$"
    r"|`[^`]*`|!\[[^\]]*\]|\]\([^)]*\)|<[^>]*>",
    re.DOTALL | re.MULTILINE,
)


@functools.cache
def run(folder: str) -> dict[str, Any]:
    """The record of a benchmark, by the name of its folder, in the archive or not."""
    [path] = BENCHMARKS.rglob(f"{folder}/results.json")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def row(folder: str, name: str, **where: int) -> dict[str, Any]:
    """The only row of a contender in which the given fields have the given values."""
    rows = [
        each
        for each in run(folder)["rows"]
        if each["name"] == name and all(each[key] == value for key, value in where.items())
    ]
    if len(rows) != 1:
        raise ValueError(f"{folder}: expected one row of {name!r} with {where}, got {len(rows)}")
    return rows[0]  # type: ignore[no-any-return]


def ms(folder: str, name: str, **where: int) -> float:
    """Milliseconds of forward and backward, or of a step."""
    found = row(folder, name, **where)
    return float(found.get("both_ms", found.get("ms")))


def over(folder: str, one: str, other: str, **where: int) -> float:
    """The time of one contender over that of another, in one run."""
    return ms(folder, one, **where) / ms(folder, other, **where)


def error(folder: str, name: str, of: str, K: int) -> float:
    """An error against float64."""
    [found] = [each for each in run(folder)["errors"] if (each["name"], each["K"]) == (name, K)]
    return float(found[of])


@functools.cache
def outcome(experiment: str, size: str) -> Outcome:
    """The record of an experiment at a size."""
    [measured] = [each for each in find(experiment).measured if each.size == size]
    return load_outcome(DOCS / "results" / measured.result)


def seeds(experiment: str, size: str, arm: str, probe: str = "loss", at: float | None = None) -> list[float]:
    """A number of every run of an arm, the smallest first."""
    found = sorted(map(float, outcome(experiment, size).values(Value(arm, probe, at))))
    if not found or not all(map(math.isfinite, found)):
        raise ValueError(f"{experiment}, {size}: expected runs of {arm!r} with {probe!r}, got {found}")
    return found


def mean(experiment: str, size: str, arm: str, probe: str = "loss", at: float | None = None) -> float:
    """The mean of a number over the runs of an arm."""
    return float(np.mean(seeds(experiment, size, arm, probe, at)))


def after_training(record: str, arm: str, seed: int) -> tuple[float, float]:
    """The held-out loss of a run of a record in the compiled code of its training, and in plain code."""
    [run] = [run for run in load_outcome(DOCS / "results" / record).runs if (run.arm, run.seed) == (arm, seed)]
    [probed] = run.values["loss"].values()
    return run.validation, probed


def verdict(experiment: str, size: str, number: int) -> str:
    """The numbers behind an expectation's verdict, the first being number 0."""
    return outcome(experiment, size).verdicts(find(experiment))[number][1].why


def stated(experiment: str, size: str, number: int, at: int = -1) -> float:
    """A probability that a verdict states, `p = 0.04`: the last, or the one at that place."""
    return float(re.findall(r"p = (?:below )?([\d.e-]+\d)", verdict(experiment, size, number))[at])


def gains(size: str, experiment: str = "factorial", number: int = 0, alone: bool = False) -> tuple[float, float]:
    """The correlation of an experiment's gains, and its p by relabelled parts; of pairs of one part ``alone``."""
    claim, one, other = _gains(size, experiment, number)
    chosen = [n for n, parts in enumerate(claim.parts) if not alone or len(parts) == 1]
    return correlation(one[chosen], other[chosen], [claim.parts[n] for n in chosen])


def without(size: str, recurrence: str, experiment: str = "factorial", number: int = 0) -> float:
    """The correlation of the gains of both sides without the pair of a recurrence."""
    claim, one, other = _gains(size, experiment, number)
    names = [pair[0] for pair in claim.pairs]
    return float(without_each(one, other)[names.index(recurrence)])


def among(size: str, experiment: str, *recurrences: str) -> tuple[float, float]:
    """The correlation of the gains of both sides over the pairs of these recurrences, and its p."""
    claim, one, other = _gains(size, experiment, 0)
    chosen = [n for n, pair in enumerate(claim.pairs) if pair[0] in recurrences]
    return correlation(one[chosen], other[chosen], [claim.parts[n] for n in chosen])


def alike_but(size: str, experiment: str, *recurrences: str) -> float:
    """The correlation of the gains of both sides, if all pairs but those of these recurrences had gained alike."""
    claim, *sides = _gains(size, experiment, 0)
    kept = np.array([pair[0] in recurrences for pair in claim.pairs])
    return float(np.corrcoef([np.where(kept, gains, gains[~kept].mean()) for gains in sides])[0, 1])


def gains_of_seeds(*chosen: int) -> tuple[float, float]:
    """The correlation of the gains of `pairs` at gpu-10m with the means of these seeds, of models that have them, and
    its p."""
    claim = _gains("gpu-10m", "pairs", 0)[0]
    third = load_outcome(DOCS / "results" / "2026-11-29-pairs-gpu-10m-third.json")
    runs = [run for found in (outcome("pairs", "gpu-10m"), third) for run in found.runs if run.seed in chosen]

    def loss(arm: str) -> float:
        return float(np.mean([next(iter(run.values[claim.probe].values())) for run in runs if run.arm == arm]))

    gains = [[loss(base) - loss(arm) for base, arm in zip(claim.bases, pair, strict=True)] for pair in claim.pairs]
    return correlation(*np.transpose(gains), claim.parts)


def without_noise(size: str, experiment: str, number: int = 0) -> float:
    """The correlation of the gains of both sides over the most that the noise of the seeds allows: Spearman's
    correction, with the standard errors of the parts' own models (the base moves all gains alike)."""
    claim, one, other = _gains(size, experiment, number)
    reliable = 1.0
    for side, gains_of in enumerate((one, other)):
        runs = [outcome(experiment, size).values(Value(pair[side], claim.probe)) for pair in claim.pairs]
        noise = float(np.mean([x.var(ddof=1) / x.size for x in runs]))
        reliable *= max(1 - noise / float(gains_of.var(ddof=1)), 1e-9)
    return correlation(one, other, claim.parts)[0] / math.sqrt(reliable)


def copied(size: str, arm: str, experiment: str) -> float:
    """How much less a text costs the second time than the first, nats per token."""
    first, again = ("L(i)", 0.5), ("loss of a text read again", 1.0)
    return mean(experiment, size, arm, *first) - mean(experiment, size, arm, *again)


def weights(experiment: str, size: str, arm: str) -> int:
    """The trained weights of an arm, embeddings among them."""
    return outcome(experiment, size).of(arm)[0].parameters


def across(experiment: str, sizes: tuple[str, str], side: int) -> tuple[float, float]:
    """The correlation of the gains of one side at two sizes, and its p by relabelled parts."""
    found = [_gains(size, experiment, 0) for size in sizes]
    return correlation(found[0][1 + side], found[1][1 + side], found[0][0].parts)


def trained_faster(folder: str, context: int) -> float:
    """How many times as fast training is with pruning, by the medians of a record of `bench acp`."""
    return float(np.median(of_context(folder, context, "pruned")) / np.median(of_context(folder, context, "plain")))


def of_context(folder: str, context: int, key: str) -> Any:
    """A number of a row of `bench acp`, or its measurements of one kind."""
    [row] = [each for each in run(folder)["rows"] if each["context"] == context]
    return row[key]


def step_ms(folder: str, context: int) -> float:
    """Milliseconds of a training step without pruning, of a record of `bench acp`."""
    tokens = of_context(folder, context, "batch") * context
    return float(1e3 * tokens / np.median(of_context(folder, context, "plain")))


def attention_ms(folder: str, context: int, kind: str = "plain_ms") -> float:
    """Milliseconds of such a step that attention takes forward and backward, or with pruning would (`pruned_ms`): those
    of its forward kernels, times what the step grows by from the shortest context to the longest over what they grow
    by, as nothing else in a step of equally many tokens grows."""
    contexts = [row["context"] for row in run(folder)["rows"]]
    first, last = min(contexts), max(contexts)
    step = step_ms(folder, last) - step_ms(folder, first)
    kernels = of_context(folder, last, "plain_ms") - of_context(folder, first, "plain_ms")
    return float(of_context(folder, context, kind) * step / kernels)


def gain_by_size(experiment: str, sizes: tuple[str, ...], arm: str, at: int) -> float:
    """What an arm gains over its base at a size of several, the smallest first; with ``at`` -1 the p of its change."""
    rows = gains_by_size(find(experiment), [outcome(experiment, size) for size in sizes])
    [row] = [row for row in rows if row.lower.arm == arm]
    return row.p if at < 0 else float(row.gains[at])


@functools.cache
def while_training() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Million tokens read, and what the first seed of each arm of `pairs` at gpu-10m has then gained in training loss
    over its base's, in means of four logged steps, which read the same text."""
    first = [run for run in outcome("pairs", "gpu-10m").runs if run.seed == 0]
    step = first[0].curve[0][0]
    losses = {run.arm: [loss for tokens, loss in run.curve if tokens % step == 0] for run in first}
    claim, found = _correlated("pairs")[0], {}
    for arm, base in [each for pair in claim.pairs for each in zip(pair, claim.bases, strict=True)]:
        gains = np.subtract(losses[base], losses[arm])
        tokens = step * np.arange(4, gains.size + 1) / 1e6
        found[arm] = tokens, np.convolve(gains, np.ones(4) / 4, "valid")
    return found


def gained_after(arm: str, million: float) -> float:
    """What an arm of `pairs` at gpu-10m has gained in training loss over its base after so many million tokens."""
    tokens, gains = while_training()[arm]
    if million > tokens[-1] + 1:
        raise ValueError(f"million: expected {tokens[-1]:.0f} or less, where training ended, got {million:g}")
    return float(gains[np.abs(tokens - million).argmin()])


def gains_after(million: float) -> tuple[float, float]:
    """The correlation of such gains, and its p."""
    claim = _correlated("pairs")[0]
    one, other = np.array([[gained_after(arm, million) for arm in pair] for pair in claim.pairs]).T
    return correlation(one, other, claim.parts)


def interval(size: str, experiment: str, number: int) -> tuple[float, float]:
    """The middle 95% of it, with seeds and text drawn anew, over the pairs of which there are runs."""
    why = _gains(size, experiment, number)[0].judge(outcome(experiment, size).values).why
    [found] = re.findall(r"95% (-?[\d.]+) to (-?[\d.]+)", why)
    return float(found[0]), float(found[1])


def power(experiment: str, true: float) -> float:
    """How often a true correlation of what parts give is seen in an experiment, by simulation."""
    return correlation_seen(_correlated(experiment)[0].parts, true)


def _correlated(experiment: str) -> list[Correlated]:
    return [each.claim for each in find(experiment).expectations if isinstance(each.claim, Correlated)]


def _gains(size: str, experiment: str, number: int) -> tuple[Correlated, np.ndarray, np.ndarray]:
    """A claim about the pairs of which there are runs, and the gains of their means on both sides, ``[pairs]``."""
    claim, of = _correlated(experiment)[number], outcome(experiment, size).of
    there = [(pair, parts) for pair, parts in zip(claim.pairs, claim.parts, strict=True) if all(map(of, pair))]
    claim = replace(claim, pairs=tuple(pair for pair, _ in there), parts=tuple(parts for _, parts in there))
    one, other = (
        np.array(
            [
                mean(experiment, size, claim.bases[side], claim.probe) - mean(experiment, size, pair[side], claim.probe)
                for pair in claim.pairs
            ]
        )
        for side in (0, 1)
    )
    return claim, one, other


def left(variant: str, tokens: int) -> float:
    """What the head of the figures' model that forgets least keeps of a key after so many tokens."""
    with np.load(DOCS / "figures" / "data" / "zoo.npz") as kept:
        return float(kept[f"{variant}.profile"][:, tokens].max())


def logged(page: str, text: str) -> float:
    """The first number of a text that stands word by word in a log, or in the notes of an experiment."""
    path = DOCS / "benchmarks" / "log" / f"{page}.md"
    where = path.read_text(encoding="utf-8") if path.is_file() else " ".join(each.tried for each in find(page).measured)
    if text not in where:
        raise ValueError(f"{page}: expected the text {text!r} in it")
    found = re.search(NUMBER, text)
    if found is None:
        raise ValueError(f"{page}: expected a number in {text!r}")
    return float(found[0].replace(",", ""))


def small(name: str) -> dict[str, Any]:
    """The numbers of a small trained model of the package."""
    import small as record  # which only some pages need

    return record.of(name)


def given(value: float, why: str) -> float:
    """A number that is no measurement: a setting, a definition, what another document says."""
    if not why:
        raise ValueError("given: expected a reason, got none")
    return value


def modelled(name: str, *args: Any, **options: Any) -> Any:
    """What a function of the model of many GPUs gives."""
    import many_gpus  # which reads records with this module

    return getattr(many_gpus, name)(*args, **options)


NAMES = {
    each.__name__: each for each in (
        row, ms, over, error, seeds, mean, stated, gains, without, without_noise, gain_by_size, left, logged, small,
        sorted, modelled, given, min, max, round, interval, power, difference_seen, across, trained_faster, of_context,
        step_ms, attention_ms, copied, weights, gained_after, gains_after, gains_of_seeds, after_training, among,
        alike_but,
    )
}  # fmt: skip


def sections(text: str) -> Iterator[tuple[str, str]]:
    """Each heading of a page with the text below it, up to the next, as far as the page is written by hand; blocks of
    code have no headings."""
    text = text.partition("<!-- claims and pictures")[0]
    code = [match.span() for match in re.finditer(r"^ *```.*?^ *```", text, re.DOTALL | re.MULTILINE)]
    starts = [
        match.start()
        for match in re.finditer(r"^#{1,4} ", text, re.MULTILINE)
        if not any(a < match.start() < b for a, b in code)
    ]
    for start, end in zip([0, *starts], [*starts, len(text)], strict=True):
        if text[start:end].strip():
            yield text[start:end].partition("\n")[0], text[start:end]


def quoted(text: str, *, decimals: bool = False) -> list[str]:
    """The measured numbers that a text shows outside code, formulas and tables that are generated.

    Args:
        text: of a page.
        decimals: numbers with a point count without a unit too, but for releases and the like.
    """
    bare = SKIPPED.sub(" ", text)
    found = re.findall(r"(?<![\w.])\d+\.\d+%?(?![\w.]*\d)", RELEASES.sub(" ", bare)) if decimals else []
    for match in QUOTED.finditer(bare):
        numbers = re.findall(NUMBER + "%?", match[1] or match[2])
        percent = match[0].endswith("%")
        found += [number if number.endswith("%") or not percent else f"{number}%" for number in numbers]
    return [number.rstrip(",") for number in found]


def traced(text: str) -> list[tuple[str, str]]:
    """Shown numbers with their expressions, of the comments in a text."""
    lines = [line for block in TRACED.findall(text) for line in block.strip().splitlines()]
    pairs = [line.partition(" = ") for line in lines]
    return [(shown.strip(), expression.strip()) for shown, _, expression in pairs]


def wrong(shown: str, expression: str) -> str:
    """How a shown number differs from what its expression gives, in words; empty where it does not."""
    try:
        value = float(eval(expression, {"__builtins__": {}, **NAMES}))
    except Exception as problem:
        return f"{shown} = {expression}: {problem}"
    plain = shown.rstrip("%").replace(",", "")
    value *= 100 if shown.endswith("%") else 1
    digits = len(plain.partition(".")[2])
    return "" if abs(value - float(plain)) <= 0.5000001 * 10**-digits else f"{shown} = {expression}: it is {value:.6g}"
