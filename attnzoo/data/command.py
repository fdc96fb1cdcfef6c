"""The commands ``attnzoo tokenize``, ``corpus`` and ``data``, which make and show training data."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from attnzoo.errors import did_you_mean
from attnzoo.terminal import fitted

if TYPE_CHECKING:
    from attnzoo.data.shards import TokenShards
    from attnzoo.data.tokenizer import Tokenized

F = TypeVar("F", bound=Callable[..., Any])


class PathType(click.Path):
    """The type of a path option, which refuses an empty text (an unset variable) instead of reading this folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("expected a path, got ''", param, ctx)
        return super().convert(value, param, ctx)


class Choice(click.Choice[str]):
    """The type of an option that is one of some words, which names the nearest to another word."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        return f"expected one of {', '.join(self.choices)}, got {value!r}{did_you_mean(value, self.choices)}"


PATH = PathType(path_type=Path)


def _once(context: click.Context, parameter: click.Parameter, overrides: tuple[str, ...]) -> tuple[str, ...]:
    from attnzoo.settings import check_once

    check_once(overrides, "override")
    return overrides


def words_of(context: click.Context) -> list[str]:
    """The words, after `attnzoo`, of the same command in one of several processes: all that was given, but their
    number."""
    words = [str(context.info_name)]
    for parameter in context.command.params:
        given = context.params.get(str(parameter.name))
        if parameter.name == "processes" or given is None or given is False or given == ():
            continue
        for value in given if isinstance(given, tuple) else (given,):
            option = "" if isinstance(parameter, click.Argument) else parameter.opts[0]
            words.append(option if value is True else f"{option}={value}" if option else str(value))
    return words


overrides_argument = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", callback=_once)


def _writable(context: click.Context, parameter: click.Parameter, folder: Path) -> Path:
    from attnzoo.files import check_folder

    check_folder(folder.parent, "--to")
    return folder


to_option = click.option("--to", "folder", required=True, type=PATH, callback=_writable, help="The folder to write.")
paths_argument = click.argument("paths", nargs=-1, required=True, metavar="PATH...", type=PATH)


def tokenizer_options(command: F) -> F:
    """The command with the options of tokenizers and of the held-out split."""
    for option in (
        click.option(
            "--heldout-fraction", type=click.FloatRange(0, 1, min_open=True, max_open=True), default=0.05,
            show_default=True, help="Share of the files that training will not see.",
        ),
        click.option("--end", help="The token that ends a document.  [default: the tokenizer's end of sequence]"),
        click.option("--tokenizer", type=PATH, help="Take this tokenizer.json, or that of this folder, instead."),
        click.option(
            "--vocab-size", type=click.IntRange(min=1),
            help="Train a byte-level BPE tokenizer of that many tokens; 256: each byte is one.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


@click.command()
@paths_argument
@to_option
@tokenizer_options
@click.option("--pattern", default="*", show_default=True, help="Which files of folders, such as '*.py', at any depth.")
@click.option("--text-field", help="The files are tables (.parquet, .jsonl, .jsonl.zst), each row's text a document.")
@click.option(
    "--roll", type=click.IntRange(min=2), metavar="TOKENS",
    help="Cut documents into sequences of so many tokens, and roll each by a random number of them.",
)  # fmt: skip
def tokenize(paths: tuple[Path, ...], folder: Path, **options: Any) -> None:
    """Write text files as tokens for training.

    PATH is a text file (UTF-8), a folder of them, or stdlib; each file is a document, or with --text-field each row of
    it. A Zarr array of tokens, such as LongCrawl64's, is taken with its --tokenizer. The folder written is a
    data.source: it holds the tokenizer, and the tokens of a training and a held-out split, by file or row.
    """
    from attnzoo.data.tokenizer import tokenize as run

    done = run(paths, folder, **options)
    _tell(done, options["vocab_size"], "files" if options["text_field"] is None else "documents")


@click.command()
@paths_argument
@to_option
@tokenizer_options
@click.option(
    "--pattern", "patterns", multiple=True, default=["*"], metavar="PATTERN",
    help="Which files, such as '*.c'; may be given several times.  [default: all]",
)  # fmt: skip
@click.option(
    "--json-field",
    help="Of .json files, and of each line of .jsonl and .ndjson files, take the texts under this name only, without "
    "HTML's tags.",
)
@click.option("--min-bytes", type=click.IntRange(min=1), default=1, show_default=True, help="Of each document.")
def corpus(paths: tuple[Path, ...], folder: Path, **options: Any) -> None:
    """Write the texts in files and archives as tokens for training.

    PATH is a file, a folder, or an archive (tar, zip, wheel, jar); .gz, .xz and .bz2 are unpacked. Each file is a
    document. What is no text, too short, larger than 1 GiB, damaged, or there already is left out and counted; how long
    documents are is said.
    The folder written is a data.source, as of `attnzoo tokenize`.
    """
    from attnzoo.data.corpus import tokenize_corpus

    found, done = tokenize_corpus(paths, folder, **options)
    for reason, names in sorted(found.left_out.items()):
        click.echo(f"left out, {reason}: {len(names):,} ({', '.join(names[:2])}{', ...' if len(names) > 2 else ''})")
    _tell(done, options["vocab_size"])
    _tell_lengths(done.shards)


def _tell(done: Tokenized, vocab_size: int | None, kind: str = "files") -> None:
    shards = done.shards
    counts = [sum(shard.count for shard in split) for split in (shards.train, shards.held_out)]
    if done.bytes:
        click.echo(f"{done.files:,} {kind} of {done.bytes:,} bytes, {done.bytes / sum(counts):.2f} bytes per token")
    click.echo(f"training: {counts[0]:,} tokens; held out: {counts[1]:,}")
    if (vocab_size or 0) > shards.vocab_size:
        click.echo(f"the texts give no more than {shards.vocab_size:,} tokens")
    click.echo(f"tokens: {shards.folder} (vocabulary {shards.vocab_size:,})")


def _tell_lengths(shards: TokenShards) -> None:
    from attnzoo.data.lengths import MARKS, document_lengths

    marks = "".join(f"{f'>= {mark // 1024}k':>8}" for mark in MARKS)
    click.echo(f"\n{'documents':>19}{'median':>9}{'90%':>9}{'longest':>11}{marks}")
    for name, split in (("training", shards.train), ("held out", shards.held_out)):
        if split:
            found = document_lengths(split)
            shares = "".join(f"{share:>8.0%}" for share in found.in_longer)
            click.echo(f"{name}{found.documents:>11,}{found.median:>9,}{found.upper:>9,}{found.longest:>11,}{shares}")
    click.echo("lengths in tokens; at the right the share of all tokens that stand in documents so long (k: 1024)")


@click.group()
def data() -> None:
    """What can be trained on: synthetic tasks and folders of tokens.

    data.source=task:NAME trains on a task, data.source=FOLDER on what `attnzoo tokenize` or `attnzoo corpus` wrote.
    """


@data.command("list")
def list_tasks() -> None:
    """Every task with its options."""
    from attnzoo.data.tasks import TASKS, options_of, summary_of

    for name in TASKS:
        options = ", ".join(f"{option}={value}" for option, value in options_of(name).items())
        click.echo(f"{fitted(f'{name}: {summary_of(name)}')}\n{fitted(f'  {options}')}")


@data.command()
@click.argument("folder", type=PATH)
def lengths(folder: Path) -> None:
    """How long the documents of a folder of tokens are.

    FOLDER is one that `attnzoo tokenize` or `attnzoo corpus` wrote.
    """
    from attnzoo.data.shards import read_shards

    _tell_lengths(read_shards(folder))


@data.command()
@click.argument("task")
@click.argument("options", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--length", type=click.IntRange(min=1), help="Tokens of the row.  [default: a usual number]")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the rows.")
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
    """The options of a task from KEY=VALUE texts.

    Raises:
        ValueError: a text of another form, a value that is no YAML or a number that YAML reads otherwise than it
            looks, or a key that is given twice.
    """
    import yaml
    from omegaconf.errors import OmegaConfBaseException

    from attnzoo.settings import check_once, read_settings

    check_once(texts, "option")
    options: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise ValueError(f"option {text!r}: expected key=value")
        try:
            options |= read_settings([text])
        except (yaml.YAMLError, OmegaConfBaseException) as error:
            raise ValueError(f"option {text!r} is not readable") from error
    return options
