"""Synthetic tasks asked of a run, or of a model folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attnzoo.data.tasks import Examples, build_task
from attnzoo.evaluation.answers import Answers, measure_answers
from attnzoo.training.checkpoint import load_run
from attnzoo.training.generate import of_folder


def evaluate(
    source: Path,
    on: Sequence[tuple[str, Mapping[str, Any]]] = (),
    lengths: Sequence[int] = (),
    rows: int = 256,
    seed: int = 0,
    device: str = "cpu",
) -> Iterator[tuple[str, Answers]]:
    """Each task at each length, and what a model answered, as it is measured: on rows that no training draws.

    Args:
        source: the folder of a run, or one that `attnzoo export` wrote.
        on: names of tasks and their options; a run's own task keeps the run's options but for those given. None: the
            run's own task.
        lengths: tokens per row; none: the run's context length, or for a folder a usual number.
        rows: per task and length.
        seed: of the rows.
        device: where the model goes.

    Raises:
        FileNotFoundError: neither is there, or no checkpoint.
        ValueError: no such task or option, no task at all, or one whose tokens mean something else to the run.
    """
    own, own_options, context = None, {}, None
    if (source / "config.yaml").is_file():
        model, config = load_run(source, device)
        own, own_options, context = config.data.task, config.data.task_options, config.data.context_length
        if own is None:
            raise ValueError(f"{str(source)!r} was trained on {config.data.title!r}, not on a task")
    elif (source / "config.json").is_file():
        model = of_folder(source, device).eval()
    else:
        raise FileNotFoundError(f"expected a run or a model folder, got {str(source)!r}")
    if own is not None and not on:
        on = [(own, {})]
    if not on:
        raise ValueError(f"expected a task to ask: {str(source)!r} does not say on which it was trained")
    asked = []
    for name, options in on:
        options = {**(own_options if name == own else {}), **options}
        task = build_task(name, options)
        if own is not None and list(task.words) != list(build_task(own, own_options).words):
            raise ValueError(f"the run was trained on {own!r}, whose tokens are others than those of {name!r}")
        if len(task.words) > model.config.vocab_size:
            raise ValueError(f"the task {name!r} has {len(task.words)} tokens, the model {model.config.vocab_size}")
        asked.append((", ".join([name, *(f"{key}={value}" for key, value in options.items())]), task))
    for title, task in asked:
        for length in lengths or [context or task.length]:
            yield title, measure_answers(model, Examples(task, length, seed, held_out=True), rows)
