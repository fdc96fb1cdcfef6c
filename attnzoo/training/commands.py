"""``attnzoo export``, ``import`` and ``evaluate``: what is done with a model that was trained, here or elsewhere."""

from __future__ import annotations

from pathlib import Path

import click

from attnzoo.data.command import PATH, to_option


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
