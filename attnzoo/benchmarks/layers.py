"""Whole layers on one GPU: every pair of the zoo, its recurrence beside its dual, forward and backward.

    attnzoo bench layers [--out DIR] [--shapes 4,24,4096,64]... [--only NAME]... [--seconds 500]

Layers as ``build_attention`` makes them, of H heads of K channels, in bfloat16 and eager. What serves them is what
``auto`` picks, and is named. Forget gates are those of fox.py (three quarters of the heads decay within 8 to 256
tokens); a layer that can prune is measured with pruning too. Each is checked against itself in float64 on the reference
form before it is timed: its output and the gradient of its input may have twice the error of the reference form in
bfloat16. The check has 512 tokens; that of a layer with a window or pruning has 2048, and for pruning as many texts as
make FoX's kernels look for what to leave out. Writes results.json and results.md.

One-Pass Forgetting stands beside them in its two phases of training, with the loss terms of its network, and so does a
window of as many tokens as the kernels' bench has.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnzoo import Forgetting, build_attention
from attnzoo.benchmarks.attention import texts_of
from attnzoo.benchmarks.fox import IN_WINDOW, WINDOW
from attnzoo.benchmarks.measure import (
    Result,
    chosen,
    describe_versions,
    finish,
    headline,
    keeper,
    markdown_table,
    measured,
    not_measured,
    race,
    relative,
    with_kernels,
)
from attnzoo.benchmarks.train import trained_biases
from attnzoo.layer.attention import Attention
from attnzoo.registry import get, pairs
from attnzoo.training.config import ForgettingConfig
from attnzoo.training.forgetting import extra_loss, networks, set_phase

SHAPES = ((4, 24, 4096, 64), (1, 24, 16384, 64))
ERRORS = ("y", "dx")
SCHEDULE = ForgettingConfig()  # of One-Pass Forgetting
SLACK = 2**-7  # relative error always allowed in bfloat16: two roundings


@dataclass(frozen=True)
class TimedLayer:
    """A layer whose time is measured.

    Args:
        name: shown name.
        variant: name of the variant.
        options: further options of ``build_attention``.
        step: of a training of its forget network, if it has one.
    """

    name: str
    variant: str
    options: dict[str, Any] = field(default_factory=dict)
    step: int = 0

    @property
    def prunes(self) -> bool:
        """Whether the layer prunes."""
        return "acp" in self.options


@dataclass
class LayerInputs:
    """The input rows ``[B, T, H K]`` of a layer, and a gradient of its output."""

    x: Tensor
    do: Tensor
    heads: int


def contenders() -> list[TimedLayer]:
    """The layers of both sides of each pair, in the order of the table."""
    found = []
    for pair in pairs():
        for name in (pair.linear, pair.softmax):
            found.append(TimedLayer(name, name))
            if get(name).prunable:
                found.append(TimedLayer(f"{name} + ACP", name, {"acp": True}))
    for name in ("fox", "rope"):
        found.append(TimedLayer(f"{name}, {IN_WINDOW}", name, {"window": WINDOW}))
        for phase, step in enumerate((1, SCHEDULE.distill_steps + SCHEDULE.anneal_steps), 1):
            forgets = {"forgetting": Forgetting()}
            found.append(TimedLayer(f"{name}, One-Pass Forgetting, phase {phase}", name, forgets, step))
    return found


def draw(B: int, H: int, T: int, K: int, seed: int = 0, device: str = "cuda") -> LayerInputs:
    torch.manual_seed(seed)
    x, do = (torch.randn(B, T, H * K, device=device).bfloat16() for _ in range(2))
    return LayerInputs(x, do, H)


def build(contender: TimedLayer, x: LayerInputs, impl: str = "auto") -> Attention:
    """The layer in bfloat16, with forget gates as in trained models."""
    torch.manual_seed(0)
    with torch.device(x.x.device):
        layer = build_attention(
            contender.variant, hidden_size=x.x.shape[-1], num_heads=x.heads, impl=impl, **contender.options
        )  # fmt: skip
    set_phase(networks(layer), SCHEDULE, contender.step)
    with torch.no_grad():
        for projection, bias in trained_biases(layer).values():
            projection.weight.zero_()
            projection.bias.copy_(bias)
    layer.note_starts()  # gates as trained are meant
    return layer.bfloat16()


def checked(contender: TimedLayer, H: int, K: int) -> LayerInputs:
    """The inputs of a contender's check, of which one that leaves something out leaves something out."""
    T = 2048 if contender.prunes or "window" in contender.options else 512
    return draw(texts_of(contender.prunes, H, T, K), H, T, K)


