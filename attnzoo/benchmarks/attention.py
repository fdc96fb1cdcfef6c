"""Shared parts of the benchmarks of attention kernels: inputs, contenders, errors against float64, tables of times."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.benchmarks.measure import (
    Result,
    decay_lengths,
    host_time,
    markdown_table,
    measured,
    of_kv_heads,
    relative,
    timing,
    with_kernels,
)
from attnzoo.kernels.fox.plan import SEARCHED_WORK

ABSENT = cast(Tensor, None)  # a gate part that no contender of a benchmark reads


@dataclass
class Inputs:
    """The input tensors of one shape, ``[B, T, heads, ...]``, or ``[B, heads, T, ...]`` where heads come first.

    Args:
        q: queries ``[B, T, H, K]``, of unit root mean square; k, v: ``[B, T, G, K]``; all in bfloat16.
        do: a gradient of the output, as q.
        g: log decays ``[B, T, H]`` in float32, three quarters of the heads local (:func:`decay_lengths`).
        w: vectors of length 1, ``[B, T, G, K]`` in float32, with beta ``[B, T, G]`` in 0..2.
        a: log decays of channels, ``[B, T, H, K]`` in float32.
        r: what is remembered of keys, ``[B, T, G, 2]`` in float32: about as an untrained forget network says.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    g: Tensor = ABSENT
    w: Tensor = ABSENT
    beta: Tensor = ABSENT
    a: Tensor = ABSENT
    r: Tensor = ABSENT

    def map(self, fn: Callable[[Tensor], Tensor]) -> Inputs:
        """The inputs with ``fn`` applied to every existing tensor."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return Inputs(**{name: ABSENT if x is None else fn(x) for name, x in given.items()})


def draw(
    B: int, H: int, T: int, K: int, parts: str = "g", seed: int = 0, *, kv_heads: int | None = None,
    device: str = "cuda",
) -> Inputs:  # fmt: skip
    """Random inputs with these ``parts`` of a gate by name; k, v, w and beta have ``kv_heads`` heads (None: H)."""
    G, generator = kv_heads or H, torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    q, k, v, do = (torch.randn(B, T, n, K, device=device) for n in (H, G, G, H))
    q, k = F.rms_norm(q, (K,)), F.rms_norm(k, (K,))
    x = Inputs(q.bfloat16(), k.bfloat16(), v.bfloat16(), do.bfloat16())
    for part in parts.split():
        if part in ("g", "a"):  # per head, or per channel of a head
            size = (H,) if part == "g" else (H, K)
            tau = decay_lengths(H if part == "g" else H * K, generator).to(device).view(size)
            drawn = -2 * torch.rand(B, T, *size, device=device) / tau
        elif part == "r":
            drawn = torch.tensor([3.0, 1.0], device=device) + torch.randn(B, T, G, 2, device=device)
            drawn = torch.cat([drawn[..., :1], drawn[..., 1:].abs()], -1)
        else:
            drawn = 2 * torch.rand(B, T, G, device=device)
            drawn = F.normalize(torch.randn(B, T, G, K, device=device), dim=-1) if part == "w" else drawn
        setattr(x, part, drawn)
    return x


@dataclass(frozen=True)
class Contender:
    """A kernel that is timed.

    Args:
        name: shown name.
        call: a function from inputs to the output.
        leaves: names of the inputs that it reads, separated by blanks.
        head_first: whether it takes ``[B, H, T, K]``.
        shares: whether it takes fewer key heads than query heads; else k and v are repeated in each call.
        lengths: the only lengths T at which it is timed, as some compile for minutes; empty for all.
        switches: environment variables that each call sets, and that stay for its backward pass.
    """

    name: str
    call: Callable[[Inputs], Tensor]
    leaves: str = "q k v g"
    head_first: bool = False
    shares: bool = True
    lengths: tuple[int, ...] = ()
    switches: Mapping[str, str] = field(default_factory=dict)

    @property
    def prunes(self) -> bool:
        """Whether it prunes, as its name says."""
        return "pruned" in self.name

    def reads(self, part: str) -> bool:
        """Whether the contender reads an input."""
        return part in self.leaves.split()

    def taken(self, x: Inputs) -> Inputs:
        """The inputs in the contender's layout."""
        return x.map(lambda y: y.detach().transpose(1, 2).contiguous()) if self.head_first else x

    def tensors(self, x: Inputs) -> list[Tensor]:
        """The tensors that it reads, of inputs in its layout."""
        return [getattr(x, name) for name in self.leaves.split()]

    def attend(self, x: Inputs) -> Tensor:
        """The output for inputs in its layout."""
        heads = 1 if self.head_first else 2
        n = x.q.shape[heads] // x.k.shape[heads]
        if n > 1 and not self.shares:
            x = replace(x, k=x.k.repeat_interleave(n, heads), v=x.v.repeat_interleave(n, heads))
        os.environ.update(self.switches)
        return self.call(x)


