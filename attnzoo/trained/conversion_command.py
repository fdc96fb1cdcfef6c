"""The command ``attnzoo convert``."""

from __future__ import annotations

import shlex
from itertools import groupby
from pathlib import Path

import click

from attnzoo.data.command import PATH, overrides_argument


@click.command()
@click.argument("source", metavar="RUN_OR_FOLDER", type=PATH)
@overrides_argument
@click.option(
    "--to", "target", required=True, metavar="TARGET",
    help="A variant; a list of them, in which `same` keeps a layer, as '[mamba2, mamba2, same]'; or forgetting.",
)  # fmt: skip
@click.option("--out", type=PATH, required=True, help="The folder of the phases.")
@click.option(
    "--context", type=click.IntRange(min=1), help="Tokens of the model's context.  [default: as its files say]"
)
@click.option(
    "--tokens", type=click.IntRange(min=1), help="Of all phases.  [default: 5% of those of a run; 2^29 for a folder]"
)
@click.option("--drop-rotation", is_flag=True, help="Leave RoPE's angles behind, which new layers keep otherwise.")
def convert(
    source: Path, overrides: tuple[str, ...], target: str, out: Path, context: int | None, tokens: int | None,
    drop_rotation: bool,
) -> None:  # fmt: skip
    """Change the variant of a trained model's layers.

    RUN_OR_FOLDER is a run, a model folder that export or import wrote, or a small trained model such as fox-small.
    Three configurations are written, for three runs of train: the new layers learn the outputs of the old ones, then
    the model learns the original's logits, then the text. The gates begin open, with a reach of 8 contexts. KEY=VALUE
    overrides a setting of all three, as data.source=tokens; model.attention_options.KEY=VALUE is an option of the new
    layers.
    """
    from yaml import YAMLError

    from attnzoo.settings import read_yaml
    from attnzoo.trained.conversion import phases, write_phases

    try:
        layers = read_yaml(target)
    except (YAMLError, RecursionError) as error:
        raise ValueError(f"--to: expected a variant, or a list such as '[mamba2, same]', got {target!r}") from error
    found = phases(source, out, layers, overrides, context=context, tokens=tokens, rotation=not drop_rotation)
    said = write_phases(source, out, found)
    first = 0
    for layer, group in groupby(next(iter(found.values())).model.layers()):
        last = first + len(list(group)) - 1
        options = ", ".join(f"{name}={value}" for name, value in layer.options.items())
        numbers = f"layer {first}" if last == first else f"layers {first} to {last}"
        click.echo(f"{numbers}: {layer.name}" + (f" with {options}" if options else ""))
        first = last + 1
    click.echo(said)
    for phase, config in found.items():
        tokens = config.steps * config.batch_size * config.data.context_length
        click.echo(f"{tokens:,} tokens: {shlex.join(['attnzoo', 'train', str(out / f'{phase}.yaml')])}")
    compared = shlex.join(["attnzoo", "evaluate", str(out / phase), "--on", f"conversion:original={source}"])
    click.echo(f"before and after: {compared}")
