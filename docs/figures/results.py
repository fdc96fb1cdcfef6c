"""The page of results, written from the records: a table of claims for each question, and a picture of every record."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import both_sides
import converted
import held
import many_gpus
import small
import speeds
import style
from equal_memory import equal_memory
from matplotlib.figure import Figure
from quoted import outcome

from attnzoo.benchmarks.measure import markdown_table
from attnzoo.experiments.experiment import Measured, find, names
from attnzoo.experiments.figures import GRID, INK, MUTED, PAIR_COLORS
from attnzoo.experiments.report.outcome_figures import GAINS, OVERLAY, RUNS, SIDES, picture

RESULTS = Path(__file__).parents[1] / "results"
BEGIN = "<!-- claims and pictures: python docs/figures/make.py results -->"
QUESTIONS = {
    "Does what helps a recurrence help its dual?": ("factorial", "open_gates", "pairs", "pairs_native"),
    "State tracking": ("parity", "s3", "a5", "flip_flop"),
    "Recall": ("recall", "forgetting_recall", "induction", "needle"),
    "Length": ("length",),
    "The tables of FoX's papers": (
        "fox_components",
        "fox_gates",
        "fox_contexts",
        "fox_sensitivity",
        "fox_far",
        "acp_throughput",
    ),
    "Changing a trained model": ("convert",),
    "Learnt forgetting": (
        "learned_forgetting",
        "needle_memory",
        "forgetting_text",
        "forgetting_ablations",
        "forgetting_pool",
        "forgetting_baselines",
    ),
}
WORDS = {"seen": "✓ confirmed", "not seen": "✗ refuted", "undecided": "○ open"}
TABLES = {  # by page and the words of their markers
    RESULTS / "little_text.md": {
        "both sides": both_sides.table,
        "open gates": both_sides.gates_table,
        "pairs on a CPU": partial(both_sides.pairs_table, "cpu"),
    },
    RESULTS / "both_sides.md": {
        "pairs": both_sides.pairs_table,
        "smaller pairs": partial(both_sides.pairs_table, "gpu-1m"),
        "larger pairs": partial(both_sides.pairs_table, "gpu-10m"),
        "largest pairs": partial(both_sides.pairs_table, "gpu-25m"),
        "native pairs": partial(both_sides.pairs_table, name="pairs_native"),
    },
    RESULTS / "forgetting.md": {"parts": held.parts, "cost of a token": held.costs, "long texts": held.long_texts}
    | {
        f"{name} {size}": partial(held.table, name=name, size=size)
        for name, size in (
            *(("needle_memory", size) for size in ("cpu", "gpu")),
            *(("learned_forgetting", size) for size in ("cpu", "gpu-4096")),
            *((name, "cpu") for name in held.OTHERS),
        )
    },
    RESULTS.parent / "benchmarks" / "index.md": speeds.TABLES,
    RESULTS.parent / "benchmarks" / "many_gpus.md": many_gpus.TABLES,
    RESULTS.parent / "how-to" / "convert.md": {"conversion": converted.table},
    RESULTS.parent / "how-to" / "train.md": {"small models": small.table},
    RESULTS.parent / "how-to" / "prune.md": {"eps": small.eps_table},
    RESULTS.parent / "how-to" / "choose.md": {"choice": speeds.choice},
    RESULTS.parents[1] / "README.md": {"five speeds": speeds.five},
}
DARK = {INK: style.DARK.ink, MUTED: style.DARK.muted, GRID: style.DARK.grid} | dict(
    zip(PAIR_COLORS, style.DARK.pairs, strict=True)
)


def results() -> None:
    """Draw every recorded result, and write the tables of all pages and the second half of the page of results."""
    save("equal-memory", equal_memory)
    save("both-sides", both_sides.both_sides)
    save("pairs-by-size", both_sides.pairs_by_size)
    for name, side in product(("factorial", "pairs"), SIDES):
        save(f"gains-by-size-{name}-{side}", partial(both_sides.curves, name, side))
    for side in SIDES:
        save(f"gains-while-training-{side}", partial(both_sides.while_training, side))
    for name in names():
        for measured in find(name).measured:
            save(drawing(name, measured), partial(_picture, name, measured.size))
    tables()


def tables() -> None:
    """Write the tables of all pages, and the second half of the page of results; nothing is drawn."""
    for page in TABLES:
        page.write_text(with_tables(page))
    index = RESULTS / "index.md"
    index.write_text(with_claims(index.read_text()))


def with_claims(page: str) -> str:
    """The page of results with its tables of claims and its pictures as the records have them."""
    parts = [page.partition(BEGIN)[0].rstrip(), BEGIN, "## All claims"]
    parts.append(
        "Each is tested over the seeds, one-sidedly, at the level 0.05, without correction for several claims "
        "([how](../how-to/experiments.md#verdicts)). *Confirmed*, *refuted* and *open* are *seen*, *not seen* and "
        "*undecided* in the records, to which each mark leads. Where a column has several marks, they are of several "
        "sizes, the smallest first; a size at which a claim's models were not run has none."
    )
    parts.append(without_a_gpu())
    for question, experiments in QUESTIONS.items():
        parts += [f"### {question}", claims(experiments)]
    parts.append("## A picture of each")
    parts.append(
        f"In pictures of runs {RUNS}. In those of gains {GAINS}. Curves are {OVERLAY}. "
        "Captions name the lowest and the highest mean."
    )
    for experiments in QUESTIONS.values():
        parts += [part for name in experiments for part in _pictures(name)]
    return "\n\n".join(parts) + "\n"


def without_a_gpu() -> str:
    """A sentence that names the experiments, and the sizes of others, of which there is no record of a GPU, or one of
    some models alone."""
    never, sizes, parts = [], [], []
    for name in (name for experiments in QUESTIONS.values() for name in experiments):
        experiment = find(name)
        known = {each.size for each in experiment.measured}
        waiting = [size for size in experiment.sizes if size.startswith("gpu") and size not in known]
        arms = len(experiment.arms)
        parts += [
            f"`{name}` at `{each.size}` ({arms - len(each.lacks)} of {arms} models)"
            for each in experiment.measured
            if each.size.startswith("gpu") and each.lacks
        ]
        if not any(size.startswith("gpu") for size in known):
            never.append(f"`{name}`")
        elif waiting:
            sizes.append(f"`{name}` at {', '.join(f'`{size}`' for size in waiting)}")
    others = f"of others the sizes {'; '.join(sizes)}. **In part**: {', '.join(parts)}."
    return f"**Not yet run on a GPU**: {', '.join(never)}; {others}"


def claims(experiments: tuple[str, ...]) -> str:
    """A table of the claims of some experiments: what, whose, and what became of it on a CPU and on a GPU."""
    rows = []
    for name in experiments:
        experiment = find(name)
        waiting = "" if experiment.measured else "not yet run"
        rows.append([f"**{experiment.title}** (`{name}`)", "", waiting, waiting])
        found = []
        for each in experiment.measured:
            kept = outcome(name, each.size)
            judged = {given.text: verdict.word for given, verdict in kept.verdicts(experiment)
                      if all(kept.of(value.arm) for value in given.claim.values)}  # fmt: skip
            found.append((each, judged))
        for expectation in experiment.expectations:
            cells = {
                side: ", ".join(
                    f"[{WORDS[verdicts[expectation.text]]}](src:docs/results/{Path(each.result).stem}.md)"
                    for each, verdicts in found
                    if each.size.startswith(side) and expectation.text in verdicts
                )
                for side in ("cpu", "gpu")
            }
            rows.append([expectation.text, expectation.source, *cells.values()])
    table = "\n".join(markdown_table(["claim", "source", "CPU", "GPU"], rows))
    return f'<div class="claims" markdown>\n\n{table}\n\n</div>'


def _pictures(name: str) -> list[str]:
    """A heading, how to run it, and the picture and the remarks of every record of an experiment."""
    experiment = find(name)
    if not experiment.measured:
        return []
    parts = [f"### {experiment.title}" + " {: #" + name.replace("_", "-") + " }"]
    for measured in experiment.measured:
        kept = outcome(name, measured.size)
        _, words = picture(experiment, kept)
        words = words[0].upper() + words[1:]
        record = f"[{measured.size}, {measured.date}](src:docs/results/{Path(measured.result).stem}.md)"
        title = f"{experiment.title.rstrip('?')} ({measured.size})"
        parts.append(f"`{kept.command}`, {record}, on {measured.machine}:")
        parts.append(f"![{title}. {words}](../figures/out/{drawing(name, measured)}.svg)")
        parts.append(f"*`{measured.size}`. {words}.*")
        if measured.tried:
            remark = measured.tried.replace("\n", " ")
            parts.append(
                f'<details class="note" markdown>\n<summary>What else was tried, or decided after the run</summary>\n\n'
                f"{remark}\n\n</details>"
            )
    return parts


def drawing(name: str, measured: Measured) -> str:
    return f"result-{name.replace('_', '-')}-{measured.size}"


def with_tables(page: Path) -> str:
    """The page with its tables as the records have them, each below its marker."""
    text = page.read_text()
    for name, table in TABLES[page].items():
        marker = f"<!-- table of {name}: python docs/figures/make.py tables -->\n"
        below = rf"({re.escape(marker)})\n(?:\|.*\n)*\n*"
        text, found = re.subn(below, lambda match, table=table: f"{match[1]}\n{table()}\n\n", text)
        if found != 1:
            raise ValueError(f"{page.name}: expected one {marker.strip()!r}, got {found}")
    return text.rstrip("\n") + "\n"


def _picture(name: str, size: str) -> Figure:
    return picture(find(name), outcome(name, size))[0]


def save(name: str, draw: Callable[[], Figure]) -> None:
    """Write a figure in light ink, and the same in the colours of the dark scheme."""
    style.save(name, lambda theme: draw())
    dark = style.OUT / f"{name}.dark.svg"
    dark.write_text(re.sub("|".join(DARK), lambda color: DARK[color[0]], dark.read_text()))
