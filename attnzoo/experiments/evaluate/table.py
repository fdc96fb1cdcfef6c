"""The table of evaluations by name: their measurement, options and presentation."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from attnzoo.data.tasks import TASKS, is_task
from attnzoo.errors import check_kinds, unknown
from attnzoo.experiments.evaluate import conversion, forgetting, lines, measures, pictures
from attnzoo.experiments.evaluate.measures import Common
from attnzoo.trained.model import TrainedModel


@dataclass(frozen=True)
class Evaluation:
    """An evaluation by name.

    Args:
        measure: `measure(subject, common, **options)` gives the result, a dataclass; its keyword-only parameters are
            the options, with their defaults.
        reads: the fields of :class:`Common` that it reads.
        lines: the result as lines of at most 80 characters.
        picture: the result as a figure; None where there is none.
        page: the result and the model's title as a page of HTML, likewise.
    """

    measure: Callable[..., Any]
    reads: tuple[str, ...]
    lines: Callable[[Any], list[str]]
    picture: Callable[[Any], Figure] | None
    page: Callable[[Any, str], str] | None = None

    @property
    def summary(self) -> str:
        """A sentence about what it measures."""
        return " ".join((inspect.getdoc(self.measure) or "").partition("\n\n")[0].split())

    @property
    def words(self) -> dict[str, str]:
        """The description of each option."""
        text = (inspect.getdoc(self.measure) or "").partition("Args:\n")[2]
        return {
            name: " ".join(said.split()) for name, said in re.findall(r"^    (\w+): (.*(?:\n     .*)*)", text, re.M)
        }

    @property
    def options(self) -> dict[str, Any]:
        """The options with their defaults."""
        parameters = inspect.signature(self.measure).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


EVALUATIONS: dict[str, Evaluation] = {
    "loss": Evaluation(measures.loss, ("length", "text", "over"), lines.loss, pictures.loss),
    "lengths": Evaluation(measures.lengths, ("length", "rows", "seed"), lines.answers, pictures.lengths),
    "haystack": Evaluation(measures.haystack, ("length", "rows", "seed", "text"), lines.haystack, pictures.haystack),
    "pruning": Evaluation(measures.pruning, ("length", "text"), lines.pruning, pictures.pruning),
    "eps": Evaluation(measures.eps, ("length", "text"), lines.eps, pictures.eps),
    "context": Evaluation(measures.context, ("length", "text"), lines.context, pictures.context),
    "maps": Evaluation(measures.maps, ("text",), lines.maps, pictures.maps),
    "memory": Evaluation(measures.memory, ("length", "text"), forgetting.lines, forgetting.picture, forgetting.page),
    "conversion": Evaluation(measures.conversion, ("length", "text"), conversion.lines, None),
    "harness": Evaluation(measures.harness, ("length",), lines.harness, None),
}


def evaluation(name: str) -> Evaluation:
    """The evaluation of that name; a task's name means its answers.

    Raises:
        ValueError: no such evaluation; the message gives the nearest name.
    """
    if is_task(name):
        return Evaluation(measures.ask_task, ("length", "rows", "seed"), lines.answers, None)
    if name not in EVALUATIONS:
        raise unknown("evaluation", name, (*EVALUATIONS, *TASKS), see="attnzoo evaluate --list")
    return EVALUATIONS[name]


def measure(subject: TrainedModel, name: str, options: Mapping[str, Any], common: Common) -> Any:
    """The result of an evaluation, a dataclass.

    Args:
        subject: the model to measure.
        name: name of the evaluation or of a task.
        options: its options, by name.
        common: the shared options, of which it gets those that it reads.

    Raises:
        ValueError: no such evaluation or option, or one of the wrong kind or out of range.
    """
    found = evaluation(name)
    common = Common(**{field: getattr(common, field) for field in found.reads})
    if is_task(name):
        return measures.ask_task(subject, common, name, options)
    signature = inspect.signature(found.measure)
    if all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values()):
        for option in options:
            if option not in found.options:
                raise unknown("option", option, found.options, of=f"the evaluation {name!r}")
    for option, default in found.options.items():
        if default is inspect.Parameter.empty and option not in options:
            raise ValueError(f"{name}: expected {option}=..., got none")
    check_kinds(options, {option: signature.parameters[option].annotation for option in found.options})
    return found.measure(subject, common, **options)


def unread(names: Sequence[str], given: Sequence[str]) -> str | None:
    """The first given field of :class:`Common` that none of the named evaluations reads, or None."""
    return next((field for field in given if not any(field in evaluation(name).reads for name in names)), None)
