"""Training speed of a plain GPT with a layer of the zoo in place of its attention, as in a script of one's own.

    attnzoo bench gpt [--only PREFIX]... [--batch 16] [--context 2048] [--device cpu]

Each layer is that of ``build_attention(name)``, in the same residual blocks, beside PyTorch's attention with RoPE and
flash-linear-attention's FoX layer. A step is forward, backward and a fused AdamW under autocast to bfloat16. It is
timed eager, compiled, and compiled with CUDA graphs (``mode="reduce-overhead"``). Writes results.json and results.md.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnzoo import build_attention
from attnzoo.benchmarks.measure import Result, chosen, describe_versions, keeper, markdown_table, not_measured, save
from attnzoo.registry import get, list_variants

MODES: dict[str, dict[str, Any] | None] = {"eager": None, "compiled": {}, "graphs": {"mode": "reduce-overhead"}}
PLAIN = "SDPA, RoPE"


@dataclass(frozen=True)
class GPTSizes:
    """The sizes of the GPT and of its batch; the defaults are GPT-2's smallest model with 2048 tokens.

    Args:
        batch: sequences a step.
        context: tokens of a sequence.
        hidden: channels of the residual stream.
        layers: number of blocks.
        heads: of each attention.
        vocabulary: number of tokens.
    """

    batch: int = 16
    context: int = 2048
    hidden: int = 768
    layers: int = 12
    heads: int = 12
    vocabulary: int = 32000


@dataclass(frozen=True)
class TimedGPT:
    """A GPT whose training step is measured.

    Args:
        name: shown name.
        build: a function from hidden size and number of heads to the attention, which maps ``[B, T, D]`` to the same.
        modes: names of `MODES`.
    """

    name: str
    build: Callable[[int, int], nn.Module]
    modes: tuple[str, ...] = field(default=tuple(MODES))


class PlainAttention(nn.Module):
    """Causal ``scaled_dot_product_attention`` with RoPE, as GPT scripts have it."""

    rates: Tensor

    def __init__(self, hidden: int, heads: int, base: float = 10000.0):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        channels = hidden // heads
        self.register_buffer("rates", base ** (-torch.arange(0, channels, 2) / channels), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """The output for x, both ``[B, T, D]``."""
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        angles = torch.outer(torch.arange(T, device=x.device), self.rates)
        cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)

        def turned(y: Tensor) -> Tensor:
            a, b = y.chunk(2, -1)
            return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

        o = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        return cast(Tensor, self.out(o.transpose(1, 2).reshape(B, T, D)))


class First(nn.Module):
    """The first output of a module that returns several."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        """That output."""
        output: Tensor = self.module(x)[0]
        return output


class Block(nn.Module):
    """A residual block: RMSNorm and attention, RMSNorm and an MLP of GELUs."""

    def __init__(self, attention: nn.Module, hidden: int):
        super().__init__()
        self.before, self.attention = nn.RMSNorm(hidden), attention
        self.between, self.up = nn.RMSNorm(hidden), nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The stream after the block, ``[B, T, D]``."""
        x = x + self.attention(self.before(x))
        return cast(Tensor, x + self.down(F.gelu(self.up(self.between(x)))))


