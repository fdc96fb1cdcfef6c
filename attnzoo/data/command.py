"""``attnzoo data``: the synthetic tasks that a model can be trained on."""

from __future__ import annotations

import shutil
from typing import Any

import click


@click.group()
def data() -> None:
    """The synthetic tasks, which data.source=task:NAME trains on."""


@data.command("list")
def list_tasks() -> None:
    """Every task with its options."""
    from attnzoo.data.tasks import TASKS, options_of, summary_of

    for name in TASKS:
        options = ", ".join(f"{option}={value}" for option, value in options_of(name).items())
        click.echo(f"{name}: {summary_of(name)}\n  {options}")


@data.command()
@click.argument("task")
@click.argument("options", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--length", type=click.IntRange(min=1), help="Tokens of the row.  [default: a usual number]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the rows.")
@click.option("--index", type=click.IntRange(min=0), default=0, show_default=True, help="Which row.")
def show(task: str, options: tuple[str, ...], length: int | None, seed: int, index: int) -> None:
    """A row of a task, with what is asked in it.

    TASK is one that `attnzoo data list` names, KEY=VALUE one of its options. The row is one that
    data.source=task:TASK trains on.
    """
    from attnzoo.data.tasks import Examples, build_task
    from attnzoo.data.tasks.show import row_lines

    built = build_task(task, read_options(options))
    row = Examples(built, length or built.length, seed)[index]
    T, asked = len(row[0]), int((row[1] >= 0).sum())
    click.echo(f"task:{task}, {len(built.words)} words; row {index} of seed {seed}: {T} tokens")
    for line in row_lines(built, row, shutil.get_terminal_size((100, 24)).columns):
        click.echo("".join(click.style(text, bold=True) if marked else text for text, marked in line).rstrip())
    click.echo(f"a>b: at the word a, b is asked; so at {asked} of {T}")


def read_options(texts: tuple[str, ...] | list[str]) -> dict[str, Any]:
    """KEY=VALUE as options of a task."""
    import yaml  # type: ignore[import-untyped]

    options = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise ValueError(f"option {text!r}: expected key=value")
        try:
            options[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"option {text!r} is not readable") from error
    return options
