"""``attnzoo tokenize``, ``export``, ``import`` and ``evaluate``: what goes into training from elsewhere, and what is
done with a model that was trained."""

from __future__ import annotations

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


@click.command()
@click.argument("run", type=PATH)
@to_option
def export(run: Path, folder: Path) -> None:
    """Write a run as a model folder of Hugging Face.

    `import attnzoo` and `AutoModelForCausalLM.from_pretrained(FOLDER)` load it. The newest whole checkpoint is taken.
    """
    from attnzoo.training.exchange import export_run

    click.echo(f"model: {export_run(run, folder)}")


@click.command("import")
@click.argument("source", metavar="FOLDER", type=PATH)
@to_option
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Of the weights; kept if not given."
)
def import_(source: Path, folder: Path, dtype: str | None) -> None:
    """Write another library's model as one of attnzoo.

    FOLDER holds a model of transformers (Llama, Mistral, Qwen2, Qwen3, Qwen3-Next, Mamba-2), of
    flash-linear-attention, or of the Forgetting Transformer's authors, as `save_pretrained` writes it. The folder
    written also holds train.yaml, which trains on from it.
    """
    import torch

    from attnzoo.training.exchange import import_model

    for note in import_model(source, folder, getattr(torch, dtype) if dtype else None):
        click.echo(note)
    click.echo(f"model: {folder}")


@click.command()
@click.argument("source", metavar="RUN_OR_FOLDER", type=PATH)
@click.option(
    "--on", multiple=True, metavar="TASK[:KEY=VALUE,...]",
    help="A task, with options; may be given several times.  [default: the run's own]",
)  # fmt: skip
@click.option(
    "--length", "lengths", multiple=True, type=click.IntRange(min=1),
    help="Tokens per row; may be given several times.  [default: as in training]",
)  # fmt: skip
@click.option("--rows", type=click.IntRange(min=1), default=256, show_default=True, help="Per task and length.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the rows.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="A line of JSON per task and length.")
def evaluate(
    source: Path, on: tuple[str, ...], lengths: tuple[int, ...], rows: int, seed: int, device: str, as_json: bool
) -> None:
    """Ask a trained model the questions of synthetic tasks.

    RUN_OR_FOLDER is a run, or a model folder that export wrote. At every place where something is asked the likeliest
    token is taken; the rows are ones that no training draws. A task may have other options than in training, and rows
    may be longer.
    """
    import dataclasses
    import json

    import torch

    from attnzoo.data.command import read_options
    from attnzoo.training.answers import evaluate as measured

    tasks = [
        (name, read_options(given.split(",") if given else [])) for name, _, given in (x.partition(":") for x in on)
    ]
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    header = f"{'length':>8} {'answers':>9} {'wrong %':>9} {'+-':>7} {'rows all right %':>17} {'loss':>8}  task"
    for number, (task, found) in enumerate(measured(source, tasks, lengths, rows, seed, device)):
        if as_json:
            click.echo(json.dumps({"task": task, **dataclasses.asdict(found)}))
            continue
        if number == 0:
            click.echo(header)
        wrong, spread, whole = (100 * share for share in (found.error, found.uncertainty, found.whole))
        numbers = f"{wrong:9.3f} {spread:7.3f} {whole:17.2f} {found.loss:8.4f}"
        click.echo(f"{found.length:8,} {found.asked:9,} {numbers}  {task}")
