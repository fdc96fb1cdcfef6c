"""The command ``attnzoo evaluate``: named evaluations of a trained or a fresh model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from attnzoo.data.command import PATH, read_options
from attnzoo.trained.commands import Lists, device_option, dtype_option, files_argument, launched, processes_option


@click.command(cls=Lists)
@click.argument("what", metavar="RUN_OR_MODEL", type=PATH)
@files_argument
@click.option(
    "--on", multiple=True, metavar="NAME[:KEY=VALUE,...]",
    help="An evaluation or a task, with options; may be given several times.  [default: the run's own task]",
)  # fmt: skip
@click.option(
    "--length", multiple=True, type=click.IntRange(min=1),
    help="Tokens per row; may be given several times.  [default: as in training, or what the evaluation says]",
)  # fmt: skip
@click.option("--rows", type=click.IntRange(min=1), help="Rows of a task, per length.  [default: 256; haystack: 32]")
@click.option("--seed", type=click.IntRange(min=0), help="Seed of the rows.  [default: 0]")
@click.option("--text", type=PATH, help="A text file, a folder of them, or stdlib.  [default: what the run held out]")
@device_option
@dtype_option
@click.option("--out", type=PATH, help="Where results and pictures go.  [default: evaluations in the run's folder]")
@processes_option
@click.option("--json", "as_lines", is_flag=True, help="A line of JSON per result.")
@click.option("--list", "list_them", is_flag=True, is_eager=True, expose_value=False, callback=lambda *x: _list(*x),
              help="Every evaluation with its options.")  # fmt: skip
def evaluate(
    what: Path,
    on: tuple[str, ...],
    device: str,
    dtype: str | None,
    out: Path | None,
    processes: int,
    as_lines: bool,
    **common: Any,
) -> None:
    """Measure a model.

    RUN_OR_MODEL is a run, a model folder of Hugging Face's layout (one that export or import wrote, or of another
    library that import takes), or the name of a small trained model such as fox-small, or of a built-in configuration
    or preset, whose weights are then fresh. NAME is an evaluation (--list) or a task (`attnzoo data list`), whose
    questions are asked: at every place where something is asked the likeliest token is taken. Rows are drawn apart from
    those of training; texts are held out. A FILE.py is one that registers variants of your own.
    """
    from datetime import timedelta

    from attnzoo.experiments.evaluate.table import evaluation
    from attnzoo.trained.model import device_named
    from attnzoo.training.config import TrainConfig
    from attnzoo.training.launch import connected

    device = device_named(device)
    if processes > 1:
        names = [one.partition(":")[0] for one in on]
        if not names or any("over" not in evaluation(name).reads for name in names):
            raise ValueError(
                f"--processes: only --on loss shares a text over processes, got {', '.join(names) or 'none'}"
            )
        return launched(processes, device)
    with connected(device, timedelta(seconds=TrainConfig.exchange_timeout)) as (own, group):
        _evaluate(what, on, own, dtype, out, as_lines, {**common, "over": group})


def _evaluate(
    what: Path, on: tuple[str, ...], device: str, dtype: str | None, out: Path | None, as_lines: bool,
    common: dict[str, Any],
) -> None:  # fmt: skip
    """Measure in this process; the first of several prints and writes."""
    import json
    import logging

    import torch

    from attnzoo.data.own import check_replaceable
    from attnzoo.experiments.evaluate import measures, saved, table
    from attnzoo.files import check_folder

    first = common["over"] is None or common["over"].rank() == 0
    if not first:
        logging.getLogger("attnzoo").setLevel(logging.ERROR)
    given = {field: value for field, value in common.items() if value not in (None, ()) and field != "over"}
    asked = [
        (name, read_options(options.split(",") if options else []))
        for name, _, options in (one.partition(":") for one in on)
    ]
    for name, _ in asked:
        table.evaluation(name)
    subject = saved.find_model(str(what), device, getattr(torch, dtype) if dtype else None)
    if not asked and subject.task is None:
        raise ValueError(f"expected --on NAME: {subject.title} has no task of its own ({', '.join(table.EVALUATIONS)})")
    asked = asked or [(str(subject.task), {})]
    ignored = table.unread([name for name, _ in asked], list(given))
    if ignored is not None:
        raise ValueError(f"--{ignored}: {', '.join(name for name, _ in asked)} does not read it")
    folder = out or (subject.folder / saved.FOLDER if subject.checkpoint is not None and subject.folder else None)
    if folder is not None:
        check_folder(folder, "--out")
    if subject.folder is None and not as_lines and first:
        click.echo(subject.title)
    wanted = []
    for name, options in asked:
        entry = table.evaluation(name)
        settings = {**options, **{field: given[field] for field in entry.reads if field in given}}
        settings |= {"dtype": dtype} if dtype else {}
        file = saved.file_name(name, settings)
        if out is not None:
            saved.check_own(out, file, subject.title)
        for suffix in (".json", ".svg", ".html"):
            if folder is not None:
                check_replaceable(folder / f"{file}{suffix}", "--out")
        wanted.append((name, options, settings, file, entry))
    for name, options, settings, file, entry in wanted:
        found = table.measure(subject, name, options, measures.Common(**common))
        if not first:
            continue
        content = saved.document(subject, name, settings, found)
        if as_lines:
            click.echo(json.dumps(content, allow_nan=False))
        else:
            heading = ", ".join([name, *(f"{key}={value}" for key, value in options.items())])
            click.echo("\n".join([heading, *entry.lines(found)]))
        if folder is not None:
            figure = None if entry.picture is None else entry.picture(found)
            page = None if entry.page is None else entry.page(found, subject.title)
            files = saved.save(folder, file, content, figure, page)
            if not as_lines:
                click.echo("\n".join(str(file) for file in files))


def _list(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if not wanted or context.resilient_parsing:
        return
    from inspect import Parameter

    from attnzoo.experiments.evaluate.table import EVALUATIONS

    for name, entry in EVALUATIONS.items():
        click.echo(f"{name}: {entry.summary}")
        for option, default in entry.options.items():
            shown = "..." if default is Parameter.empty else f"{default:.3g}" if isinstance(default, float) else default
            click.echo(f"  {option}={shown}: {entry.words[option]}")
    click.echo("A task of `attnzoo data list` is an evaluation too: wrong answers to its questions.")
    context.exit()
