"""The command line ``attnzoo``: look at the zoo, verify it, train, compare, report."""

from __future__ import annotations

import math
import os
import shlex
import signal
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import click

from attnzoo.benchmarks.command import bench
from attnzoo.data.command import PATH, Choice, corpus, data, overrides_argument, tokenize
from attnzoo.experiments.builtin import built_in, find_config
from attnzoo.experiments.command import experiment
from attnzoo.experiments.evaluate.command import evaluate
from attnzoo.experiments.explore.command import explore
from attnzoo.terminal import columns, console, fitted, new_table, print_table
from attnzoo.trained.commands import (
    Lists,
    export,
    extend,
    files_argument,
    generate,
    import_,
    processes_option,
    train_by,
    where_it_stands,
)
from attnzoo.trained.conversion_command import convert
from attnzoo.trained.serving.command import serve
from attnzoo.verify_command import verify

# Which extra installs a package, by the name under which it is imported.
EXTRAS = dict.fromkeys(
    ["accelerate", "jinja2", "matplotlib", "omegaconf", "safetensors", "tensorboard", "yaml"], "train"
) | {"transformers": "hf", "tokenizers": "hf", "lm_eval": "eval", "starlette": "serve", "uvicorn": "serve"}
EXTRAS |= dict.fromkeys(["pyarrow", "zarr", "zstandard"], "tables")
# Everything else is imported inside the commands: `attnzoo --help` must not wait for torch.

config_argument = click.argument("config")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="attnzoo")
@click.option(
    "--with", "files", multiple=True, metavar="FILE.py", help="A file that registers variants of your own, run first."
)
def app(files: tuple[str, ...]) -> None:
    """Linear recurrences, each beside its dual softmax position encoding."""
    for file in files:
        from attnzoo.registry import from_file

        from_file(file)


@app.command("list", cls=Lists)
@files_argument
@click.option("--presets", is_flag=True, help="The models of published sizes instead.")
def list_pairs(presets: bool) -> None:
    """Every pair of duals, and the parts of its gate.

    Those too that a FILE.py registers.
    """
    if presets:
        return _list_presets()
    from attnzoo.algebra.parts import PARTS, groups
    from attnzoo.equations import in_ascii
    from attnzoo.registry import broken_plugins, get, list_variants, pairs
    from attnzoo.registry.pair import product_of

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # broken plugins are reported below
        broken = broken_plugins()
    optional = [part for group in groups() for part in group if PARTS[part].optional]
    own = [*(group[0] for group in groups()), *optional]
    symbols = {part: in_ascii(PARTS[part].symbol) for part in own}
    narrow = columns() < 80
    table = new_table("no.", "linear side", "softmax side", *(["parts"] if narrow else symbols.values()))
    for number, pair in enumerate(pairs(), 1):
        marks = {part: "x" if part in pair.requires else "" for part in own}
        if pair.g.startswith("-"):
            marks["log_decay"] = "fixed"
        if narrow:
            words = (symbols[part].removesuffix("_t") if mark == "x" else mark for part, mark in marks.items() if mark)
        table.add_row(str(number), pair.linear, pair.softmax, *([" ".join(words)] if narrow else marks.values()))
    print_table(table, console())
    lattice = f"The transition is exp(g_t) {product_of([p for p in PARTS if p not in optional])}, of the parts marked"
    lattice += "".join(f"; with {in_ascii(PARTS[p].symbol)} a factor is {PARTS[p].factor}" for p in optional)
    lattice += ". `attnzoo show NAME` prints the equations of a pair."
    others = ", ".join(f"{name} (the gate of {get(name).dual.name})" for name in list_variants("other"))
    for note in [lattice, f"Other readouts: {others}.", *(pair.note for pair in pairs() if pair.note)]:
        click.echo(fitted(note, 80))
    for problem in broken:
        click.echo(problem)


