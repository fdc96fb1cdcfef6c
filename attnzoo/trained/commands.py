"""The commands ``attnzoo extend``, ``generate``, ``export`` and ``import``, which use a trained model."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnzoo.data.command import PATH, Choice, F, to_option, words_of

if TYPE_CHECKING:
    from attnzoo.trained.continuation import Continuation
    from attnzoo.training.config import TrainConfig


def _run_files(context: click.Context, parameter: click.Parameter, files: tuple[str, ...]) -> None:
    if files and not context.resilient_parsing:
        from attnzoo.registry import from_file

        for file in files:
            from_file(file)


files_argument = click.argument("files", nargs=-1, metavar="[FILE.py]...", expose_value=False, callback=_run_files)
processes_option = click.option(
    "--processes", type=click.IntRange(min=1), default=1, show_default=True,
    help="Processes on this machine: one for each GPU, or some that share a CPU.",
)  # fmt: skip


class Lists(click.Command):
    """A command whose ``--list`` or ``--presets`` stands alone, as it reads nothing that is beside it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        [alone] = {"--list", "--presets"} & {name for option in self.params for name in option.opts}
        beside = [word for word in args if word not in (alone, *ctx.help_option_names)]
        if alone in args and beside and not ctx.resilient_parsing:
            raise click.UsageError(f"{alone}: expected nothing beside it, got {shlex.join(beside)}", ctx)
        return super().parse_args(ctx, args)


def where_it_stands(config: TrainConfig, path: Any, overrides: Sequence[str]) -> TrainConfig:
    """The configuration with `output_dir` set to the run folder in which its file lies, as a run may have been moved.

    Args:
        config: the configuration.
        path: the file that it was read from; other values change nothing.
        overrides: `key=value` each; an `output_dir` among them counts instead.
    """
    given = any(override.startswith("output_dir=") for override in overrides)
    if given or not isinstance(path, Path) or path.name != "config.yaml":
        return config
    moved = (path.parent / "checkpoints").is_dir() and path.parent.resolve() != Path(config.output_dir).resolve()
    return replace(config, output_dir=str(path.parent)) if moved else config


def launched(processes: int, device: str) -> None:
    """Run this command in several connected processes on a device, and wait for them.

    Raises:
        ValueError: so many cannot be started.
        LaunchError: one of them failed.
    """
    from attnzoo.training.launch import check_processes, launch

    check_processes(processes, device)
    launch([sys.executable, "-m", "attnzoo", *words_of(click.get_current_context())], processes)


def train_by(processes: int, config: TrainConfig) -> None:
    """Train in this process, or start several processes that train together.

    Raises:
        ValueError: a number of processes that cannot be started or does not divide the batch; and as `train`.
        LaunchError: one of several processes failed.
    """
    from attnzoo.training import train
    from attnzoo.training.launch import end_with_launcher

    if processes > 1:
        config.rows_per_part(processes)
        return launched(processes, config.device)
    end_with_launcher()
    first = os.environ.get("RANK", "0") == "0"
    if not first:  # one process prints
        logging.getLogger("attnzoo").setLevel(logging.ERROR)
    folder = train(config)
    if first:
        click.echo(f"run: {folder}")


def number_or_text(kind: type) -> Callable[[str], Any]:
    """A parser of a command-line option that is a number of ``kind``, or else a text, which its reader checks."""

    def read(given: str) -> Any:
        with suppress(ValueError):
            return kind(given)
        return given

    return read


