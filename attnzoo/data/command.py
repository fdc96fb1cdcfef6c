"""``attnzoo tokenize`` and ``data``: what a model can be trained on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import click


class PathType(click.Path):
    """A path; an empty text, as of a variable that is not set, is none, though it would stand for this folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("expected a path, got ''", param, ctx)
        return super().convert(value, param, ctx)


PATH = PathType(path_type=Path)
to_option = click.option("--to", "folder", required=True, type=PATH, help="The folder to write.")


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", type=PATH)
@to_option
@click.option("--vocab-size", type=click.IntRange(min=1), help="Train a byte-level BPE tokenizer of that many tokens.")
@click.option("--tokenizer", type=PATH, help="Take this tokenizer.json, or that of this folder, instead.")
@click.option("--end", help="The token that ends a document.  [default: the tokenizer's end of sequence]")
@click.option("--pattern", default="*", show_default=True, help="Which files of folders, at any depth.")
@click.option(
    "--heldout-fraction", type=click.FloatRange(0, 1, min_open=True, max_open=True), default=0.05, show_default=True,
    help="Share of the files that training will not see.",
)  # fmt: skip
def tokenize(paths: tuple[Path, ...], folder: Path, **options: Any) -> None:
    """Write text files as tokens for training.

    PATH is a text file (UTF-8), a folder of them, or stdlib; each file is a document. The folder written is a
    data.source: it holds the tokenizer, and the tokens of a training and a held-out split, by file.
    """
    from attnzoo.data.tokenizer import tokenize as run

    done = run(paths, folder, **options)
    shards = done.shards
    counts = [sum(shard.count for shard in split) for split in (shards.train, shards.held_out)]
    click.echo(f"{done.files:,} files of {done.bytes:,} bytes, {done.bytes / sum(counts):.2f} bytes per token")
    click.echo(f"training: {counts[0]:,} tokens; held out: {counts[1]:,}")
    if (options["vocab_size"] or 0) > shards.vocab_size:
        click.echo(f"the texts give no more than {shards.vocab_size:,} tokens")
    click.echo(f"tokens: {folder} (vocabulary {shards.vocab_size:,})")


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
