"""The table of the page on conversion: the loss after each phase, from the record of the experiment."""

from __future__ import annotations

from pathlib import Path

from attnzoo.experiments.claims import Value
from attnzoo.experiments.experiment import find
from attnzoo.experiments.outcome import load_outcome
from attnzoo.experiments.statistics import with_error

TARGETS = {"fox": "FoX, without the rotation", "gated_deltanet": "Gated DeltaNet, beside the rotation"}
STEPS = ("swapped", "after align", "after distil", "after text", "text alone")


def table(results: Path) -> str:
    """Held-out loss by target and phase, means over the seeds with standard errors, in Markdown."""
    [measured] = [each for each in find("convert").measured if each.size == "cpu"]
    outcome = load_outcome(results / measured.result)
    lines = [f"| layers | {' | '.join(STEPS)} |", "|---" * (1 + len(STEPS)) + "|"]
    for target, words in TARGETS.items():
        found = [outcome.values(Value(f"{target}, {step}", "loss")) for step in STEPS]
        lines.append(f"| {words} | {' | '.join(map(with_error, found))} |")
    return "\n".join(lines)