device_option = click.option("--device", type=Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
dtype_option = click.option(
    "--dtype", type=Choice(["float32", "bfloat16", "float16"]), help="Of the weights; as stored if not given."
)


def engine_options(command: F) -> F:
    """The command with the options of the engine that draws its tokens."""
    for option in reversed((
        click.option(
            "--evict", type=number_or_text(float), metavar="EPS",
            help="Give up keys for which no later token can lose more weight than this; `offload`: they go to the "
            "host's memory, and come back for a token that needs them.",
        ),
        click.option(
            "--budget", type=number_or_text(int), metavar="TOKENS|SIZE",
            help="What each layer that forgets may hold: tokens of each head, or memory such as `96 KiB`; or all "
            "layers together, `2 MiB total`.",
        ),
        click.option(
            "--kv-dtype", type=Choice(["fp8"]), help="Of cached keys and values; the model's own if not given."
        ),
        click.option("--draft", type=PATH, help="Another run or model folder, which proposes tokens; it changes none."),
        click.option(
            "--draft-tokens", type=click.IntRange(1, 15), help="Proposed at a time by --draft; 5 if not given."
        ),
        device_option, dtype_option,
    )):  # fmt: skip
        command = option(command)
    return command


@click.command()
@click.argument("run", type=PATH)
@click.option("--steps", type=click.IntRange(min=1), required=True, help="Updates of the whole run.")
@click.option(
    "--schedule",
    type=Choice(["constant", "cosine"]),
    required=True,
    help="Learning rate from here: level, or a new cosine to 0.",
)
@click.option("--lr", type=float, help="Learning rate to go on with; needed where a cosine has ended.")
@click.option("--warmup-steps", type=click.IntRange(min=0), help="Updates of rising to --lr; as at first if not given.")
@processes_option
def extend(run: Path, steps: int, schedule: str, lr: float | None, warmup_steps: int | None, processes: int) -> None:
    """Train a run for longer than its configuration says.

    RUN is its folder. It goes on from its newest checkpoint, to the same numbers whenever it is interrupted: the same
    command, or `attnzoo train RUN/config.yaml`, resumes it.
    """
    from attnzoo.training import extend as extended

    config = extended(run, steps, schedule, lr=lr, warmup_steps=warmup_steps)
    train_by(processes, config)


@click.command()
@click.argument("source", metavar="RUN_OR_FOLDER", type=PATH)
@click.option("--prompt", required=True, help="The text to continue.")
@click.option(
    "--max-tokens", type=click.IntRange(min=1), default=200, show_default=True, help="Generate at most so many tokens."
)
@click.option("--temperature", type=float, default=0.8, show_default=True, help="0 takes the likeliest token.")
@click.option("--top-k", type=click.IntRange(min=1), help="Sample among the k likeliest.")
@click.option(
    "--top-p", type=float, default=1.0, show_default=True, help="Sample among the likeliest that sum to this."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the samples.")
@click.option("--stop", metavar="TEXT", multiple=True, help="End before this text; may be given several times.")
@engine_options
@processes_option
def generate(
    source: Path,
    prompt: str,
    max_tokens: int,
    stop: tuple[str, ...],
    draft: Path | None,
    device: str,
    dtype: str | None,
    processes: int,
    **options: Any,
) -> None:
    """Continue a text.

    RUN_OR_FOLDER is a run, a model folder that export or import wrote, or a small trained model by its name (fox-small,
    mamba2-small, path_fox-small, gated_deltanet-small). The text goes to standard output as it is drawn; speed, memory
    and the keys that each head held to standard error, also when interrupted. Several processes read a long prompt
    together.
    """
    from datetime import timedelta

    import torch

    from attnzoo.trained.continuation import Continuation, check_draft, draft_of, load_text_model
    from attnzoo.trained.model import device_named
    from attnzoo.training.config import TrainConfig
    from attnzoo.training.launch import connected

    device, ahead = device_named(device), options.pop("draft_tokens")
    check_draft(draft, ahead)
    if processes > 1:
        kept = [name for name in ("evict", "budget") if options[name] is not None]
        if kept:
            raise ValueError(
                f"--processes: expected 1 with --{kept[0]}, for which one reads the prompt, got {processes}"
            )
        return launched(processes, device)
    with connected(device, timedelta(seconds=TrainConfig.exchange_timeout)) as (own, group):
        sampling = {name: options.pop(name) for name in ("temperature", "top_k", "top_p", "seed")}
        placed = own, getattr(torch, dtype) if dtype else None
        loaded = load_text_model(source, *placed)
        proposes = None if draft is None else draft_of(loaded, load_text_model(draft, *placed), ahead)
        options |= {"sampling": sampling, "stop": stop, "draft": proposes, "over": group}
        continuation = Continuation(loaded, prompt, max_tokens, **options)
        first = group is None or group.rank() == 0
        _write(continuation, prompt) if first else [*continuation]


def _write(continuation: Continuation, prompt: str) -> None:
    """The prompt and its continuation to standard output, and what it took to standard error."""
    click.echo(prompt, nl=False)
    interrupted = None
    try:
        with closing(iter(continuation)) as texts:
            for text in filter(None, texts):
                click.echo(text, nl=False)
    except KeyboardInterrupt as error:
        interrupted = error
    click.echo()
    for line in continuation.summary():
        click.echo(line, err=True)
    if interrupted:
        raise interrupted


@click.command()
@click.argument("run", type=PATH)
@to_option
@click.option("--bare", is_flag=True, help="Write a run instead, without the optimizer's state and in bfloat16.")
def export(run: Path, folder: Path, bare: bool) -> None:
    """Write a run as a model folder of Hugging Face.

    `import attnzoo` and `AutoModelForCausalLM.from_pretrained(FOLDER)` load it. The newest whole checkpoint is taken.
    """
    from attnzoo.trained.exchange import bare_run, export_run

    click.echo(f"model: {(bare_run if bare else export_run)(run, folder)}")


def _list_kinds(context: click.Context, on: bool) -> None:
    if not on or context.resilient_parsing:
        return
    from attnzoo.models.peers.table import readers_table
    from attnzoo.terminal import console, new_table, print_table

    differs = "what differs, or why it does not load"
    table = new_table("model_type", "becomes", differs, prose=["becomes", differs])
    for kind, row in readers_table().items():
        table.add_row(kind, *row)
    print_table(table, console())
    context.exit()


@click.command("import", cls=Lists)
@click.argument("source", metavar="FOLDER", type=PATH)
@to_option
@dtype_option
@click.option(
    "--list", is_flag=True, is_eager=True, expose_value=False, callback=lambda context, _, on: _list_kinds(context, on),
    help="What loads, what it becomes and what differs.",
)  # fmt: skip
def import_(source: Path, folder: Path, dtype: str | None) -> None:
    """Write another library's model as one of attnzoo.

    FOLDER holds a model of transformers (Llama, Qwen3.5, OLMo 2, ...), of flash-linear-attention, or of the Forgetting
    Transformer's authors, as `save_pretrained` writes it; `attnzoo import --list` says which. The folder written also
    holds train.yaml, which trains on from it.
    """
    import torch

    from attnzoo.trained.exchange import import_model

    for note in import_model(source, folder, getattr(torch, dtype) if dtype else None):
        click.echo(note)
    click.echo(f"model: {folder}")