def _list_presets() -> None:
    from attnzoo.models.presets import names, preset

    table = new_table("preset", "width", "depth", "heads", "MLP", "tokens", "peak lr")
    for name in names():
        model, recipe = preset(name).model, preset(name).recipe
        sizes = (model.hidden_size, model.num_layers, model.num_heads, model.mlp_size)
        table.add_row(name, *map(str, sizes), f"{recipe.tokens / 2**30:g} Gi", f"{recipe.lr:g}")
    print_table(table, console())


@app.command()
@click.argument("name")
@click.option("--preset", is_flag=True, help="NAME is a model of published size, such as fox-pro-760m.")
def show(name: str, preset: bool) -> None:
    """One variant and its dual: equations, gate, forms, sources.

    NAME is any variant, FILE.py:NAME, or a FILE.py, whose variants are shown.
    """
    if preset:
        return _show_preset(name)
    from attnzoo.errors import nearest
    from attnzoo.models.presets import names
    from attnzoo.registry import get, list_variants, names_of

    if ".py" in name:
        shown = names_of(name)
        for one in shown:
            if len(shown) == 1 or get(one).side != "linear":  # which has its dual on its screen
                _show_variant(one)
        return

    if name in names():
        raise ValueError(f"{name!r} is no variant but a model: `attnzoo show --preset {name}`")
    close = nearest(name, [*list_variants(), *list_variants("other"), *names()])
    if close in names():
        raise ValueError(
            f"unknown variant {name!r}; did you mean the model {close!r}: `attnzoo show --preset {close}`?"
        )
    _show_variant(name)


def _show_variant(name: str) -> None:
    from attnzoo.equations import describe

    text = describe(name, width=columns())
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = describe(name, ascii_only=True, width=columns())
    title, _, rest = text.partition("\n")
    click.echo(click.style(title, bold=True))
    click.echo(rest)


def _show_preset(name: str) -> None:
    """Sizes and counts of a preset, and how it was trained."""
    from attnzoo.models.presets import outline, parameters, preset
    from attnzoo.training.throughput import Operations

    found = preset(name)
    model, recipe, count = found.model, found.recipe, parameters(name)
    layers = [(spec.name, spec.options) for spec in model.layers()]
    kinds = [layer for index, layer in enumerate(layers) if layer not in layers[:index]]
    rows = {
        "attention": ", ".join(kind for kind, _ in kinds),
        "options": "; ".join(", ".join(f"{key}={value}" for key, value in given.items()) or "-" for _, given in kinds),
        "width": f"{model.hidden_size:,}",
        "layers": f"{model.num_layers}",
        "heads": f"{model.num_heads}",
        "MLP": f"{model.mlp_size:,}" if model.mlp_size else "none",
        "vocabulary": f"{model.vocab_size:,}",
        "parameters": f"{count['all']:,}",
        "without embedding": f"{count['without_embedding']:,}",
        "operations": f"{Operations(outline(name)).forward_per_token(recipe.context_length):.3g} per token, forward",
        "tokens": f"{recipe.tokens:,} in {recipe.steps:,} steps of {recipe.sequences} x {recipe.context_length:,}",
        "learning rate": f"{recipe.lr:g} after {recipe.warmup_tokens:,} tokens, then a cosine to {recipe.min_lr:g}",
        "AdamW": f"betas {recipe.beta1}, {recipe.beta2}; weight decay {recipe.weight_decay}; clip {recipe.clip_norm}",
        "source": recipe.source,
    }
    table = new_table(name, "", prose=[""])
    for row in rows.items():
        table.add_row(*row)
    print_table(table, console())


