"""Loss of a model with limited keys, and the times at which tokens of a text are evicted: measured, printed and
drawn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor, nn

from attnzoo.evaluation.forgetting import RULES, UNLIMITED, Point, ages_of_forgetting, knows, loss_within
from attnzoo.evaluation.losses import Array
from attnzoo.experiments import run_figures
from attnzoo.experiments.evaluate.lines import table, wrapped
from attnzoo.experiments.figures import PAIR_COLORS, Line, Look
from attnzoo.experiments.report.shell import render_template
from attnzoo.layer.attention import Attention

WORDS = {
    "window": "window", "sinks": "sinks + window", "h2o": "H2O", "snapkv": "SnapKV", "retrieval": "retrieval",
    "retention": "forget network",
    "utility": "later use", "certified": "certified", "forgets": "network, by itself",
}  # fmt: skip
IN_A_LINE = 6  # limits per line of the terminal's table
SEEN_OFTEN = 4  # least occurrences of a token that is listed


@dataclass(frozen=True)
class ForgottenText:
    """The times at which each token of a text was evicted.

    Args:
        rule: the rule of eviction.
        budget: keys that a head could hold; 0 for no limit.
        tokens: the T tokens in print.
        layers: numbers of the softmax layers.
        ages: by layer, ``[G, T]``: the number of rows that saw the token; -1 for tokens that were never evicted.
    """

    rule: str
    budget: int
    tokens: tuple[str, ...]
    layers: tuple[int, ...]
    ages: tuple[Array, ...]

    @property
    def lives(self) -> list[Array]:
        """By layer, ``[G, T]`` in [0, 1]: the logarithm of the age divided by that of the token's largest possible
        age."""
        most = np.log1p(np.arange(len(self.tokens), 0, -1))
        return [np.where(ages < 0, 1.0, np.log1p(np.maximum(ages, 0)) / most) for ages in self.ages]

    def by_word(self) -> list[tuple[str, int, float]]:
        """The frequent tokens of the text, their number and mean :attr:`lives`, the shortest first."""
        mean, lives = np.concatenate(self.lives).mean(0), defaultdict(list)
        for token, life in zip(self.tokens, mean, strict=True):
            lives[token].append(float(life))
        often = [(token, len(found), fmean(found)) for token, found in lives.items() if len(found) >= SEEN_OFTEN]
        return sorted(often, key=lambda one: one[2])


@dataclass(frozen=True)
class MemoryCurves:
    """The losses by rule and limit of keys.

    Args:
        length: tokens of a window.
        windows: number of windows.
        whole: loss with all keys, nats per token.
        points: the points of each rule and limit.
        text: the evictions in a text.
    """

    length: int
    windows: int
    whole: float
    points: tuple[Point, ...]
    text: ForgottenText

    @property
    def rules(self) -> list[str]:
        return list(dict.fromkeys(point.rule for point in self.points))

    def of(self, rule: str) -> list[Point]:
        """The points of a rule, the largest limit first."""
        return sorted((point for point in self.points if point.rule == rule), key=lambda point: -point.budget)


def measure_memory(
    model: nn.Module, windows: Tensor, piece: Tensor, words: Sequence[str], halvings: int, rule: str | None
) -> MemoryCurves:
    """The losses with a half, a quarter and so on of the window's keys, for all rules that the model supports.

    Args:
        model: in evaluation mode.
        windows: ``[N, L + 1]``.
        piece: a text ``[T]``, of whose keys a head may hold a quarter.
        words: the text's tokens in print.
        halvings: number of limits.
        rule: the rule of eviction in the text; None for the layers' forget networks, or H2O where there are none.

    Raises:
        ValueError: no softmax layer, or a rule that the model does not support.
    """
    known = [one for one in (*RULES, *UNLIMITED) if knows(model, one)]
    if not known:
        raise ValueError("model: expected a layer of the softmax side, whose keys can be given up")
    rule = rule or ("retention" if "retention" in known else "h2o")
    if rule not in known:
        raise ValueError(f"rule: expected one of {', '.join(known)}, got {rule!r}")
    length = windows.shape[1] - 1
    budgets = [*dict.fromkeys(max(1, length >> n) for n in range(1, halvings + 1))]
    [whole] = loss_within(model, windows, ["window"], [length])
    points = loss_within(model, windows, known, budgets)
    budget = 0 if rule in UNLIMITED else max(1, len(piece) // 4)
    ages = ages_of_forgetting(model, piece, rule, budget)
    attentions = [layer for layer in model.modules() if isinstance(layer, Attention)]
    numbers = tuple(number for number, layer in enumerate(attentions) if layer.variant.side == "softmax")
    text = ForgottenText(rule, budget, tuple(words), numbers, tuple(age.cpu().double().numpy() for age in ages))
    return MemoryCurves(length, len(windows), whole.loss, tuple(points), text)


def lines(found: MemoryCurves) -> list[str]:
    """Lines with the added loss by rule and limit, and the tokens that are evicted first and last."""
    added = {(point.rule, point.budget): point.loss - found.whole for point in found.points}
    limits = sorted({point.budget for point in found.points} - {0}, reverse=True)
    limited = [rule for rule in found.rules if rule not in UNLIMITED]
    said = [
        f"{found.windows} windows of {found.length:,} tokens; with all keys {found.whole:.4f} nats",
        "nats added by how many keys a head may hold",
    ]
    for first in range(0, len(limits), IN_A_LINE):
        some = limits[first : first + IN_A_LINE]
        rows = [[WORDS[rule], *(f"{added[rule, limit]:+.4f}" for limit in some)] for rule in limited]
        said += table(["keys held:", *(f"{limit:,}" for limit in some)], rows)
    for rule in found.rules:
        for point in found.of(rule) if rule in UNLIMITED else ():
            said.append(f"{WORDS[rule]}, without a limit: {point.late:,.0f} keys, {added[rule, 0]:+.4f} nats")
    often = found.text.by_word()
    most = min(8, len(often) // 2)
    for name, part in (("soonest", often[:most]), ("latest", often[: -most - 1 : -1])):
        if part:
            said += wrapped(f"given up {name}:", [repr(word) for word, _, _ in part])
    return said


def picture(found: MemoryCurves) -> Figure:
    """A figure of the added loss against the share of keys that are held."""
    curves, points = [], []
    for number, rule in enumerate(found.rules):
        look, of = Look(PAIR_COLORS[number % len(PAIR_COLORS)], ()), found.of(rule)
        x = np.array([(point.budget or point.late) / found.length for point in of[::-1]])
        y = np.array([point.loss - found.whole for point in of[::-1]])
        if rule in UNLIMITED:
            points.append(run_figures.Gains(rule, WORDS[rule], x, y, look))
        else:
            curves.append(Line(rule, WORDS[rule], x, y, look))
    return run_figures.overlay(run_figures.Overlaid(curves, points, "keys held, of the window", "nats added"))


def page(found: MemoryCurves, title: str) -> str:
    """An HTML page with the text per head, tokens coloured the more strongly the sooner they were evicted."""
    text = found.text
    lives, every = text.lives, np.concatenate(text.lives)
    parts = [("all heads", "mean", _spans(text, every.mean(0), None))]
    for layer, life, ages in zip(text.layers, lives, text.ages, strict=True):
        for head in range(len(life)):
            gone = f"{100 * (ages[head] >= 0).mean():.0f} % given up"
            parts.append((f"layer {layer}, key head {head}", gone, _spans(text, life[head], ages[head])))
    often = text.by_word()
    some = min(16, len(often) // 2)
    held = f"A head may hold {text.budget:,} of {len(text.tokens):,} keys" if text.budget else "No limit"
    return render_template(
        "forgotten.html.j2", title="What is forgotten", model=title, rule=WORDS[text.rule], held=held, parts=parts,
        words=[("soonest", often[:some]), ("latest", often[: -some - 1 : -1])],
    )  # fmt: skip


def _spans(text: ForgottenText, life: Array, ages: Array | None) -> list[tuple[str, str, str]]:
    """Each token's text, its colour's strength in per cent, and its tooltip."""
    spans = []
    for number, (token, share) in enumerate(zip(text.tokens, life, strict=True)):
        said = f"{share:.2f} of its possible life, on a logarithmic scale"
        if ages is not None:
            said = "never given up" if ages[number] < 0 else f"given up after {int(ages[number]):,} tokens"
        spans.append((token, f"{100 * (1 - min(max(float(share), 0.0), 1.0)):.0f}", said))
    return spans
