"""``attnzoo export``, ``import`` and ``evaluate``: what is done with a model that was trained, here or elsewhere."""

from __future__ import annotations

from pathlib import Path

import click

from attnzoo.data.command import PATH, read_options, to_option


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