@app.command()
@click.option(
    "--head-dim", type=click.IntRange(min=8), default=64, show_default=True,
    help="hidden_size / num_heads, which is K and V of most layers.",
)  # fmt: skip
@click.option(
    "--dtype", type=Choice(["bfloat16", "float16", "float32"]), default="bfloat16", show_default=True,
    help="Dtype of the layers' weights and inputs.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="As JSON, for programs.")
def doctor(head_dim: int, dtype: str, as_json: bool) -> None:
    """What every variant would run on here, and why nothing faster.

    Machine, versions and a list that can be pasted into an issue. Nothing is launched on a GPU.
    """
    import json

    import torch

    from attnzoo.doctor import examine

    torch.set_num_threads(1)  # on a busy machine small tensors wait far longer for threads than they take
    report = examine(head_dim, getattr(torch, dtype))
    click.echo(json.dumps(report.as_dict(), indent=1) if as_json else report.text(columns()), nl=as_json)


@app.command(epilog=f"Built in: {', '.join(built_in('train'))}.")
@config_argument
@overrides_argument
@processes_option
def train(config: str, overrides: tuple[str, ...], processes: int) -> None:
    """Train one model as CONFIG says, or go on training it.

    CONFIG is a YAML file with the fields of TrainConfig, or the name of a built-in one or of a preset, such as
    fox-pro-125m; KEY=VALUE overrides one of them, as in model.attention=gla or, for a variant of your own,
    model.attention=FILE.py:NAME. A run that was interrupted goes on
    from its newest checkpoint: RUN/config.yaml means the run in that folder, unless output_dir is given.
    """
    path = find_config(config, "train")
    from attnzoo.training.recipe import load_config

    given = _without_files(overrides)
    train_by(processes, where_it_stands(load_config(path, given), path, given))


def _without_files(overrides: tuple[str, ...]) -> tuple[str, ...]:
    """The settings alone, once the FILE.py among them are run; attention=FILE.py:NAME becomes attention=NAME."""
    settings = []
    for word in overrides:
        key, equals, value = word.partition("=")
        if not equals and key.endswith(".py"):
            from attnzoo.registry import from_file

            from_file(key)
            continue
        if key.endswith("attention") and ".py" in value:
            from attnzoo.registry import names_of

            named = names_of(value)
            if len(named) > 1:
                raise ValueError(f"{word}: expected FILE.py:NAME with one of {', '.join(named)}")
            word = f"{key}={named[0]}"
        settings.append(word)
    return tuple(settings)


@app.command(epilog=f"Built in: {', '.join(built_in('train'))}.")
@config_argument
@overrides_argument
def search(config: str, overrides: tuple[str, ...]) -> None:
    """Find the learning rate of a run by a search among whole runs.

    CONFIG and KEY=VALUE are those of train. Rates are 1, 2, 5, 10, ... times a power of ten, from optimizer.lr on,
    until the best has a worse one on either side, by the training loss of the last tokens. The runs are folders in
    output_dir, and what is finished is not done again.
    """
    path = find_config(config, "train")
    from attnzoo.experiments.experiment import rate_in_words
    from attnzoo.experiments.search import search as run
    from attnzoo.training.recipe import load_config

    losses = run(
        load_config(path, _without_files(overrides)),
        lambda lr, loss: click.echo(f"{rate_in_words(lr)}: loss {loss:.4f}"),
    )
    best = min(losses, key=losses.__getitem__)
    if math.isinf(losses[best]):
        raise FloatingPointError(f"all learning rates diverged: {', '.join(map(rate_in_words, losses))}")
    click.echo(f"best learning rate: {rate_in_words(best)}")


@app.command(epilog=f"Built in: {', '.join(built_in('compare'))}.")
@config_argument
@overrides_argument
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Runs at a time, each on a GPU.")
def compare(config: str, overrides: tuple[str, ...], jobs: int) -> None:
    """Train several variants on one budget and write a report.

    CONFIG is a YAML file with the fields of CompareConfig, or the name of a built-in one; KEY=VALUE overrides one
    of them, as in train.steps=100. What is trained or measured already is not done again.
    """
    path = find_config(config, "compare")
    from attnzoo.experiments.compare import CompareConfig, check_own, run_comparison
    from attnzoo.training.recipe import load_config

    loaded = load_config(path, overrides, schema=CompareConfig)
    check_own(path, overrides)
    at_a_time = ["--jobs", str(jobs)] if jobs > 1 else []  # it changes no loss, but the speeds
    command = shlex.join(["attnzoo", "compare", config, *overrides, *at_a_time])
    run_comparison(loaded, console(), command=command, jobs=jobs)


@app.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=PATH)
@click.option("--output", "-o", type=PATH, default="report.html", show_default=True, help="The file to write.")
@click.option("--title", default="comparison", show_default=True, help="The page's heading.")
def report(runs: tuple[Path, ...], output: Path, title: str) -> None:
    """Write a report about runs, measuring those not measured yet.

    RUN is the folder of a run, or a folder of runs.
    """
    from attnzoo.data.own import check_page
    from attnzoo.experiments.compare import result_of
    from attnzoo.experiments.report import terminal_table, write_report
    from attnzoo.experiments.report.results import find_runs

    check_page(output, "--output")
    results = [result_of(run) for run in find_runs(runs)]
    page = write_report(results, output, title=title, command=results[0].facts.command)
    print_table(terminal_table(results), console())
    click.echo(f"report: {page}")


