"""The command ``attnzoo bench`` with the options of each benchmark, which is described in the module of its name."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from attnzoo.benchmarks.modes import MODES
from attnzoo.data.command import Choice, overrides_argument
from attnzoo.experiments.builtin import built_in, find_config

Option = Callable[[Callable[..., Any]], Callable[..., Any]]


class Shape(click.ParamType[tuple[int, ...]]):
    """The type of a shape option: four whole numbers separated by commas, such as 2,24,16384,64."""

    name = "B,H,T,K"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        parts = str(value).split(",")
        if len(parts) != 4 or not all(part.isdecimal() and int(part) for part in parts):
            self.fail(f"expected four whole numbers above 0, {self.name}, got {value!r}", param, ctx)
        return tuple(int(part) for part in parts)


def out(folder: str) -> Option:
    return click.option(
        "--out", type=click.Path(path_type=Path), default=f"runs/bench/{folder}", show_default=True, callback=_writable,
        help="Folder to write results.json and results.md to.",
    )  # fmt: skip


def _writable(context: click.Context, option: click.Parameter, folder: Path) -> Path:
    """The folder of an option, after a check that it can be written to."""
    from attnzoo.data.own import check_replaceable
    from attnzoo.files import check_folder

    check_folder(folder, "--out")
    for name in ("results.json", "results.md"):
        check_replaceable(folder / name, "--out")
    return folder


shapes = click.option(
    "--shapes", type=Shape(), multiple=True, help="Time this instead of the usual shapes; may be given several times."
)
kv_heads = click.option(
    "--kv-heads",
    type=click.IntRange(min=1),
    help="Heads of keys and values that the query heads of a shape share; by default each has its own.",
)
only = click.option(
    "--only", multiple=True, metavar="NAME",
    help="Only the contender of this name, with its row + ACP; or, where none is called so, all whose names start so. "
    "May be given several times.",
)  # fmt: skip
rep = click.option(
    "--rep", type=click.IntRange(min=1), default=150, show_default=True, help="Milliseconds of timing per figure."
)
official = click.option(
    "--official",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File of the official FoX kernel, where forgetting_transformer is not installed.",
)


def seconds(default: int, each: str = "") -> Option:
    """The option ``--seconds``, with a sentence on what a row of the table takes."""
    return click.option(
        "--seconds", type=click.FloatRange(min=0, min_open=True), default=default, show_default=True,
        help=f"Start no further measurement of the table after this long. {each}".strip(),
    )  # fmt: skip


COMPILED = "A kernel's first row takes up to half a minute, in which it is compiled and checked, a later one seconds."


@click.group()
def bench() -> None:
    """Measure this machine: kernels, layers, training, generation.

    Each stands beside its peers. A peer that is not installed, or does not run here, is named in a line with the
    reason.
    """


@bench.command()
@out("fox")
@shapes
@kv_heads
@only
@rep
@seconds(500, COMPILED)
@official
@click.option("--plot", is_flag=True, help="Also draw time over context lengths of 1k to 128k, as plot.svg.")
def fox(**options: Any) -> None:
    """FoX's kernels on a GPU, forward and backward.

    Beside SDPA, flash-linear-attention, FlexAttention, flash-sparse-attn and the official kernel. Each contender is
    checked against float64 before it is timed.
    """
    _run_on_gpu("fox", options)


@bench.command()
@out("path")
@shapes
@kv_heads
@only
@rep
@seconds(330, COMPILED)
@click.option("--decode/--no-decode", default=True, show_default=True, help="Time one token after a cache, too.")
def path(**options: Any) -> None:
    """PaTH's kernels on a GPU, forward and backward.

    PaTH and PaTH-FoX beside FoX and flash-linear-attention. Each contender is checked against float64 before it
    is timed.
    """
    _run_on_gpu("path", options)


@bench.command()
@out("wall")
@shapes
@only
@rep
@seconds(400, COMPILED)
def wall(**options: Any) -> None:
    """Wall's kernels on a GPU, forward and backward.

    Wall beside FoX without a gate and flash-linear-attention. Each contender is checked against float64 before it
    is timed.
    """
    _run_on_gpu("wall", options)


@bench.command()
@out("layers")
@shapes
@only
@rep
@seconds(500, COMPILED)
def layers(**options: Any) -> None:
    """Whole layers on a GPU, forward and backward.

    Every recurrence beside its dual. Each layer is checked against itself in float64 before it is timed, and the form
    that serves it is named.
    """
    _run_on_gpu("layers", options)


@bench.command()
@out("decode")
@shapes
@official
def decode(**options: Any) -> None:
    """One token of FoX after a cache, on a GPU.

    Beside SDPA, flash-linear-attention and the official kernel, each checked against float64 before it is timed.
    """
    _run_on_gpu("decode", options)


@bench.command()
@out("context")
@shapes
@only
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Calls per figure.")
@click.option(
    "--ranks",
    type=click.IntRange(min=2),
    multiple=True,
    help="On one GPU: what each of so many ranks computes, without exchanges; may be given several times.",
)
def context(ranks: tuple[int, ...], **options: Any) -> None:
    """FoX's attention over one sequence on several GPUs.

    Forward and backward beside one GPU, and the bytes that cross. Start it with torchrun, a process for each GPU.
    """
    if ranks:
        options["ranks"] = ranks
    _run_on_gpu("shares" if ranks else "context", options)


@bench.command()
@out("generate")
@click.option("--tokens", type=click.IntRange(min=1), multiple=True, help="Cached, one or more.  [default: 16384]")
@click.option("--batch", type=click.IntRange(min=1), multiple=True, help="Rows, one or more.  [default: 4]")
@only
@seconds(500)
def generate(**options: Any) -> None:
    """A step of generation with whole models on a GPU.

    FoX with and without eviction, RoPE, PaTH-FoX, Mamba-2, Gated DeltaNet, and the Llama of transformers.
    """
    _run_on_gpu("generate", options)


@bench.command()
@click.option("--batch", type=click.IntRange(min=1), default=16, show_default=True, help="Sequences a step.")
@click.option("--context", type=click.IntRange(min=1), default=2048, show_default=True, help="Tokens of a sequence.")
@click.option("--hidden", type=click.IntRange(min=1), default=768, show_default=True, help="Channels.")
@click.option("--layers", type=click.IntRange(min=1), default=12, show_default=True, help="Blocks.")
@click.option("--heads", type=click.IntRange(min=1), default=12, show_default=True, help="Heads of each attention.")
@click.option("--vocabulary", type=click.IntRange(min=2), default=32000, show_default=True, help="Tokens.")
@out("gpt")
@only
@click.option("--steps", type=click.IntRange(min=1), default=12, show_default=True, help="Timed steps.")
@seconds(500, "A row takes 1 to 30 seconds: its first step compiles.")
@click.option(
    "--mode",
    multiple=True,
    type=Choice(list(MODES)),
    help="Only so: eager, compiled, or compiled with CUDA graphs; may be given several times.",
)
@click.option("--resume", is_flag=True, help="Keep the rows that --out has, and measure the others.")
@click.option("--device", type=Choice(["cuda", "cpu"]), default="cuda", show_default=True, help="Where to train.")
def gpt(
    batch: int, context: int, hidden: int, layers: int, heads: int, vocabulary: int, device: str, **options: Any
) -> None:
    """Training steps of a plain GPT with each variant in it.

    Beside SDPA with RoPE and flash-linear-attention's FoX layer: eager, compiled, and compiled with CUDA graphs. Every
    visible GPU takes its share of them.
    """
    if device == "cuda":
        _need_gpu("gpt", "; --device cpu measures without one")
    elif "graphs" in options["mode"]:
        raise click.BadParameter("expected eager or compiled with --device cpu, got 'graphs'", param_hint="--mode")
    from attnzoo.benchmarks.gpt import GPTSizes, run

    run(sizes=GPTSizes(batch, context, hidden, layers, heads, vocabulary), device=device, **options)


@bench.command()
@overrides_argument
@click.option(
    "--size",
    multiple=True,
    default=["gpu", "gpu-10m", "gpu-25m"],
    show_default=True,
    help="Of `acp_throughput`; may be given several times.",
)
@out("acp")
@click.option("--device", type=Choice(["auto", "cpu"]), default="auto", show_default=True, help="Where to train.")
@click.option("--learn", type=click.IntRange(min=2), default=120, show_default=True, help="Steps learned first.")
@click.option("--steps", type=click.IntRange(min=1), default=20, show_default=True, help="Steps per measurement.")
@click.option("--repeats", type=click.IntRange(min=1), default=4, show_default=True, help="How often to measure.")
@seconds(500)
def acp(device: str, **options: Any) -> None:
    """Training steps of FoX (Pro) with and without pruning.

    Sizes, contexts and text are those of the experiment `acp_throughput`; KEY=VALUE overrides a setting of all runs.
    Each model learns in the shortest context first, and all contexts are timed with its gates, as is the share of the
    search for what to prune in the attention.
    """
    if device != "cpu":
        _need_gpu("acp", "; --device cpu measures without one")
    from attnzoo.benchmarks.acp import run

    run(device=device, **options)


@bench.command(epilog=f"Built in: {', '.join(built_in('train'))}.")
@click.argument("config")
@overrides_argument
@out("train")
@click.option("--device", type=Choice(["auto", "cpu"]), help="Run here instead of where the configuration says.")
@click.option(
    "--steps", type=click.IntRange(min=1), default=10, show_default=True, help="Steps per measurement, and to warm up."
)
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="How often to measure.")
@click.option("--trained-gates", is_flag=True, help="Forget gates as training leaves them: 3 of 4 heads local.")
def train(config: str, overrides: tuple[str, ...], device: str | None, **options: Any) -> None:
    """Speed and memory of training steps of CONFIG's model.

    CONFIG and KEY=VALUE are those of `attnzoo train`; nothing is kept of what is trained.
    """
    found = find_config(config, "train")
    from attnzoo.training.recipe import load_config

    loaded = load_config(found, [*overrides, *([f"device={device}"] if device else [])])
    if loaded.device != "cpu":
        _need_gpu("train", "; --device cpu measures without one", triton=False)
    from attnzoo.benchmarks.train import run

    run(loaded, **options)


@bench.command()
@click.option("--length", type=click.IntRange(min=1), default=4096, show_default=True, help="Tokens T.")
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="The fastest run counts.")
def cpu(**options: Any) -> None:
    """The reference forms on a CPU.

    Chunk against recurrent for every linear variant, FoX against causal SDPA, and what a layer's forward costs the host
    beside LlamaAttention's, as ratios.
    """
    from attnzoo.benchmarks.cpu import run

    run(**options)


def _run_on_gpu(command: str, options: dict[str, Any]) -> None:
    """Run the benchmark of a command's name."""
    _need_gpu(command)
    importlib.import_module(f"attnzoo.benchmarks.{command}").run(**options)


def _need_gpu(command: str, instead: str = "; `attnzoo bench cpu` needs none", triton: bool = True) -> None:
    import torch

    if not torch.cuda.is_available():
        raise click.ClickException(f"bench {command}: expected a CUDA GPU, found none{instead}")
    if triton and importlib.util.find_spec("triton") is None:
        raise click.ClickException(f"bench {command}: expected Triton, which is not installed")
