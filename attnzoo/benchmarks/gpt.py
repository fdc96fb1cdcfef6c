"""Training speed of a plain GPT with a layer of the zoo in place of its attention, as in a script of one's own.

    attnzoo bench gpt [--only NAME]... [--mode eager]... [--batch 16] [--context 2048] [--resume] [--device cpu]

Each layer is that of ``build_attention(name)``, in the same residual blocks, beside PyTorch's attention with RoPE and
flash-linear-attention's FoX layer. A step is forward, backward and a fused AdamW under autocast to bfloat16. It is
timed eager, compiled, and compiled with CUDA graphs (``mode="reduce-overhead"``). Every visible GPU has a process of
its own, and kernels are compiled anew, so that a first step takes what it takes on a new machine. Writes results.json
and results.md as rows come.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnzoo import build_attention
from attnzoo.benchmarks.measure import (
    Result,
    chosen,
    describe_versions,
    finish,
    headline,
    keeper,
    markdown_table,
    not_measured,
)
from attnzoo.benchmarks.modes import MODES
from attnzoo.errors import reason
from attnzoo.experiments.processes import run_tasks
from attnzoo.forms.backends import fla_kernels
from attnzoo.registry import get, list_variants

PLAIN = "SDPA, RoPE"
FIRST = ("fox", "rope", "mamba2", "gated_deltanet", "path_fox")  # variants that are measured in all modes before others


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
        build: a function from sizes to the attention, which maps ``[B, T, D]`` to the same.
        modes: names of `MODES`.
        switches: environment variables that are set while it is measured.
    """

    name: str
    build: Callable[[GPTSizes], nn.Module]
    modes: tuple[str, ...] = tuple(MODES)
    switches: Mapping[str, str] = field(default_factory=dict)