def texts_of(prunes: bool, H: int, T: int, K: int) -> int:
    """The number of texts to check a contender with: of one that prunes so many that FoX's kernels look for what to."""
    return math.ceil(SEARCHED_WORK / (H * T * T * K)) if prunes else 1


def compare(peer: Contender, x: Inputs, exact: Callable[[Inputs], Tensor]) -> dict[str, float]:
    """The errors of output and gradients against ``exact`` on the same inputs in float64, which gets row by row."""

    def outcome(y: Inputs, attend: Callable[[Inputs], Tensor]) -> list[Tensor]:
        leaves = [leaf.requires_grad_() for leaf in peer.tensors(y)]
        o = attend(y)
        return [o.detach(), *torch.autograd.grad(o, leaves, y.do)]

    def row(n: int) -> Inputs:
        return x.map(lambda y: y[n : n + 1].double())

    rows = [outcome(row(n), exact) for n in range(len(x.q))]
    want, got = [torch.cat(each) for each in zip(*rows, strict=True)], outcome(peer.taken(x), peer.attend)
    got = [y.transpose(1, 2) for y in got] if peer.head_first else got
    names = ["o", *(f"d{name}" for name in peer.leaves.split())]
    return {name: relative(a, b) for name, a, b in zip(names, got, want, strict=True)}


def time_peer(peer: Contender, x: Inputs, rep: int) -> tuple[float, float]:
    """The median milliseconds of forward (no grad) and of forward + backward."""
    y = peer.taken(x)
    return timing(lambda: peer.attend(y), peer.tensors(y), y.do, rep)


def host_time_of(peer: Contender, x: Inputs) -> float:
    """Median milliseconds that forward + backward keeps the host."""
    y = peer.taken(x)
    leaves = [leaf.requires_grad_() for leaf in peer.tensors(y)]
    return host_time(lambda: torch.autograd.grad(peer.attend(y), leaves, y.do))


def time_and_memory(peer: Contender, x: Inputs, rep: int) -> Result:
    """The times of forward and forward + backward, also of the host alone, and the extra memory; see
    :func:`~attnzoo.benchmarks.measure.measured`."""
    y = peer.taken(x)
    found = measured(lambda: peer.attend(y), peer.tensors(y), y.do, rep)
    return {**found, "host_ms": round(host_time_of(peer, x), 3)}


def shape_tables(
    result: Result,
    columns: Sequence[str],
    cells: Callable[[Result, dict[str, float]], Sequence[object]],
    kept: Callable[[Result], str] = lambda row: "",
) -> list[str]:
    """The lines of a table for each shape, with the times, also of the host alone if all rows have it.

    Args:
        result: result of a benchmark.
        columns: names of the columns after the times.
        cells: a function from a row and the forward + backward times by contender to the row's cells in these.
        kept: a function from a row to the remark on pruning in a shape's heading.
    """
    times = {"forward_ms": "forward ms", "both_ms": "fwd+bwd ms"}
    if all("host_ms" in row for row in result["rows"]):  # earlier results have none
        times["host_ms"] = "of the host"
    lines: list[str] = []
    shapes: dict[tuple[int, ...], list[Result]] = {}
    for row in result["rows"]:
        shapes.setdefault(tuple(row[n] for n in "BHTK"), []).append(row)
    for shape, rows in shapes.items():
        both = {row["name"]: row["both_ms"] for row in rows}
        lines += [f"### (B, H, T, K) = {shape}{of_kv_heads(result)}{kept(rows[0])}", ""]
        shown = ([with_kernels(row, "name"), *(f"{row[key]:.2f}" for key in times), *cells(row, both)] for row in rows)
        lines += [*markdown_table(["", *times.values(), *columns], shown), ""]
    return lines


def ratio(a: float | None, b: float | None) -> str:
    """a / b to two digits; "-" where one of them was not measured."""
    return f"{a / b:.2f}" if a and b else "-"
