"""A variant and its dual on one screen of text: equations, gate, layer, forms, sources."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from attnzoo.algebra.parts import PARTS
from attnzoo.registry import get, pairs
from attnzoo.registry.pair import Pair
from attnzoo.registry.table import OBLIQUE, PAIRS, PRODUCTS
from attnzoo.registry.variant import Variant
from attnzoo.terminal import wrapped

WIDTH = 80
LABEL = 12  # columns before the text


def describe(name: str, *, ascii_only: bool = False, width: int = WIDTH) -> str:
    """A variant and its dual as text of 80 columns, or of ``width``.

    It has the equations of both sides (a module's ``EQUATIONS``, or the general ones with the pair's g and R), the
    gate, the layer's defaults, the forms, the sources, and the page with the derivation.

    Args:
        name: any of ``list_variants()``.
        ascii_only: whether to use ASCII characters alone: ``gⱼ₊₁`` becomes ``g_{j+1}``, which may exceed the width.
        width: columns; equations and names are not wrapped.

    Raises:
        ValueError: no such variant; the message lists them and names the nearest.
    """
    variant = get(name)
    pair = variant.pair
    sides = (get(pair.linear), get(pair.softmax)) if variant.readout is None else (variant, variant.dual)
    write = in_ascii if ascii_only else str
    place = f"{variant.side} side of pair {pairs().index(pair) + 1}; dual: {variant.dual.name}"
    if variant.readout is not None:
        place = f"another readout of the gate of {variant.dual.name}"
    heads = (f"{called}, {place}" for called in (_full(variant), name))
    lines = [*wrapped(next((head for head in heads if len(head) <= width), f"{name}, {place}"), width), ""]
    row = partial(_row, width)
    for side in sides:
        lines += row(side.side if side.readout is None else "readout", [_full(side)])
        lines += [f"{'':{LABEL}}  {line}" for line in _equations([write(line) for line in equations_of(side)])]
        lines.append("")
    lines += row("", [f"sums over the keys{' j ≤ t' if variant.causal else ''}; λ is the scale, 1/√K by default"])
    lines.append("")
    lines += row("gate", [f"Gate({', '.join(f'{part}=...' for part in variant.requires)})"])
    parts = [f"{'':{LABEL}}  {part}" for part in _parts(variant, write)]
    lines += parts if width >= WIDTH else [line for part in parts for line in wrapped(part, width)]
    lines += row("layer", _layer(variant))
    if variant.prunable:
        lines += row("pruning", ["acp=True, certified: the decay bounds every weight that is dropped"])
    if variant.readout is not None:
        lines += row("pruning", [f"none: {variant.readout.unpruned}"])
    both = (variant, variant.dual)
    lines += row("forms", [f"{side.name}: {', '.join(side.forms)}" for side in both])
    lines += row("sources", [f"{side.name}: {side.paper or 'not given'}" for side in both])
    if variant.note:
        lines += row("note", [variant.note])
    page = page_of(pair) if variant.readout is None else "derivations/readouts.md" if variant.own else ""
    if page:
        site = page.replace(".md", ".html")
        lines += row("derivation", [f"docs/{page}", f"(make docs, then open site/{site})"])
    return write("\n".join(line.rstrip() for line in lines))


def page_of(pair: Pair) -> str:
    """The page below ``docs`` that derives a pair, or "" for a third party's pair."""
    if pair in PAIRS:
        return f"derivations/{pair.softmax}.md"
    return "derivations/products.md" if pair in PRODUCTS else "derivations/outside.md" if pair in OBLIQUE else ""


SUBSCRIPTS = str.maketrans("ₜⱼₗ₊₋₁", "tjl+-1")
SYMBOLS = {
    "ᵀ": "^T", "ℓ": "l", "λ": "lambda", "β": "beta", "θ": "theta", "μ": "mu", "σ": "sigmoid", "φ": "phi", "Σ": "sum",
    "Π": "prod", "⋯": "...", "−": "-", "≤": "<=", "≥": ">=", "∞": "inf", "√": "sqrt ",
}  # fmt: skip


def in_ascii(text: str) -> str:
    """A text with its symbols spelled out."""

    def subscript(match: re.Match[str]) -> str:
        plain = match[0].translate(SUBSCRIPTS)
        return f"_{{{plain}}}" if len(plain) > 1 else f"_{plain}"

    text = re.sub("[ₜⱼₗ₊₋₁]+", subscript, text)
    return "".join(SYMBOLS.get(c, c) for c in text).encode("ascii", "replace").decode()