class PlainAttention(nn.Module):
    """Causal ``scaled_dot_product_attention`` with RoPE, as GPT scripts have it."""

    cos: Tensor
    sin: Tensor

    def __init__(self, sizes: GPTSizes, base: float = 10000.0):
        super().__init__()
        self.heads, hidden = sizes.heads, sizes.hidden
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        channels = hidden // sizes.heads
        rates = base ** (-torch.arange(0, channels, 2) / channels)
        angles = torch.outer(torch.arange(sizes.context), rates)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """The output for x, both ``[B, T, D]``."""
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        cos, sin = self.cos.to(q.dtype), self.sin.to(q.dtype)

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
        """The module's first output for x."""
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

    def __init__(self, build: Callable[[GPTSizes], nn.Module], sizes: GPTSizes):
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.blocks = nn.ModuleList(Block(build(sizes), sizes.hidden) for _ in range(sizes.layers))
        self.norm, self.head = nn.RMSNorm(sizes.hidden), nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss, a scalar."""
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens[:, 1:].flatten())


def contenders() -> list[TimedGPT]:
    """PyTorch's attention, each variant with and without pruning, and flash-linear-attention's FoX by its backends."""
    found = [TimedGPT(PLAIN, PlainAttention)]
    for name in dict.fromkeys((*FIRST, *list_variants())):
        found.append(TimedGPT(name, partial(_layer, name)))
        if get(name).prunable:
            found.append(TimedGPT(f"{name} + ACP", partial(_layer, name, acp=True)))
    tilelang = fla_kernels.SWITCHES["tilelang"]
    found.append(TimedGPT("FLA's fox, Triton", _fla_fox, ("eager",), {tilelang: "0"}))
    return [*found, TimedGPT("FLA's fox, TileLang", partial(_fla_fox, tilelang=True), ("eager",), {tilelang: "1"})]


def _layer(name: str, sizes: GPTSizes, **options: Any) -> nn.Module:
    return build_attention(name, hidden_size=sizes.hidden, num_heads=sizes.heads, **options)


def _fla_fox(sizes: GPTSizes, tilelang: bool = False) -> nn.Module:
    from fla.layers.forgetting_attn import ForgettingAttention

    if tilelang:
        fla_kernels.require_tilelang()
    return First(ForgettingAttention(hidden_size=sizes.hidden, num_heads=sizes.heads, qk_norm=False))


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

    def step() -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(device, torch.bfloat16):
            loss: Tensor = call(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    fla_kernels.taken()
    start = time.perf_counter()
    float(step())
    first = time.perf_counter() - start
    for _ in range(3):  # CUDA graphs are recorded at the second and third call
        float(step())
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    marks = [_mark(on_gpu)]
    for _ in range(steps):
        loss = step()
        marks.append(_mark(on_gpu))
    last = float(loss)
    ms = statistics.median(_milliseconds(a, b) for a, b in itertools.pairwise(marks))
    return {
        "name": contender.name,
        "mode": mode,
        "first_s": round(first, 1),
        "ms": round(ms, 2),
        "tokens_per_second": round(1e3 * sizes.batch * sizes.context / ms),
        "peak_GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2) if on_gpu else None,
        "loss": round(last, 3),
        **({"fla": others} if (others := fla_kernels.taken()) else {}),
    }


def _mark(on_gpu: bool) -> Any:
    """The time at which all work so far is done: an event of a GPU, which the host does not wait for."""
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _milliseconds(start: Any, end: Any) -> float:
    return 1e3 * (end - start) if isinstance(start, float) else float(start.elapsed_time(end))


def measure_one(name: str, mode: str, sizes: GPTSizes, steps: int, device: str, into: Path) -> None:
    """Write the row of a contender in a mode to the file ``into``; on a GPU, in a process of its own."""
    contender = next(x for x in contenders() if x.name == name)
    if device == "cuda":  # nothing compiled before counts
        for variable, folder in (("TRITON_CACHE_DIR", "triton"), ("TORCHINDUCTOR_CACHE_DIR", "inductor")):
            os.environ[variable] = str(into.parent / "".join(filter(str.isalnum, name)) / folder)
    os.environ.update(contender.switches)
    try:
        into.write_text(json.dumps(times(contender, sizes, mode, steps, device)))
    except Exception:
        if device == "cuda":
            _leave_broken(f"{name}, {mode}")
        raise
    finally:
        for switch in contender.switches:
            os.environ.pop(switch, None)
        if device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


def _leave_broken(label: str) -> None:
    """End this process where the GPU takes nothing more from it, after an illegal address."""
    try:
        torch.cuda.synchronize()
    except Exception:
        print(f"{label}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        os._exit(1)


def ordered(peers: Sequence[TimedGPT], modes: Sequence[str]) -> list[tuple[TimedGPT, str]]:
    """Contenders and modes, mode by mode: PyTorch's, the first variants and flash-linear-attention's, then the others.

    So what a compiled row needs of a variant's own kernels its eager row has compiled.
    """
    early = [x for x in peers if x.name.removesuffix(" + ACP") in (PLAIN, *FIRST) or x.switches]
    groups = early, [x for x in peers if x not in early]
    return [(x, mode) for group in groups for mode in modes for x in group if mode in x.modes]


def measure(peers: Sequence[TimedGPT], result: Result, seconds: float, keep: Callable[[Result], None]) -> None:
    """Add the rows that ``result`` lacks, as they come, and a line of "missing" for each that failed or had no time."""
    device, sizes, missing = result["device"], GPTSizes(**result["sizes"]), result["missing"]
    done = {(row["name"], row["mode"]) for row in result["rows"]}
    modes = [name for name in MODES if name != "graphs" or device == "cuda"]
    with tempfile.TemporaryDirectory() as folder:
        files = {
            (x.name, mode): Path(folder) / f"{number}.json" for number, (x, mode) in enumerate(ordered(peers, modes))
        }
        left = {f"{name}, {mode}": (name, mode) for name, mode in files if (name, mode) not in done}
        tasks = {
            label: partial(measure_one, *which, sizes, result["steps"], device, files[which])
            for label, which in left.items()
        }

        def failed(message: str) -> None:
            label = next(x for x in sorted(left, key=len, reverse=True) if message.startswith(f"{x}: "))
            del left[label]
            missing.append(" ".join(message.split())[:300])
            print(missing[-1], flush=True)

        gpus = torch.cuda.device_count() if device == "cuda" else 0
        for label in _ran(tasks, time.monotonic() + seconds, failed, gpus):
            row = json.loads(files[left.pop(label)].read_text())
            result["rows"].append(row)
            print(json.dumps(row), flush=True)
            keep(result)
    for mode in modes:
        late = [name for name, of in left.values() if of == mode]
        others = f" and {len(late) - 8} others" if len(late) > 8 else ""
        missing += [f"{mode}, {', '.join(late[:8])}{others}: no time was left"] if late else []


def _ran(
    tasks: Mapping[str, Callable[[], None]], until: float, failed: Callable[[str], None], gpus: int
) -> Iterator[str]:
    """The labels of the tasks as they are done, by a process for each GPU, or by this one without."""
    if gpus:
        yield from run_tasks(tasks, gpus, until, gpus=gpus, failed=failed)
        return
    for label, task in tasks.items():
        if time.monotonic() > until:
            return
        try:
            task()
        except Exception as error:
            failed(f"{label}: {reason(error)}")
        else:
            yield label


def table(result: Result) -> str:
    """The result as Markdown: a row per contender, with its speed beside PyTorch's attention in the same mode."""
    sizes = GPTSizes(**result["sizes"])
    rows = {(row["name"], row["mode"]): row for row in result["rows"]}
    how = (
        f"{result['device']}, autocast to bfloat16; {sizes.layers} blocks of {sizes.hidden} channels and {sizes.heads} "
        f"heads, {sizes.batch} sequences of {sizes.context} tokens; median of {result['steps']} steps."
    )
    columns, modes = ["attention"], [name for name in MODES if name in {mode for _, mode in rows}]
    for mode in modes:
        columns += [f"{mode}: tokens/s", "of SDPA's", "first step s", "GiB"]
    cells = []
    for name in dict.fromkeys(name for name, _ in rows):
        others = {row["fla"]: 0 for (one, _), row in rows.items() if one == name and "fla" in row}
        line = [f"{name} ({', '.join(others)})" if others else name]
        for mode in modes:
            row, plain = rows.get((name, mode)), rows.get((PLAIN, mode))
            if row is None:
                line += ["-"] * 4
                continue
            ratio = f"{row['tokens_per_second'] / plain['tokens_per_second']:.2f}" if plain else "-"
            peak = "-" if row["peak_GiB"] is None else f"{row['peak_GiB']:.1f}"
            line += [f"{row['tokens_per_second']:,}", ratio, f"{row['first_s']:.1f}", peak]
        cells.append(line)
    lines = [headline(result, how), "", *markdown_table(columns, cells), "", *not_measured(result["missing"])]
    return "\n".join(lines) + "\n"


