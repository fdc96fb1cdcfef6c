"""The command ``attnzoo explore``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnzoo.data.command import PATH, read_options

if TYPE_CHECKING:
    from attnzoo.experiments.explore.probe import StateProbe
    from attnzoo.registry.variant import Variant


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option(
    "--output", "-o", type=PATH, default="explore.html", show_default=True, help="The file to write."
)  # fmt: skip
@click.option("--examples", type=click.IntRange(min=1), default=5, show_default=True, help="Cases of each law.")
@click.option(
    "--probe", default="parity", show_default=True, metavar="TASK[:KEY=VALUE,...]",
    help="What a small model of each side is trained for, or none.",
)  # fmt: skip
@click.option("--steps", type=click.IntRange(min=2), default=400, show_default=True, help="Of that training.")
@click.option(
    "--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, help="Seed of all random inputs."
)
def explore(names: tuple[str, ...], output: Path, examples: int, probe: str, steps: int, seed: int) -> None:
    """Write a page about a pair: laws, pictures, reductions, speed.

    NAME is any variant, a FILE.py that registers a pair, FILE.py:NAME, or both sides of one pair. The page is one HTML
    file that loads nothing. The exit code is 1 if a law is broken, as the page says, too.
    """
    from rich.console import Console
    from rich.progress import track

    from attnzoo.data.own import check_page
    from attnzoo.experiments.explore.page import Explored, render, work_of
    from attnzoo.files import keep_hypothesis_out_of_here, write_whole
    from attnzoo.testing.laws import Trial

    keep_hypothesis_out_of_here()
    sides = _sides(names)
    check_page(output, "--output")
    said = ["attnzoo", "explore", *names]
    for name, value, usual in (("examples", examples, 5), ("probe", probe, "parity"), ("steps", steps, 400)):
        said += [f"--{name}", str(value)] if value != usual else []
    asked = Explored(sides, examples, _probe(probe, steps, seed), seed, shlex.join(said))
    found: dict[str, Any] = {}
    work = work_of(asked)
    for name in track(work, "exploring", console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()):
        found[name] = work[name]()
    output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(output, render(asked, found))
    broken = [trial for trial in found.values() if isinstance(trial, Trial) and not trial.ok]
    for trial in broken:
        click.echo(f"FAILED: {trial.said}\n")
    click.echo(f"page: {output}")
    if broken:
        sys.exit(1)


def _sides(words: tuple[str, ...]) -> list[Variant]:
    """The variants of the one pair that the words name, the linear and the softmax side first."""
    from attnzoo.registry import get, names_of

    named = [get(name) for word in words for name in names_of(word)]
    pair = named[0].pair
    for variant in named:
        if variant.pair != pair:
            ours = f"{pair.linear} and {pair.softmax}"
            raise ValueError(f"NAME: expected variants of one pair, such as {ours}, got {variant.name!r} too")
    return [get(name) for name in dict.fromkeys((pair.linear, pair.softmax, *(variant.name for variant in named)))]


def _probe(said: str, steps: int, seed: int) -> StateProbe | None:
    from attnzoo.data.tasks import Examples, build_task
    from attnzoo.data.tasks.task import RoomError
    from attnzoo.experiments.explore.probe import LENGTH, StateProbe

    if said == "none":
        return None
    name, _, options = said.partition(":")
    probe = StateProbe(said, build_task(name, read_options(options.split(",") if options else [])), steps, seed)
    try:
        Examples(probe.task, LENGTH)[0]
    except RoomError as error:
        raise ValueError(f"--probe: expected a task for short rows, as parity or word_problem: {error}") from error
    return probe
