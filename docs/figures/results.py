"""A picture of every recorded result of an experiment, and the part of the page of results that shows them."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import style

from attnzoo.experiments.experiment import find, names
from attnzoo.experiments.figures import GRID, INK, MUTED, PAIR_COLORS
from attnzoo.experiments.outcome import load_outcome
from attnzoo.experiments.report.experiment import picture

RESULTS = Path(__file__).parents[1] / "results"
BEGIN = "<!-- pictures: python docs/figures/make.py results -->"
DARK = {INK: style.DARK.ink, MUTED: style.DARK.muted, GRID: style.DARK.grid} | dict(
    zip(PAIR_COLORS, style.DARK.pairs, strict=True)
)


def results() -> None:
    """Draw every recorded result, and write the page's second half."""
    parts = []
    for name in names():
        experiment = find(name)
        for measured in experiment.measured:
            outcome = load_outcome(RESULTS / measured.result)
            words = picture(experiment, outcome)[1]
            drawing = f"result-{name.replace('_', '-')}-{measured.size}"
            style.save(drawing, lambda theme, e=experiment, o=outcome: picture(e, o)[0])  # type: ignore[misc]
            dark = style.OUT / f"{drawing}.dark.svg"
            dark.write_text(re.sub("|".join(DARK), lambda color: DARK[color[0]], dark.read_text()))
            dots = "" if experiment.overlays else "every run a small dot, "
            counts = Counter(verdict.word for _, verdict in outcome.verdicts(experiment))
            verdicts = ", ".join(f"{counts[word]} {word}" for word in ("seen", "not seen", "undecided") if counts[word])
            page = f"[{measured.size}, {measured.date}](src:docs/results/{Path(measured.result).stem}.md)"
            unseen = [each.text for each, verdict in outcome.verdicts(experiment) if verdict.word == "not seen"]
            if unseen:
                verdicts += f". Not seen: *{' '.join(unseen)}* {measured.tried}"
            parts.append(
                f"## {experiment.title}\n\n`attnzoo experiment run {name}`, {page}: {verdicts.rstrip('. ')}.\n\n"
                f"![{words[0].upper()}{words[1:]}: {dots}means with their standard errors]"
                f"(../figures/out/{drawing}.svg)\n\n*{words[0].upper()}{words[1:]}.*"
            )
    index = RESULTS / "index.md"
    first = index.read_text().partition(BEGIN)[0].rstrip()
    index.write_text("\n\n".join([first, BEGIN, *parts]) + "\n")
