"""``attnzoo experiment``: claims about the variants, each one command away."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from attnzoo.data.command import PATH, Choice, overrides_argument
from attnzoo.errors import UnavailableError
from attnzoo.terminal import fitted

CLAIM = click.option(
    "--claim", "claims", multiple=True, metavar="ORDER",
    help="Whether these models alone are in this order: 'fox < rope', or 'L(i) @ 4: fox < rope' in another number. A "
    "model is an arm, or a variant with options, as 'fox block=llama' or FILE.py:NAME.",
)  # fmt: skip
SEEDS = click.option("--seeds", type=click.IntRange(min=2), help="Runs per model.  [default: the experiment's own]")


@click.group()
def experiment() -> None:
    """Test what papers claim of the variants, with small models."""


@experiment.command("list")
def list_experiments() -> None:
    """Every experiment, and when each of its sizes was last measured."""
    from attnzoo.experiments.experiment import find, names

    for name in names():
        found = find(name)
        when = ", ".join(f"{each.size} on {each.date}" for each in found.measured)
        line = fitted(f"{name}: {found.title} ({when or 'not yet run'})")
        click.echo(click.style(name, bold=True) + line.removeprefix(name))


@experiment.command()
@click.argument("name")
@CLAIM
@SEEDS
def show(name: str, claims: tuple[str, ...], seeds: int | None) -> None:
    """What an experiment compares, costs and expects.

    NAME is one that `attnzoo experiment list` names, or a Python file that ends in EXPERIMENT.
    """
    from attnzoo.experiments.asked import asked
    from attnzoo.experiments.experiment import cost_of, find, layers_of, meanings_of, power_of

    found = asked(find(name), claims)
    seeds = seeds or found.seeds
    if claims:
        from attnzoo.experiments.plan import Schedule
        from attnzoo.experiments.run import check_arms

        check_arms(Schedule(name, next(iter(found.sizes)), Path("runs"), seeds, claims=claims), found)
    click.echo(click.style(found.title, bold=True))
    click.echo(fitted(found.question, 100))
    for arm in found.arms:
        click.echo(fitted(f"  {arm.name}: {layers_of(found, arm)}"))
    click.echo(f"measured, with {seeds} seeds:")
    for meaning, probes in meanings_of(found).items():
        click.echo(fitted(f"- {probes}: {meaning}", 100))
    for size in found.sizes:
        click.echo(fitted(f"size {size}: {cost_of(found, size)}", 100))
    click.echo("expected:")
    for each in found.expectations:
        only = f" (size {' or '.join(each.sizes)})" if each.sizes else ""
        click.echo(fitted(f"- {each.text}{only} [{each.source}]", 100))
    click.echo(f"what {seeds} seeds see, by simulation:")
    for line in power_of(found, seeds):
        click.echo(fitted(f"- {line}", 100))
    for result in found.measured:
        tried = f"; {result.tried}" if result.tried else ""
        line = f"measured {result.date}, size {result.size}, {result.machine}: docs/results/{result.result}{tried}"
        click.echo(fitted(line, 100))
    if not found.measured:
        click.echo("not yet run")


@experiment.command()
@click.argument("name")
@overrides_argument
@click.option("--size", help="cpu: on two cores; gpu: on an H200; more: see `show`.  [default: cpu, or a file's only]")
@SEEDS
@click.option("--out", type=PATH, help="Folder to write to.  [default: runs/experiments/NAME-SIZE]")
@click.option("--jobs", type=click.IntRange(min=1), help="Models at a time.  [default: cores; 1 on a GPU unless small]")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), help="Stop then, and write what is finished.")
@click.option("--arm", "only", multiple=True, help="Only this model; may be given several times.")
@click.option("--device", type=Choice(["auto", "cpu"]), help="[default: cpu for sizes cpu..., else auto]")
@click.option(
    "--rates", type=PATH, help="A result.json, of another size, whose learning rates are taken, model by model."
)
@click.option(
    "--resume-from",
    type=PATH,
    multiple=True,
    help="A result.json of this command, made elsewhere perhaps, whose runs count as done; may be given several times.",
)
@CLAIM
def run(
    name: str, overrides: tuple[str, ...], size: str | None, seeds: int | None, out: Path | None, jobs: int | None,
    minutes: float | None, only: tuple[str, ...], device: str | None, rates: Path | None,
    resume_from: tuple[Path, ...], claims: tuple[str, ...],
) -> None:  # fmt: skip
    """Train, measure, judge every expectation, and write a page.

    NAME is one that `attnzoo experiment list` names, or a Python file that ends in EXPERIMENT. KEY=VALUE overrides a
    setting of all runs, as in steps=100. Nothing is done twice: what was stopped goes on where it was.
    """
    import torch
    from rich.console import Console

    from attnzoo.experiments.experiment import find, find_size
    from attnzoo.experiments.kept import rates_of
    from attnzoo.experiments.outcome import load_outcome
    from attnzoo.experiments.plan import Schedule, device_of
    from attnzoo.experiments.run import run_experiment

    found = find(name)
    size = size or (next(iter(found.sizes)) if len(found.sizes) == 1 else "cpu")
    find_size(found, size)
    if size.startswith("gpu") and device != "cpu" and not torch.cuda.is_available():
        raise UnavailableError(f"--size {size}: expected a CUDA GPU, found none; `--device cpu` runs it all the same")
    folder = out or Path("runs/experiments") / f"{Path(name).stem}-{size}{'-asked' if claims else ''}"
    asked = ["--size", size] if size != "cpu" else []
    asked += ["--seeds", str(seeds)] if seeds else []
    asked += ["--device", device] if device else []
    asked += ["--rates", str(rates)] if rates else []
    asked += [word for path in resume_from for word in ("--resume-from", str(path))]
    asked += [word for claim in claims for word in ("--claim", claim)]
    files = click.get_current_context().find_root().params.get("files", ())
    own = [word for file in files for word in ("--with", file)]
    command = shlex.join(["attnzoo", *own, "experiment", "run", name, *overrides, *asked])
    records = [load_outcome(path, "--resume-from") for path in resume_from]
    chosen = rates_of([load_outcome(rates, "--rates")], searched=False) if rates else rates_of(records)
    plan = Schedule(name, size, folder, seeds or found.seeds, overrides, device or device_of(size), chosen, claims)
    run_experiment(plan, Console(highlight=False), command, jobs, minutes, only, records)


@experiment.command()
@click.argument("results", nargs=-1, required=True, type=PATH)
@click.option("--out", type=PATH, help="Folder for curves as SVG, one for each side.")
def sizes(results: tuple[Path, ...], out: Path | None) -> None:
    """What a part gains by the size of the model.

    RESULTS are the result.json of one experiment at two sizes or more. A gain is one that the experiment correlates, as
    `pairs` does, or else the difference of two models that it claims. p tests whether a gain
    is the same at its largest size as at its smallest.
    """
    from rich.console import Console

    from attnzoo.experiments.experiment import find
    from attnzoo.experiments.figures import to_svg
    from attnzoo.experiments.outcome import load_outcome
    from attnzoo.experiments.sizes import curves_of, gains_by_size, left_out, sides_of, table_of
    from attnzoo.files import write_whole
    from attnzoo.terminal import print_table

    outcomes = [load_outcome(path) for path in results]
    found = find(outcomes[0].experiment)
    rows = gains_by_size(found, outcomes)
    print_table(table_of(rows), Console(highlight=False))
    if left := left_out(found, rows):
        click.echo(f"left out, as fewer than two results have runs of them: {'; '.join(left)}")
    for side in sides_of(found, rows) if out else ():
        path = Path(out or "") / f"{outcomes[0].experiment}-{side}.svg"
        write_whole(path, to_svg(curves_of(found, rows, side), f"sizes-{side}", f"Gains by size, {side} side"))
        click.echo(f"curves: {path}")