def _in_unicode(text: str) -> str:
    """The symbols of a pair's R in Unicode, as in the modules' equations."""
    for plain, symbol in (("_t", "ₜ"), ("^T", "ᵀ"), ("beta", "β"), ("theta", "θ"), (" - ", " − ")):
        text = text.replace(plain, symbol)
    return text


def _full(variant: Variant) -> str:
    return variant.name if variant.title == variant.name else f"{variant.title} ({variant.name})"


def _row(width: int, label: str, texts: Iterable[str]) -> list[str]:
    """The lines of texts beside a label, each wrapped with a hanging indent."""
    lines = [line for text in texts for line in wrapped(text, width - LABEL)]
    return [f"{label if number == 0 else '':{LABEL}}{line}" for number, line in enumerate(lines)]


def equations_of(variant: Variant) -> Sequence[str]:
    """The lines of a module's ``EQUATIONS``, or of the general equations with its pair's g and R."""
    given = getattr(variant.module, "EQUATIONS", None) or _general(variant)
    return given.splitlines() if isinstance(given, str) else given


def equations_text(variant: Variant) -> str:
    """The equations of a variant, a line each, with their equality signs below each other."""
    return "\n".join(_equations(list(equations_of(variant))))


def _equations(lines: Sequence[str]) -> list[str]:
    """The lines with their equality signs aligned."""
    rows = [line.partition("=") for line in lines]
    width = max((len(left.strip()) for left, sign, _ in rows if sign), default=0)
    return [f"{left.strip():{width}} = {right.strip()}" if sign else left for left, sign, right in rows]


def _general(variant: Variant) -> Sequence[str]:
    """The general equations with the pair's g and R; g has its own line unless it is a symbol."""
    pair, decays = variant.pair, "log_decay" in variant.requires
    transition = [f"gₜ = {pair.g}"] if decays and pair.g != "g_t" else []
    transition.append(f"Rₜ = {_in_unicode(pair.R)}")
    if variant.readout is not None:
        scores = ["sₜⱼ = λ kⱼᵀ Rⱼ₊₁ ⋯ Rₜ qₜ", *(["dₜⱼ = gⱼ₊₁ + ⋯ + gₜ"] if decays else [])]
        return [transition[-1], *scores, *variant.readout.equations]
    if variant.side == "linear":
        forget, forgotten = ("exp(gₜ) ", " exp(gⱼ₊₁ + ⋯ + gₜ)") if decays else ("", "")
        unrolled = f" = Σⱼ (λ kⱼᵀ Rⱼ₊₁ ⋯ Rₜ qₜ){forgotten} vⱼ"
        return [*transition, f"Sₜ = {forget}Sₜ₋₁ Rₜ + vₜ kₜᵀ", "oₜ = Sₜ (λ qₜ)", unrolled]
    bias = " + gⱼ₊₁ + ⋯ + gₜ" if decays else ""
    return [*transition, f"ℓₜⱼ = λ kⱼᵀ Rⱼ₊₁ ⋯ Rₜ qₜ{bias}", "oₜ = Σⱼ softmaxⱼ(ℓₜⱼ) vⱼ"]


def _parts(variant: Variant, write: Callable[[str], str]) -> Iterator[str]:
    """A line per part of the gate, in columns: symbol, name, shape, values."""
    parts = [(PARTS[name].symbol, name, PARTS[name].shown, PARTS[name].values) for name in variant.requires]
    rows = [tuple(map(write, row)) for row in parts]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if sum(widths) + 6 > WIDTH - LABEL - 2:  # too wide for a column of values: put them right after the shapes
        widths[2:] = [0, 0]
    for row in rows:
        yield "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True))


def _layer(variant: Variant) -> Iterator[str]:
    """The defaults of the variant's layer, with a line about each gate projection."""
    from attnzoo.layer.gates import gate_classes

    settings = dict(getattr(variant.module, "LAYER", {}))
    gate = settings.pop("gate", "none")
    for name, cls in zip(gate if isinstance(gate, list | tuple) else [gate], gate_classes(gate), strict=True):
        if cls.provides:
            told = inspect.cleandoc(vars(cls).get("__doc__") or "").partition("\n\n")[0].replace("``", "")
            said = " ".join(told.split()) or f"gives {', '.join(cls.provides)}"
            yield f"gate={repr(name) if isinstance(name, str) else cls.__name__}: {said}"
    if settings:
        yield ", ".join(f"{key}={value!r}" for key, value in settings.items())
    elif gate == "none":
        yield "none by default: build_attention takes gate=..." if variant.requires else "projections alone"
