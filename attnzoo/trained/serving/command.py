"""The command ``attnzoo serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from attnzoo.data.command import PATH, Choice
from attnzoo.trained.commands import engine_options


@click.command()
@click.argument("source", metavar="RUN_OR_FOLDER", type=PATH)
@click.option(
    "--engine", type=Choice(["auto", "vllm", "attnzoo"]), default="auto", show_default=True,
    help="What draws the tokens; auto takes vLLM where it is installed and serves the model.",
)  # fmt: skip
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at: this machine alone.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes one that is free."
)
@click.option(
    "--max-sequences", type=click.IntRange(min=1), default=8, show_default=True, help="Drawn at a time; others wait."
)
@click.option(
    "--max-tokens", type=click.IntRange(min=2), default=2048, show_default=True,
    help="Of the longest sequence, its prompt included.",
)  # fmt: skip
@click.option(
    "--prefix-cache", type=click.IntRange(min=0), metavar="MIB",
    help="Memory, beside the pages of keys, for beginnings that prompts have in common, by attnzoo's engine.  "
    "[default: 256, without --evict]",
)  # fmt: skip
@engine_options
def serve(source: Path, engine: str, host: str, port: int, **options: Any) -> None:
    """Serve a model over HTTP, by OpenAI's interface.

    RUN_OR_FOLDER is a run, a model folder that export or import wrote, or a small trained model such as fox-small.
    There are /v1/completions, also streamed, /v1/chat/completions where the tokenizer has a chat template, /v1/models
    and /health. Ctrl-C ends it.
    """
    from attnzoo.trained.serving.server import Serving

    for line in Serving(source, engine, host, port, **options).run():
        click.echo(line)
