"""The command ``attnzoo verify``."""

from __future__ import annotations

import os
import sys

import click

from attnzoo.data.command import Choice
from attnzoo.files import keep_hypothesis_out_of_here
from attnzoo.terminal import console, fitted, new_table, print_table


def _shape(context: click.Context, parameter: click.Parameter, said: str | None) -> tuple[int, ...] | None:
    if said is None:
        return None
    sizes = said.split(",")
    if len(sizes) != 4 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise click.BadParameter(f"expected B,H,T,K, four whole numbers such as 1,4,128,64, got {said!r}")
    B, H, T, K = map(int, sizes)
    return B, T, H, K


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--examples", type=click.IntRange(min=1), default=10, show_default=True, help="Cases of each law.")
@click.option("--shape", callback=_shape, metavar="B,H,T,K", help="Sizes of all inputs.  [default: drawn]")
@click.option(
    "--dtype", type=Choice(["float64", "float32", "bfloat16", "float16"]), default="float64", show_default=True,
    help="float64: the laws; another: every form in it, against its precision.",
)  # fmt: skip
@click.option("--device", type=Choice(["auto", "cpu", "cuda"]), default="auto", help="Where kernels run.")
@click.option("--interpret", is_flag=True, help="Triton's kernels on a CPU, in Triton's interpreter.")
@click.option(
    "--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, help="Seed of the random inputs."
)
def verify(
    names: tuple[str, ...], examples: int, shape: tuple[int, int, int, int] | None, dtype: str, device: str,
    interpret: bool, seed: int,
) -> None:  # fmt: skip
    """Check every law of every form, and kernels on a GPU.

    NAME is any variant, a FILE.py that registers some, or FILE.py:NAME; none given means all variants. Hypothesis draws
    the inputs, from --seed, in every regime of gates, and makes small what breaks a law. The exit code is 1 if a law or
    a kernel fails.
    """
    if interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    keep_hypothesis_out_of_here()
    import torch
    from rich.console import Console
    from rich.progress import track

    from attnzoo.registry import names_of
    from attnzoo.testing.laws import Trial
    from attnzoo.trained.model import device_named
    from attnzoo.verify import Where, checks

    on = "cpu" if interpret else device_named(device)
    where = Where(on, getattr(torch, dtype), interpret, shape, seed, examples)
    todo = checks([name for word in names for name in names_of(word)], where)
    errors = "largest error of each form"
    table = new_table("variant", "law", errors, "allowed", "cases", "", numbers=["cases"], prose=[errors])
    failed: list[Trial] = []
    done: list[Trial] = []
    previous = ""
    for check in track(todo, "checking", console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()):
        trial = check()
        name, previous = ("" if trial.variant == previous else trial.variant), trial.variant
        if trial.refused:
            table.add_row(name, trial.law, ": ".join([*trial.worst, f"not run, {trial.refused}"]), style="dim")
            continue
        (done if trial.ok else failed).append(trial)
        worst = ", ".join(f"{form} {error:.1e}" for form, error in trial.worst.items())
        cells = (worst, f"{trial.budget:.0e}", str(trial.examples or ""), "ok" if trial.ok else "FAILED")
        table.add_row(name, trial.law, *cells, style=None if trial.ok else "bold red")
    print_table(table, console())
    for trial in failed:
        click.echo(f"FAILED: {trial.said}\n")
    counts = f"{len(done)} ok, {len(failed)} failed, {len(todo) - len(done) - len(failed)} not run"
    click.echo(fitted(f"relative errors against the float64 oracle, seed {seed}: {counts}"))
    if failed:
        sys.exit(1)