for command in (
    verify, explore, tokenize, corpus, convert, export, import_, extend, generate, serve, evaluate, bench, data,
    experiment,
):  # fmt: skip
    app.add_command(command)
for group in (app, bench, data, experiment):
    for command in group.commands.values():  # click would cut off what is longer than a line
        command.short_help = " ".join((command.help or "").partition("\n\n")[0].split())


def main() -> NoReturn:
    """Run the command line and exit: 0 done, 1 a check failed, 2 bad input, 130 interrupted, 141 closed output.

    An error in the input is one line without a traceback; ``ATTNZOO_TRACEBACK=1`` shows where it was raised.
    """
    _ready_streams()
    stream = sys.stdout
    try:
        sys.exit(app(standalone_mode=False, prog_name="attnzoo") or 0)
    except SystemExit:
        if sys.stdout is not stream:  # click has replaced the stream, as its reader has closed it
            sys.exit(128 + signal.SIGPIPE)
        raise
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        sys.exit(2)
    except click.UsageError as error:
        help_of = f" (`{error.ctx.command_path} --help`)" if error.ctx else ""
        _fail(f"{error.format_message().removesuffix('.')}{help_of}", 2)
    except click.ClickException as error:
        _fail(error.format_message(), 2)
    except (click.Abort, KeyboardInterrupt) as error:
        cause = error.__cause__ or error
        if isinstance(cause, EOFError):  # click raises Abort for EOFError, as if at a prompt; this program has none
            raise cause from None
        _fail(str(cause) or "interrupted", 130)
    except Exception as error:
        if isinstance(error.__context__, KeyboardInterrupt) and isinstance(error, OSError):
            sys.exit(130)  # click cannot write to a closed pipe
        if os.environ.get("ATTNZOO_TRACEBACK"):
            raise
        missing = str(error.name).partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if missing in EXTRAS:
            _fail(f"this needs {missing}, which is not installed: pip install 'attnzoo[{EXTRAS[missing]}]'", 2)
        if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__ or "can't allocate" in str(error):
            _fail(f"out of memory: {error}", 2)
        if "RANK" in os.environ:
            from attnzoo.training.launch import GONE, lost_another

            if lost_another(error):
                _fail(f"{GONE}: {error}", 2)
        kinds = ValueError | TypeError | OSError | FloatingPointError
        if not isinstance(error, kinds) and not type(error).__module__.startswith("attnzoo."):
            raise
        _fail(str(error), 2)


def _ready_streams() -> None:
    """Redirect closed streams to /dev/null, and print characters that the terminal cannot encode as question marks."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # else the next opened file would get its descriptor
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")


def _fail(message: str, code: int) -> NoReturn:
    line = " ".join(message.split())
    with suppress(OSError):  # the reader may have closed the pipe
        if "RANK" in os.environ:
            from attnzoo.training.launch import tell_launcher

            if tell_launcher(line):
                sys.exit(code)
            line = f"process {os.environ['RANK']}: {line}"
        click.echo(f"attnzoo: {line}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
