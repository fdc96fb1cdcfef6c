"""The tables of what is lost where a head may hold only so many keys, from the records."""

from __future__ import annotations

import yaml
from quoted import outcome

from attnzoo.benchmarks.measure import markdown_table
from attnzoo.experiments.claims import Value
from attnzoo.experiments.outcome import Outcome

RULES = "window", "sinks + window", "H2O", "SnapKV"
LATER = "later use (looks ahead)"
DISCOUNTED = "the same, learnt with a discount"  # a row of one experiment alone
ROWS = (  # row, arm and probe
    ("RoPE: network of keys", "rope, key", "network"),
    (DISCOUNTED, "rope, discount", "network"),
    ("network of pairs", "rope, pair", "network"),
    ("network with a dot product", "rope, attention", "network"),
    (DISCOUNTED, "rope, attention, discount", "network"),
    ("decay per key", "rope, decay", "network"),
    *((rule, "rope", rule) for rule in RULES),
    (LATER, "rope", "later use"),
    ("FoX: network of keys", "fox, key", "network"),
    ("FoX: window", "fox", "window"),
)
OTHERS = {  # experiments with rows of their own
    "forgetting_pool": (
        ("logarithms (`power`, the default)", "logarithms", "network"),
        ("contributions (`softmax`)", "contributions", "network"),
        ("largest (`max`)", "largest", "network"),
        ("logarithms, with a discount", "logarithms, discount", "network"),
        ("contributions, with a discount", "contributions, discount", "network"),
        ("window", "rope", "window"),
        (LATER, "rope", "later use"),
    ),
    "forgetting_baselines": (
        ("RoPE: network of keys, with a discount", "rope, forgets", "network"),
        ("window", "rope", "window"),
        ("retrieval (all keys stay)", "rope", "retrieval"),
        ("RoPE trained in groups: window", "rope, groups", "window"),
        ("retrieval", "rope, groups", "retrieval"),
        ("FoX: window", "fox", "window"),
        ("retrieval", "fox", "retrieval"),
    ),
}
COSTS = (  # row, arm, and what a probe's name ends in
    ("RoPE: all keys", "rope", "all keys"),
    ("window", "rope", "window"),
    ("network of keys", "rope, forgets", "network"),
    ("retrieval", "rope", "retrieval"),
    ("FoX: window", "fox", "window"),
)
LONG = (
    ("RoPE: network of keys", "rope, forgets", "network"),
    ("window", "rope", "window"),
    ("all keys", "rope", "all keys"),
    ("RoPE trained in groups: window", "rope, groups", "window"),
    ("all keys", "rope, groups", "all keys"),
    ("FoX: window", "fox", "window"),
    ("all keys", "fox", "all keys"),
)
WRONG = "wrong, forgotten by itself"


def table(name: str, size: str) -> str:
    """Means over the seeds of wrong answers in percent, or of nats added, by keys held; in Markdown."""
    found = outcome(name, size)
    tokens = yaml.safe_load(found.settings)["data"]["context_length"]
    wrong = name == "needle_memory"
    shares = sorted({x for run in found.runs for x in run.values["network"] if x < 1})
    titles = [f"keys held, of {tokens}", *(f"{x * tokens:g}" for x in shares), *["by itself (keys held)"] * wrong]
    rows = []
    for label, arm, probe in OTHERS.get(name) or [row for row in ROWS if not wrong or row[0] != DISCOUNTED]:
        means = [_mean(found, Value(arm, probe, x)) for x in shares]
        cells = [_percent(x) if wrong else f"{round(x, 3) + 0.0:.3f}" for x in means]
        if wrong and probe == "network":
            held = _mean(found, Value(arm, "keys held by itself")) * tokens
            cells.append(f"{_percent(_mean(found, Value(arm, WRONG)))} ({held:.0f})")
        elif wrong:
            cells.append("")
        rows.append([label, *cells])
    lines = markdown_table(titles, rows)
    lines[2] = lines[2].replace("% |", "% wrong |", 1) if wrong else lines[2]
    return "\n".join(lines)


def costs() -> str:
    """KiB that a sequence holds and thousand operations of a token's cores, by the length of the text."""
    found, tokens = _baselines()
    lengths = sorted(found.runs[0].values["KiB held, all keys"])
    titles = [f"{what} after {x * tokens:,.0f}" for what in ("KiB", "thousand operations") for x in lengths]
    rows = []
    for label, arm, kind in COSTS:
        values = [Value(arm, f"{what}, {kind}", x) for what in ("KiB held", "thousand operations") for x in lengths]
        rows.append([label, *(f"{_mean(found, value):,.0f}" for value in values)])
    return "\n".join(markdown_table(["", *titles], rows))


def long_texts() -> str:
    """Losses of texts, by their length, where heads hold few keys and where they hold all."""
    found, tokens = _baselines()
    lengths = sorted({x for _, _, kind in LONG for run in found.runs for x in run.values[f"long text, {kind}"]})
    rows = []
    for label, arm, kind in LONG:
        probe = f"long text, {kind}"
        known = next(run.values[probe] for run in found.runs if run.arm == arm)
        cells = [f"{_mean(found, Value(arm, probe, x)):.3f}" if x in known else "" for x in lengths]
        rows.append([label, *cells])
    return "\n".join(markdown_table(["bytes of a text", *(f"{x * tokens:,.0f}" for x in lengths)], rows))


def _baselines() -> tuple[Outcome, int]:
    """The record of the baselines, and the tokens of its training context."""
    found = outcome("forgetting_baselines", "cpu")
    return found, yaml.safe_load(found.settings)["data"]["context_length"]


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


def parts() -> str:
    """Nats added to the loss with a sixteenth of the keys, by what is changed of a forget network, on text."""
    sizes = [outcome("forgetting_text", size) for size in ("cpu", "gpu")]
    rows = [(word, Value(arm, "network", 1 / 16)) for arm, word in PARTS.items()]
    rows += [(probe, Value("rope", probe, 1 / 16)) for probe in ("window", "later use")]
    cells = ([word, *(f"{_mean(found, value):.3f}" for found in sizes)] for word, value in rows)
    return "\n".join(markdown_table(["", "16 of 256 keys (CPU)", "256 of 4096 (GPU)"], cells))