class GPT(nn.Module):
    """A decoder whose loss is the mean over all tokens of ``[B, T + 1]``."""

    def __init__(self, build: Callable[[int, int], nn.Module], sizes: GPTSizes):
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.blocks = nn.ModuleList(Block(build(sizes.hidden, sizes.heads), sizes.hidden) for _ in range(sizes.layers))
        self.norm, self.head = nn.RMSNorm(sizes.hidden), nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss, a scalar."""
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens[:, 1:].flatten())


def contenders() -> list[TimedGPT]:
    """PyTorch's attention, each variant with and without pruning, and flash-linear-attention's FoX where it is."""
    found = [TimedGPT(PLAIN, PlainAttention)]
    for name in ("fox", "rope", "mamba2", "gated_deltanet", "path_fox", *list_variants()):
        options: list[dict[str, Any]] = [{}, {"acp": True}] if get(name).prunable else [{}]
        for chosen_options in options:
            shown = f"{name} + ACP" if chosen_options else name
            if shown not in [x.name for x in found]:
                found.append(TimedGPT(shown, _layer(name, chosen_options)))
    return [*found, TimedGPT("FLA's fox", _fla_fox, ("eager",))]


def _layer(name: str, options: dict[str, Any]) -> Callable[[int, int], nn.Module]:
    return lambda hidden, heads: build_attention(name, hidden_size=hidden, num_heads=heads, **options)


def _fla_fox(hidden: int, heads: int) -> nn.Module:
    from fla.layers.forgetting_attn import ForgettingAttention

    return First(ForgettingAttention(hidden_size=hidden, num_heads=heads, qk_norm=False))


def times(contender: TimedGPT, sizes: GPTSizes, mode: str, steps: int, device: str) -> Result:
    """The seconds until the first step has ended, the median milliseconds of ``steps`` more, peak GiB and the loss."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    on_gpu = device == "cuda"
    with torch.device(device):
        model = GPT(contender.build, sizes)
        tokens = torch.randint(sizes.vocabulary, (sizes.batch, sizes.context + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    options = MODES[mode]
    call = model if options is None else torch.compile(model, **options)

    def step() -> float:
        start = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            loss = call(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen.append(loss.detach())
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    seen: list[Tensor] = []
    first = step()
    for _ in range(3):  # CUDA graphs are recorded at the second and third call
        step()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    ms = 1e3 * statistics.median(step() for _ in range(steps))
    return {
        "name": contender.name,
        "mode": mode,
        "first_s": round(first, 1),
        "ms": round(ms, 2),
        "tokens_per_second": round(1e3 * sizes.batch * sizes.context / ms),
        "peak_GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2) if on_gpu else None,
        "loss": round(float(seen[-1]), 3),
    }


def measure(peers: Sequence[TimedGPT], result: Result, sizes: GPTSizes, steps: int, seconds: float, keep: Any) -> None:
    """Add a row for each contender and mode to ``result``, and a line of "missing" for each that failed."""
    deadline = time.time() + seconds
    for mode in (name for name in MODES if name != "graphs" or result["device"] == "cuda"):
        for contender in (peer for peer in peers if mode in peer.modes):
            if time.time() > deadline:
                result["missing"].append(f"{contender.name}, {mode}, and what comes after it: no time was left")
                return
            try:
                row = times(contender, sizes, mode, steps, result["device"])
            except Exception as error:
                result["missing"].append(f"{contender.name}, {mode}: {repr(error)[:200]}")
                continue
            result["rows"].append(row)
            print(json.dumps(row), flush=True)
            keep(result)
            if result["device"] == "cuda":
                torch.cuda.empty_cache()


def table(result: Result) -> str:
    """The result as Markdown: a row per contender, with its speed beside PyTorch's attention in the same mode."""
    m, sizes = result["machine"], GPTSizes(**result["sizes"])
    rows = {(row["name"], row["mode"]): row for row in result["rows"]}
    lines = [
        f"{m['gpu']}, torch {m['torch']}, Triton {m['triton']}, FLA {m['fla']}, {m['date']}; {result['device']}, "
        f"autocast to bfloat16; {sizes.layers} blocks of {sizes.hidden} channels and {sizes.heads} heads, "
        f"{sizes.batch} sequences of {sizes.context} tokens; median of {result['steps']} steps.",
        "",
    ]
    columns = ["attention"]
    for mode in MODES:
        columns += [f"{mode}: tokens/s", "of SDPA's", "first step s", "GiB"]
    cells = []
    for name in dict.fromkeys(name for name, _ in rows):
        line = [name]
        for mode in MODES:
            row, plain = rows.get((name, mode)), rows.get((PLAIN, mode))
            if row is None:
                line += ["-"] * 4
                continue
            ratio = f"{row['tokens_per_second'] / plain['tokens_per_second']:.2f}" if plain else "-"
            peak = "-" if row["peak_GiB"] is None else f"{row['peak_GiB']:.1f}"
            line += [f"{row['tokens_per_second']:,}", ratio, f"{row['first_s']:.1f}", peak]
        cells.append(line)
    return "\n".join([*lines, *markdown_table(columns, cells), "", *not_measured(result["missing"])]) + "\n"


def run(out: Path, sizes: GPTSizes, only: Sequence[str], steps: int, seconds: float, device: str) -> None:
    """Measure, print the table, and write results.json and results.md to ``out``.

    Raises:
        ValueError: a prefix that no contender has.
    """
    result: Result = {"machine": describe_versions(), "device": device, "sizes": vars(sizes), "steps": steps}
    result |= {"rows": [], "missing": []}
    measure(chosen(contenders(), only), result, sizes, steps, seconds, keeper(out, table))
    save(out, result, table(result))
    print(table(result))
