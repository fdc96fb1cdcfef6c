"""The table of the page on conversion: the loss after each phase, from the record of the experiment."""

from __future__ import annotations

from quoted import outcome

from attnzoo.benchmarks.measure import markdown_table
from attnzoo.experiments.claims import Value
from attnzoo.experiments.statistics import with_error

TARGETS = {"fox": "FoX, without the rotation", "gated_deltanet": "Gated DeltaNet, beside the rotation"}
STEPS = ("swapped", "after align", "after distil", "after text", "text alone")


def table() -> str:
    """Held-out loss by target and phase, means over the seeds with standard errors, in Markdown."""
    values, rows = outcome("convert", "cpu").values, []
    for target, words in TARGETS.items():
        rows.append([words, *(with_error(values(Value(f"{target}, {step}", "loss"))) for step in STEPS)])
    return "\n".join(markdown_table(["layers", *STEPS], rows))
