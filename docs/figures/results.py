"""A picture of every recorded result of an experiment, and the part of the page of results that shows them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import both_sides
import held
import style
from equal_memory import equal_memory
from matplotlib.figure import Figure

from attnzoo.experiments.experiment import Experiment, find, names
from attnzoo.experiments.figures import GRID, INK, MUTED, PAIR_COLORS
from attnzoo.experiments.outcome import Outcome, load_outcome
from attnzoo.experiments.report.experiment import picture

RESULTS = Path(__file__).parents[1] / "results"
BEGIN = "<!-- pictures: python docs/figures/make.py results -->"
TABLES = {  # by page and the words of their markers
    RESULTS / "both_sides.md": {"both sides": both_sides.table, "open gates": both_sides.gates_table},
    RESULTS.parent / "how-to" / "forget.md": {
        f"{name} {size}": partial(held.table, name=name, size=size)
        for name, size in (
            *(("needle_memory", size) for size in ("cpu", "gpu")),
            *(("learned_forgetting", size) for size in ("cpu", "gpu-4096")),
        )
    },
}
DARK = {INK: style.DARK.ink, MUTED: style.DARK.muted, GRID: style.DARK.grid} | dict(
    zip(PAIR_COLORS, style.DARK.pairs, strict=True)
)


def results() -> None:
    """Draw every recorded result, and write the page's second half and the last column of its table."""
    _save("equal-memory", partial(equal_memory, RESULTS))
    _save("both-sides", partial(both_sides.both_sides, RESULTS))
    for page in TABLES:
        page.write_text(with_tables(page))
    parts, cells = [], {}
    for name in names():
        experiment = find(name)
        cells[name] = []
        for measured in experiment.measured:
            outcome = load_outcome(RESULTS / measured.result)
            _, words, reading = picture(experiment, outcome)
            drawing = f"result-{name.replace('_', '-')}-{measured.size}"
            _save(drawing, partial(_picture, experiment, outcome))
            counts = Counter(verdict.word for _, verdict in outcome.verdicts(experiment))
            verdicts = ", ".join(f"{counts[word]} {word}" for word in ("seen", "not seen", "undecided") if counts[word])
            page = f"[{measured.size}, {measured.date}](src:docs/results/{Path(measured.result).stem}.md)"
            cells[name].append(f"{page}: {verdicts}")
            page += f", on {measured.machine}"
            unseen = [each.text for each, verdict in outcome.verdicts(experiment) if verdict.word == "not seen"]
            verdicts += f". Not seen: *{' '.join(unseen)}*" if unseen else "."
            verdicts += f" {measured.tried}"
            title = experiment.title + (f" ({measured.size})" if len(experiment.measured) > 1 else "")
            command = f"attnzoo experiment run {name}" + (f" --size {measured.size}" if measured.size != "cpu" else "")
            parts.append(
                f"## {title}\n\n`{command}`, {page}: {verdicts.rstrip('. ')}.\n\n"
                f"![{title.rstrip('?')}. {words[0].upper()}{words[1:]}](../figures/out/{drawing}.svg)\n\n"
                f"*{words[0].upper()}{words[1:]}. {reading[0].upper()}{reading[1:]}.*"
            )
    index = RESULTS / "index.md"
    first = index.read_text().partition(BEGIN)[0].rstrip()
    for name, cell in cells.items():
        row = re.compile(rf"(?<=\n\| `attnzoo experiment run {name}` \| )(.*) \| .* \|")
        first = row.sub(lambda found, cell=cell: f"{found[1]} | {'; '.join(cell) or 'not yet run'} |", first)
    index.write_text("\n\n".join([first, BEGIN, *parts]) + "\n")


def with_tables(page: Path) -> str:
    """The page with its tables as the records have them, each below its marker."""
    text = page.read_text()
    for name, table in TABLES[page].items():
        marker = f"<!-- table of {name}: python docs/figures/make.py results -->\n"
        text, found = re.subn(rf"(?<={re.escape(marker)})\n(\|.*\n)*", f"\n{table(RESULTS)}\n", text)
        if found != 1:
            raise ValueError(f"{page.name}: expected one {marker.strip()!r}, got {found}")
    return text


def _picture(experiment: Experiment, outcome: Outcome) -> Figure:
    return picture(experiment, outcome)[0]


def _save(drawing: str, draw: Callable[[], Figure]) -> None:
    """In light ink, and the same in the colours of the dark scheme."""
    style.save(drawing, lambda theme: draw())
    dark = style.OUT / f"{drawing}.dark.svg"
    dark.write_text(re.sub("|".join(DARK), lambda color: DARK[color[0]], dark.read_text()))
