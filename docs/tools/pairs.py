"""The pairs of the registry, for the interactive page: a table that its script reads, and an equation for each."""

from __future__ import annotations

import json

from attnzoo import Pair, pairs


def _constant(pair: Pair) -> bool:
    """Whether the scalar gate is one number per head: it is written with a minus sign then."""
    return pair.g.startswith("-")


def script() -> str:
    """JavaScript that says which parts the gate of each pair has."""
    table = [
        {"linear": pair.linear, "softmax": pair.softmax, "requires": pair.requires, "constant": _constant(pair)}
        for pair in pairs()
    ]
    return f"window.zooPairs = {json.dumps(table)};\n"


def equation(pair: Pair) -> str:
    """What the page computes for ``pair``, in TeX: its gates per channel and its angles are the same at every token."""
    same = [tex for part, tex in (("log_diag", r"\operatorname{Diag}(e^{a})"), ("angle", r"\operatorname{Rot}(\theta)"))
            if part in pair.requires]  # fmt: skip
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


def equations() -> str:
    """The equation of every pair, in Markdown; the page's script shows one at a time."""
    shown = [
        f'<div data-pair="{pair.softmax}" id="{pair.softmax}" markdown>$${equation(pair)}$$</div>' for pair in pairs()
    ]
    return "\n".join(['<div class="equation" markdown>', *shown, "</div>"])
