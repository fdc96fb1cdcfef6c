"""The measurements of the evaluations: functions whose keyword-only parameters are the options, and their results."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from attnzoo.algebra.pruning import Prune
from attnzoo.data import heldout_windows
from attnzoo.data.tasks import TASKS, Examples, Task
from attnzoo.data.tasks.haystack import MODES
from attnzoo.data.tasks.task import RoomError
from attnzoo.errors import unknown
from attnzoo.evaluation import (
    AttentionMaps,
    EffectiveContext,
    EpsSweep,
    LengthCurve,
    LossCurve,
    NeedlePicture,
    PrunedShares,
    default_epsilons,
    growing_lengths,
    measure_context,
    measure_lengths,
    measure_losses,
    measure_maps,
    measure_needle,
    measure_pruning,
    sweep_eps,
    synthetic_needle,
    text_needle,
)
from attnzoo.experiments.evaluate.answers import task_for
from attnzoo.experiments.evaluate.conversion import Conversion, measure_conversion
from attnzoo.experiments.evaluate.forgetting import MemoryCurves, measure_memory
from attnzoo.trained.model import TrainedModel, held_out_text, load_trained
from attnzoo.training.checkpoint import CheckpointError, checkpoints_in, step_of
from attnzoo.training.digests import MODEL, damage

if TYPE_CHECKING:
    from attnzoo.experiments.evaluate.harness import HarnessScores

logger = logging.getLogger("attnzoo.evaluation")

ROWS, SEED = 256, 0
FACTOR = 8  # default window of a loss by position, in training contexts


@dataclass(frozen=True)
class Common:
    """The options shared by several evaluations.

    Args:
        length: tokens per row or window; empty for each evaluation's own choice.
        rows: of a task, per length; None for 256, or 32 for a haystack's cell.
        seed: of the rows; None for 0.
        text: a text file, a folder of them or `stdlib`; None for the model's own held-out data.
        over: the process group that shares each window; None for this process alone.
    """

    length: tuple[int, ...] = ()
    rows: int | None = None
    seed: int | None = None
    text: str | Path | None = None
    over: Any = None


@dataclass(frozen=True)
class NeedlePictures:
    """The results of a haystack evaluation in one or both modes.

    Args:
        pictures: one per mode.
        too_short: default lengths that were left out, as the question does not fit into them.
    """

    pictures: tuple[NeedlePicture, ...]
    too_short: tuple[int, ...] = ()


@dataclass(frozen=True)
class PruningHistory:
    """The pruned shares of a model, and of its run's existing earlier checkpoints.

    Args:
        steps: the shares, oldest checkpoint first, the model itself last.
    """

    steps: tuple[PrunedShares, ...]


def loss(subject: TrainedModel, common: Common, *, factor: int | None = None, tokens: int = 65536) -> LossCurve:
    """Loss by position, L(i), and perplexity by context length, P(l), on held-out text.

    Args:
        factor: windows of so many training contexts; None for 8, or for as many as leave room for two windows.
        tokens: held-out, in all windows, of which there is at least one.
    """
    if factor is None:
        factor = FACTOR if common.length else max(1, min(FACTOR, tokens // (2 * _context(subject))))
    windows = _windows(subject, common, factor, tokens)
    if not common.length:
        contexts = "a training context" if factor == 1 else f"{factor} training contexts"
        logger.warning("loss: windows of %d tokens, %s, %d of them", windows.shape[1] - 1, contexts, len(windows))
    return measure_losses(subject.model, windows, subject.context, common.over)


def lengths(
    subject: TrainedModel, common: Common, *, task: str | None = None, factor: int = 8, **options: Any
) -> LengthCurve:
    """Wrong answers to a task on rows that grow to several training contexts.

    Args:
        task: the model's own, if none is given; further options are the task's.
        factor: longest row, in training contexts.
    """
    if task is None and subject.task is None:
        raise ValueError(f"task: expected one of {', '.join(TASKS)}, for {subject.title} has none of its own")
    built = task_for(subject, task or subject.task or "", options)[1]
    return _answers(subject, common, built, common.length or growing_lengths(_context(subject, built.length), factor))


def ask_task(subject: TrainedModel, common: Common, name: str, options: Mapping[str, Any]) -> LengthCurve:
    """The answers to a task at each length."""
    _, built = task_for(subject, name, options)
    return _answers(subject, common, built, common.length or (subject.context or built.length,))


def _answers(subject: TrainedModel, common: Common, task: Task, lengths: Sequence[int]) -> LengthCurve:
    rows, seed = common.rows or ROWS, common.seed or SEED
    return measure_lengths(subject.model, task, lengths, rows, seed, subject.context)


def haystack(
    subject: TrainedModel, common: Common, *, mode: str = "both", digits: int | None = None, depths: int = 5
) -> NeedlePictures:
    """A needle by depth and length: in a text for models of texts, else by the task `needle`.

    Args:
        mode: easy, standard or both.
        digits: of the number in the needle; none for as many as a run on `needle` was trained with, else 4.
        depths: how many, evenly spaced from the row's beginning to the question.
    """
    if mode not in (*MODES, "both"):
        raise unknown("mode", mode, (*MODES, "both"))
    if depths < 1:
        raise ValueError(f"depths: expected at least 1, got {depths}")
    at = tuple(number / max(depths - 1, 1) for number in range(depths))
    own = subject.task is not None
    if digits is None:
        trained = subject.config.data.task_options if subject.config and subject.task == "needle" else {}
        digits = int(trained.get("digits", 4))
    hay = None if own and common.text is None else held_out_text(subject, common.text)
    needles = {}
    for one in MODES if mode == "both" else (mode,):
        if hay is None:
            task_for(subject, "needle", {"mode": one, "digits": digits})  # raises unless its tokens are the model's
            needles[one] = synthetic_needle(one, digits)
        else:
            needles[one] = text_needle(hay, subject.encode, one, digits)
    usual = common.length or tuple(sorted({_context(subject) * n // 2 for n in (1, 2, 4)}))
    lengths = common.length or tuple(T for T in usual if all(_has_room(one(0), T) for one in needles.values())) or usual
    rows, seed = common.rows or 32, common.seed or SEED
    found = [
        measure_needle(subject.model, needle, one, lengths, at, rows, seed, subject.context)
        for one, needle in needles.items()
    ]
    return NeedlePictures(tuple(found), tuple(T for T in usual if T not in lengths))


def _has_room(task: Task, length: int) -> bool:
    try:
        task.draw(np.random.default_rng(0), length)
    except RoomError:
        return False
    return True


def pruning(
    subject: TrainedModel, common: Common, *, eps: float = Prune().eps, bound: str = "tail", history: bool = True
) -> PruningHistory:
    """Share of the attention that pruning leaves out, per head and layer, at every checkpoint of a run.

    Args:
        eps: weight that a row may lose.
        bound: tail or paper.
        history: also of the run's earlier checkpoints.
    """
    window = _row(subject, common)[0]
    prune = Prune(eps, bound)  # type: ignore[arg-type]
    weight, steps = next(subject.model.parameters()), []
    if history and subject.folder is not None and subject.checkpoint is not None:
        for checkpoint in checkpoints_in(subject.folder / "checkpoints"):
            if step_of(checkpoint) < step_of(subject.checkpoint):
                earlier = _earlier(subject.folder, checkpoint, weight)
                steps.append(measure_pruning(earlier.model, window, prune, step_of(checkpoint)))
    now = None if subject.checkpoint is None else step_of(subject.checkpoint)
    return PruningHistory((*steps, measure_pruning(subject.model, window, prune, now)))


def _earlier(folder: Path, checkpoint: Path, like: Tensor) -> TrainedModel:
    """The model of an earlier checkpoint, on the device and in the dtype of ``like``."""
    try:
        wrong = damage(checkpoint, MODEL)
        if wrong is not None:
            raise CheckpointError(wrong)
        return load_trained(folder, str(like.device), like.dtype, checkpoint)
    except CheckpointError as error:
        raise CheckpointError(
            f"history: {error}; move {checkpoint} away to measure the others, or give history=false for the newest"
        ) from error


def eps(
    subject: TrainedModel,
    common: Common,
    *,
    least: float = 1e-8,
    most: float = 0.1,
    count: int = 8,
    bound: str = "tail",
    tokens: int = 16384,
) -> EpsSweep:
    """Loss, kept share and time by the eps of pruning.

    Args:
        least: smallest eps.
        most: largest eps.
        count: how many, evenly spaced by their logarithms; the default of pruning comes beside them.
        bound: tail or paper.
        tokens: held-out, in all windows.
    """
    windows = _windows(subject, common, 1, tokens)
    return sweep_eps(subject.model, windows, default_epsilons(least, most, count), bound)


def context(subject: TrainedModel, common: Common, *, eps: float = 0.01) -> EffectiveContext:
    """Effective context per head: the newest keys that hold all but eps of a row's weight.

    Args:
        eps: weight that may lie before them.
    """
    return measure_context(subject.model, _row(subject, common)[0], eps)


def maps(
    subject: TrainedModel, common: Common, *, tokens: int = 32, start: int = 0, layer: int | None = None
) -> AttentionMaps:
    """Attention weights and forget gates of a piece of text, with its tokens on the axes.

    Args:
        tokens: in the piece.
        start: first token of it in the held-out text, or in a row of the task that the model was trained on.
        layer: one of the layers; none for all.
    """
    if tokens < 1 or start < 0:
        raise ValueError(f"tokens, start: expected at least 1 and 0, got {tokens}, {start}")
    if subject.task is not None and common.text is None:
        row, names = _row(subject, common)
        piece, room = row[start : start + tokens], f"{len(row)} of the row"
        words = [names[token] for token in piece.tolist()]
    else:
        text = held_out_text(subject, common.text)
        piece, room = torch.from_numpy(text[start : start + tokens].astype("int64")), f"{len(text)} of the text"
        words = [subject.decode([token]) for token in piece.tolist()]
    if len(piece) < tokens:
        raise ValueError(f"start: expected room for {tokens} tokens in the {room}, got {start}")
    return measure_maps(subject.model, piece, words, None if layer is None else [layer])


def memory(
    subject: TrainedModel,
    common: Common,
    *,
    rule: str | None = None,
    halvings: int = 5,
    tokens: int = 8192,
    piece: int = 512,
) -> MemoryCurves:
    """Loss when a head may hold only so many keys, by what says which go, and a text by when its tokens went.

    Args:
        rule: by which tokens of the text go; none for the layers' forget networks, or h2o where there are none.
        halvings: limits, from half of a window on.
        tokens: held-out, in all windows.
        piece: tokens of the text at most; a head may hold a quarter of them.
    """
    windows = _windows(subject, common, 1, tokens)
    if halvings < 1 or piece < 1:
        raise ValueError(f"halvings, piece: expected at least 1, got {halvings}, {piece}")
    text = windows[0, : min(piece, windows.shape[1] - 1)]
    words = [subject.decode([token]) for token in text.tolist()]
    windows = windows.to(next(subject.model.parameters()).device)
    return measure_memory(subject.model, windows, text, words, halvings, rule)


def conversion(subject: TrainedModel, common: Common, *, original: str, tokens: int = 16384) -> Conversion:
    """Loss, L(i), pruned share and speed beside those of the model that this one was converted from.

    Args:
        original: that model, a run or a folder.
        tokens: held-out, in all windows.
    """
    weight = next(subject.model.parameters())
    before = load_trained(Path(original), str(weight.device), weight.dtype)
    return measure_conversion(before, subject, _windows(subject, common, 1, tokens))


def harness(
    subject: TrainedModel,
    common: Common,
    *,
    task: str,
    limit: int | None = None,
    shots: int | None = None,
    data: str | None = None,
) -> HarnessScores:
    """A task of lm-eval's harness, by its name or by the file that defines it, or a table of tasks.

    Args:
        task: a name that lm-eval knows, a YAML file, or fox_table1, fox_table2 (LongBench), fox_table7.
        limit: questions of a task that are asked; none for all.
        shots: examples before each; none for what the task says, and 0 in a table.
        data: a folder with the definitions of the tasks, by name; none for lm-eval's own.
    """
    from attnzoo.experiments.evaluate.harness import run_harness

    if len(common.length) > 1:
        raise ValueError(f"length: expected one, the window of the model, got {list(common.length)}")
    most = common.length[0] if common.length else subject.context
    return run_harness(subject, task, limit, shots, most, data)


def _context(subject: TrainedModel, usual: int | None = None) -> int:
    """The tokens per training sequence, or ``usual`` where unknown."""
    context = subject.context or usual
    if context is None:
        raise ValueError(f"length: expected a number of tokens, for {subject.title} does not say its training context")
    return context


def _windows(subject: TrainedModel, common: Common, factor: int, tokens: int) -> Tensor:
    """Held-out windows of ``factor`` training contexts, or of the given length, ``[N, length + 1]``."""
    if factor < 1 or tokens < 1:
        raise ValueError(f"factor, tokens: expected at least 1, got {factor}, {tokens}")
    if len(common.length) > 1:
        raise ValueError(f"length: expected one, for these windows are of one length, got {list(common.length)}")
    length = common.length[0] if common.length else _context(subject) * factor
    name = "the held-out split" if common.text is None else f"text: {str(common.text)!r}"
    return torch.from_numpy(heldout_windows(held_out_text(subject, common.text), length, tokens, name))


def _row(subject: TrainedModel, common: Common) -> tuple[Tensor, Sequence[str]]:
    """A row of tokens ``[T]`` with the tokens in print: a held-out row of the run's task, or a piece of text."""
    if subject.task is None or common.text is not None:
        return _windows(subject, common, 1, 1)[0, :-1], ()
    if len(common.length) > 1:
        raise ValueError(f"length: expected one, for one row is read, got {list(common.length)}")
    task = task_for(subject, subject.task, {})[1]
    length = common.length[0] if common.length else _context(subject)
    return torch.from_numpy(Examples(task, length, common.seed or SEED, held_out=True)[0][0]), task.words
