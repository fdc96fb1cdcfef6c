"""Evaluation of a run or a model folder on synthetic tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attnzoo.data.tasks import Examples, Task, build_task
from attnzoo.evaluation.answers import Answers, measure_answers
from attnzoo.trained.model import TrainedModel, load_trained


def evaluate(
    source: Path | TrainedModel,
    on: Sequence[tuple[str, Mapping[str, Any]]] = (),
    lengths: Sequence[int] = (),
    rows: int = 256,
    seed: int = 0,
    device: str = "cpu",
) -> Iterator[tuple[str, Answers]]:
    """Yield the title and the result of each task at each length, on held-out rows, as they are measured.

    Args:
        source: the folder of a run, or of a model as :func:`~attnzoo.trained.model.load_trained` takes it; or a loaded
            model.
        on: names of tasks and their options; a run's own task keeps the run's options but for those given. None: the
            run's own task.
        lengths: tokens per row; none: the run's context length, or for a folder a usual number.
        rows: per task and length.
        seed: seed of the rows.
        device: the device of the model.

    Raises:
        FileNotFoundError: no run or model folder, or no checkpoint.
        ValueError: no such task or option, no task at all, or one whose tokens mean something else to the run.
    """
    subject = source if isinstance(source, TrainedModel) else load_trained(source, device)
    if not on and subject.task is None:
        said = "does not say on which it was trained"
        if subject.config is not None:
            said = f"is of {subject.config.data.title!r}, not of a task"
        raise ValueError(f"expected a task to ask: {subject.title} {said}")
    built = [task_for(subject, name, options) for name, options in on or [(subject.task or "", {})]]
    for title, task in built:
        for length in lengths or [subject.context or task.length]:
            yield title, measure_answers(subject.model, Examples(task, length, seed, held_out=True), rows)


def task_for(subject: TrainedModel, name: str, options: Mapping[str, Any]) -> tuple[str, Task]:
    """The title and the task of a name, whose options default to those of the model's own task.

    Raises:
        ValueError: no such task or option, or one whose tokens mean something else to the model.
    """
    own = {} if subject.config is None or name != subject.task else subject.config.data.task_options
    options = {**own, **options}
    task, title = build_task(name, options), ", ".join([name, *(f"{key}={value}" for key, value in options.items())])
    if subject.config is not None and subject.folder is not None:  # fresh weights fit any tokens
        trained = subject.config.data
        if trained.task is None:
            raise ValueError(f"{subject.title} is of {trained.title!r}, not of a task: it cannot be asked {name!r}")
        if list(task.words) != list(build_task(trained.task, trained.task_options).words):
            asked = title if name == trained.task else name  # the same task with other options: name the options
            others = f"whose tokens are others than those of {asked!r}"
            raise ValueError(f"the run was trained on {trained.task!r}, {others}")
    if len(task.words) > subject.model.config.vocab_size:
        raise ValueError(f"the task {name!r} has {len(task.words)} tokens, the model {subject.model.config.vocab_size}")
    return title, task