def begun(out: Path, result: Result) -> list[Result]:
    """The rows of a measurement in ``out`` that is to go on.

    Raises:
        ValueError: it was another one, or there is none.
    """
    file = out / "results.json"
    if not file.is_file():
        raise ValueError(f"--resume: expected {str(file)!r} of a measurement that had begun, found none")
    before = json.loads(file.read_text())
    dated = {"machine": {**before["machine"], "date": result["machine"]["date"]}}
    for name in ("machine", "device", "sizes", "steps"):
        if (found := (before | dated)[name]) != result[name]:
            raise ValueError(f"--resume: expected the {name} {result[name]}, as now, got {found} in {str(file)!r}")
    return cast("list[Result]", before["rows"])


def run(
    out: Path, sizes: GPTSizes, only: Sequence[str], steps: int, seconds: float, device: str, resume: bool = False,
    mode: Sequence[str] = (),
) -> None:  # fmt: skip
    """Measure, print the table, and write results.json and results.md to ``out``; ``mode``: of `MODES`, empty for all.

    Raises:
        ValueError: a name that no contender has, or nothing to ``resume``.
    """
    peers = [replace(x, modes=tuple(m for m in x.modes if m in (mode or MODES))) for x in chosen(contenders(), only)]
    result: Result = {"machine": describe_versions(), "device": device, "sizes": vars(sizes), "steps": steps}
    result |= {"rows": begun(out, result) if resume else [], "missing": []}
    measure(peers, result, seconds, keeper(out, table))
    finish(out, result, table)
