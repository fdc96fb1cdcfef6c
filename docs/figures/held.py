"""The tables of what is lost where a head may hold only so many keys, from the records."""

from __future__ import annotations

from pathlib import Path

import yaml

from attnzoo.experiments.claims import Value
from attnzoo.experiments.experiment import find
from attnzoo.experiments.outcome import Outcome, load_outcome

RULES = "window", "sinks + window", "H2O", "SnapKV"
LATER = "later use (looks ahead)"
# Row, arm and probe, by experiment.
ROWS = {
    "needle_memory": (
        ("RoPE: network of keys", "rope, key", "network"),
        ("network of pairs", "rope, pair", "network"),
        ("network with a dot product", "rope, attention", "network"),
        ("decay per key", "rope, decay", "network"),
        *((rule, "rope", rule) for rule in RULES),
        (LATER, "rope", "later use"),
        ("FoX: network of keys", "fox, key", "network"),
        ("FoX: window", "fox", "window"),
    ),
    "learned_forgetting": (
        ("RoPE: network of keys", "rope, key", "network"),
        ("the same, learnt with a discount", "rope, discount", "network"),
        ("network of pairs", "rope, pair", "network"),
        ("network with a dot product", "rope, attention", "network"),
        ("the same, learnt with a discount", "rope, attention, discount", "network"),
        ("decay per key", "rope, decay", "network"),
        *((rule, "rope", rule) for rule in RULES),
        (LATER, "rope", "later use"),
        ("FoX: network of keys", "fox, key", "network"),
        ("FoX: window", "fox", "window"),
    ),
}
WRONG = "wrong, forgotten by itself"


def table(results: Path, name: str, size: str) -> str:
    """Means over the seeds of wrong answers in percent, or of nats added, by keys held; in Markdown."""
    [measured] = [each for each in find(name).measured if each.size == size]
    outcome = load_outcome(results / measured.result)
    tokens = yaml.safe_load(outcome.settings)["data"]["context_length"]
    wrong = name == "needle_memory"
    shares = sorted({x for run in outcome.runs for x in run.values["network"] if x < 1})
    titles = [f"keys held, of {tokens}", *(f"{x * tokens:g}" for x in shares), *["by itself (keys held)"] * wrong]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for label, arm, probe in ROWS[name]:
        means = [_mean(outcome, Value(arm, probe, x)) for x in shares]
        cells = [_percent(x) if wrong else f"{round(x, 3) + 0.0:.3f}" for x in means]
        if wrong and probe == "network":
            held = _mean(outcome, Value(arm, "keys held by itself")) * tokens
            cells.append(f"{_percent(_mean(outcome, Value(arm, WRONG)))} ({held:.0f})")
        elif wrong:
            cells.append("")
        lines.append(f"| {label} | {' | '.join(cells)} |".replace("|  |", "| |"))
    lines[2] = lines[2].replace("% |", "% wrong |", 1) if wrong else lines[2]
    return "\n".join(lines)


def _mean(outcome: Outcome, value: Value) -> float:
    return float(outcome.values(value).mean())


def _percent(share: float) -> str:
    digits = 0 if share == 0 or share >= 0.0995 else 1
    return f"{100 * share:.{digits}f}%"


# Arm of forgetting_text, in words.
PARTS = {
    "key": "network of keys", "sharp from the start": "the same, sharp from the start",
    "shallow layers first": "shallow layers first", "deep layers first": "deep layers first",
    "learned budget": "heads divide the budget", "no second phase": "without a second phase",
    "plain maximum": "pooled by a plain maximum", "plain soft maximum": "by a soft maximum of contributions",
    "discount": "with a discount", "pair": "network of pairs", "pair, free": "the same, free to remember again",
    "attention": "network with a dot product", "decay": "decay per key",
    "budget of half": "trained for half of the keys",
}  # fmt: skip


def parts(results: Path) -> str:
    """Nats added to the loss with a sixteenth of the keys, by what is changed of a forget network, on text."""
    sizes = {each.size: load_outcome(results / each.result) for each in find("forgetting_text").measured}
    lines = ["| | 16 of 256 keys (CPU) | 256 of 4096 (GPU) |", "|---|---|---|"]
    rows = [(word, Value(arm, "network", 1 / 16)) for arm, word in PARTS.items()]
    rows += [(probe, Value("rope", probe, 1 / 16)) for probe in ("window", "later use")]
    for word, value in rows:
        cells = [f"{_mean(outcome, value):.3f}" for outcome in sizes.values()]
        lines.append(f"| {word} | {' | '.join(cells)} |")
    return "\n".join(lines)
