"""The pairs of the registry, as the site shows them: a table of their parts, a page of all of them, and for the
interactive page what its script reads and an equation for each."""

from __future__ import annotations

import json
import posixpath
from itertools import combinations

from attnzoo import Pair, describe, pairs
from attnzoo.algebra.parts import PARTS
from attnzoo.equations import page_of
from attnzoo.registry.table import PAIRS

MATRICES = {name: part.letter for name, part in PARTS.items() if part.letter}
MOVED = {"log_decay", "log_diag", "angle", "w", "beta"}  # what the interactive page has controls for


def _constant(pair: Pair) -> bool:
    """Whether the scalar gate is one number per head, not one per token; its symbol then begins with a minus sign."""
    return pair.g.startswith("-")


def moved() -> list[Pair]:
    """The pairs of the interactive page."""
    return [pair for pair in pairs() if set(pair.requires) <= MOVED]


def script() -> str:
    """JavaScript that says which parts the gate of each pair has."""
    table = [
        {"linear": pair.linear, "softmax": pair.softmax, "requires": pair.requires, "constant": _constant(pair)}
        for pair in moved()
    ]
    return f"window.zooPairs = {json.dumps(table)};\n"


def equation(pair: Pair) -> str:
    """What the page computes for ``pair``, in TeX: its gates per channel and its angles are the same at every token."""
    same = [_in_tex(part) for part in MATRICES if part in pair.requires and part != "w"]
    erase = r"I - \beta_t w_t w_t^\top"
    factors = [*same, *([rf"\big({erase}\big)" if same else erase] if "w" in pair.requires else [])]
    fade, way = "", "0"
    if "log_decay" in pair.requires:
        constant = _constant(pair)
        fade = "e^{-m}" if constant else r"f_t\,"
        way = r"-m\,(t - j)" if constant else r"\log f_{j+1} + \dots + \log f_t"
    between = ""
    if "w" in pair.requires:
        between = r"R_{j+1} \cdots R_t\,"
    elif same:
        between = f"{same[0]}^{{t-j}}" if len(same) == 1 else rf"\big({' '.join(same)}\big)^{{t-j}}"
    named = rf"R_t = {' '.join(factors)}, \qquad " if "w" in pair.requires else ""
    step = "R_t" if named else " ".join(factors)
    return (
        rf"S_t = {fade} S_{{t-1}} {step} + v_t k_t^\top, \qquad {named}"
        rf"s_{{tj}} = \lambda\, k_j^\top {between} q_t, \quad d_{{tj}} = {way}"
    )


def _in_tex(part: str) -> str:
    """The factor of a part, the same at every token: ``Rot(theta_t)`` as ``\\operatorname{Rot}(\\theta)``."""
    name, _, inner = PARTS[part].factor.removesuffix(")").partition("(")
    symbol = PARTS[part].tex
    return rf"\operatorname{{{name}}}({f'e^{{{symbol}}}' if inner.startswith('exp') else symbol})"


def equations() -> str:
    """The equation of every pair, in Markdown; the page's script shows one at a time."""
    shown = [
        f'<div data-pair="{pair.softmax}" id="{pair.softmax}" markdown>$${equation(pair)}$$</div>' for pair in moved()
    ]
    return "\n".join(['<div class="equation" markdown>', *shown, "</div>"])


def table(page: str) -> str:
    """All pairs in Markdown, for ``page``: a row for each set of matrices, a column without and one with a decay."""
    lines = ["| parts of $R_t$ | without $g_t$ | with $g_t$ |", "|---|---|---|"]
    for count in range(len(MATRICES) + 1):
        for chosen in combinations(MATRICES, count):
            cells = ["<br>".join(_names(pair, page) for pair in _with(chosen, decays)) for decays in (False, True)]
            product = r"\,".join(MATRICES[part] for part in chosen) or "I"
            lines.append(f"| ${product}$ | {' | '.join(cells)} |")
    return "\n".join(lines)


def _with(matrices: tuple[str, ...], decays: bool) -> list[Pair]:
    """The pairs whose gate has these matrices and no others, and a scalar decay or none."""
    return [
        pair for pair in pairs()
        if tuple(part for part in MATRICES if part in pair.requires) == matrices
        and ("log_decay" in pair.requires) == decays
    ]  # fmt: skip


def _names(pair: Pair, page: str) -> str:
    """A pair in a cell: a page of its own, or its place among all, is behind its softmax side."""
    to = page_of(pair) if pair in PAIRS else f"reference/pairs.md#{pair.softmax}"
    return f"`{pair.linear}`, [`{pair.softmax}`]({posixpath.relpath(to, posixpath.dirname(page) or '.')})"


def every(page: str) -> str:
    """What ``attnzoo show`` says of each pair, in Markdown for ``page``; then what is its dual's own."""
    parts = []
    for pair in pairs():
        said = describe(pair.linear).split("\nderivation", 1)[0]
        own = describe(pair.softmax).split("\nlayer", 1)[1].split("\nforms", 1)[0]
        parts += [f"## {pair.linear}, {pair.softmax} {{ #{pair.softmax} }}", f"```text\n{said}\n```"]
        parts += [f"Of `{pair.softmax}`:", f"```text\nlayer{own}\n```"]
        if to := page_of(pair):
            parts.append(f"[The derivation]({posixpath.relpath(to, posixpath.dirname(page) or '.')}).")
    return "\n\n".join(parts)