def errors(contender: TimedLayer, x: LayerInputs) -> dict[str, float]:
    """The errors of output and input gradient against float64, divided by the allowed errors.

    The reference gets row by row: it may hold all weights of one.
    """

    def outcome(layer: Attention, dtype: torch.dtype, rows: int) -> list[Tensor]:
        layer, found = layer.to(dtype), []
        for given, do in zip(x.x.to(dtype).detach().split(rows), x.do.to(dtype).split(rows), strict=True):
            y = layer(given.requires_grad_())
            found.append((y.detach(), *torch.autograd.grad(y, given, do)))
        return [torch.cat(each) for each in zip(*found, strict=True)]

    layer, plain = build(contender, x), build(contender, x, "reference")
    exact = outcome(copy.deepcopy(plain), torch.float64, 1)
    got, others = outcome(layer, torch.bfloat16, len(x.x)), outcome(plain, torch.bfloat16, 1)
    found = {}
    for name, want, ours, other in zip(ERRORS, exact, got, others, strict=True):
        found[name] = relative(ours, want) / (2 * relative(other, want) + SLACK)
    return found


def times(contender: TimedLayer, x: LayerInputs, rep: int) -> Result:
    """The milliseconds of forward and of forward + backward (input and weights), the extra memory, and the form."""
    layer = build(contender, x)
    found = networks(layer)

    def call() -> Tensor:
        set_phase(found, SCHEDULE, contender.step)
        y: Tensor = layer(x.x)
        if not torch.is_grad_enabled():
            return y  # the networks' losses belong to a training step
        extra = extra_loss(found, SCHEDULE, contender.step)
        return y if extra is None else y + 0 * extra.loss

    timed = measured(call, [x.x, *layer.parameters()], x.do, rep)
    return {**timed, "form": str(layer.picked).split()[0]}


def table(result: Result) -> str:
    """The results as Markdown: a row per pair and shape."""
    lines = [headline(result, "layers in bf16, eager, medians."), ""]
    shapes: dict[tuple[int, ...], dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        shapes.setdefault(tuple(row[n] for n in "BHTK"), {})[row["name"]] = row

    def cells(row: dict[str, Any] | None) -> list[str]:
        if row is None:
            return ["-", "-", "-"]
        return [with_kernels(row, "form"), f"{row['forward_ms']:.2f}", f"{row['both_ms']:.2f}"]

    times = ("form", "forward ms", "both ms")
    columns = ("linear side", *times, "softmax side", *times, "with ACP", "both: softmax / linear")
    for shape, rows in shapes.items():
        every = []
        for pair in pairs():
            linear, softmax, pruned = (rows.get(n) for n in (pair.linear, pair.softmax, f"{pair.softmax} + ACP"))
            if linear or softmax or pruned:
                ratio = f"{softmax['both_ms'] / linear['both_ms']:.2f}" if linear and softmax else "-"
                every.append([pair.linear, *cells(linear), pair.softmax, *cells(softmax), cells(pruned)[2], ratio])
        lines += [f"### (B, H, T, K) = {shape}", ""]
        lines += [*markdown_table(columns, every), ""] if every else []
        others = [[name, *cells(rows[name])] for name in rows if ", " in name]
        lines += [*markdown_table(("other layers", *times), others), ""] if others else []
    lines += not_measured(missing := result.get("missing", []))
    wrong = [f"{e['name']} ({n} {e[n]})" for e in result["errors"] for n in ERRORS if not float(e[n]) <= 1]
    which = "Every layer that was checked" if missing else "Every layer"
    lines.append(f"Not right, and not timed: {', '.join(wrong)}." if wrong else f"{which} was within its error.")
    return "\n".join(lines) + "\n"


def run(out: Path, shapes: Sequence[tuple[int, ...]], only: Sequence[str], rep: int, seconds: float) -> None:
    """Measure, print the table, and write results.json and results.md to ``out``."""
    result: Result = {"machine": describe_versions()}
    race(
        result, chosen(contenders(), only), shapes or SHAPES, seconds, draw=draw, limits=dict.fromkeys(ERRORS, 1.0),
        errors=lambda layer, H, K: errors(layer, checked(layer, H, K)), common=lambda x: {},
        times=lambda layer, x: times(layer, x, rep), keep=keeper(out, table),
    )  # fmt: skip
    finish(out, result, table)
