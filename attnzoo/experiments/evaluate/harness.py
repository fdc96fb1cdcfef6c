"""An adapter to lm-eval's tasks (EleutherAI's Language Model Evaluation Harness).

Needs lm-eval (`pip install 'attnzoo[eval]'`). Its stock tasks fetch their questions from a network; a task defined by a
file of one's own, with questions in a file beside it, needs none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from attnzoo.data.tasks import UNASKED
from attnzoo.data.unfolding import Unfolding
from attnzoo.errors import did_you_mean, unknown
from attnzoo.evaluation.scores import score_targets
from attnzoo.experiments.evaluate.suites import AVERAGED, SUITES
from attnzoo.files import run_file
from attnzoo.models.generation.engine import Generator
from attnzoo.trained.model import TrainedModel

TOKENS = 2**15  # tokens of a forward pass, if a row is not longer
FILES = (".yaml", ".yml", ".json")  # that define a task
MOST = 256  # default of the tokens to generate
SETTINGS = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p")


@dataclass(frozen=True)
class HarnessScores:
    """The scores that lm-eval gives a model.

    Args:
        task: its name, or the file that defines it.
        window: most tokens that the model is given; None for as many as there are.
        limit: questions that were asked at most; None for all.
        shots: examples before each; None for what the task says.
        samples: questions that were asked, by the name of the task or of its parts.
        scores: the metrics by name, by the name of the task or of its parts.
        average: of the accuracies of a suite, as its table has it.
    """

    task: str
    window: int | None
    limit: int | None
    shots: int | None
    samples: dict[str, int]
    scores: dict[str, dict[str, float]]
    average: float | None = None


class HarnessModel(LM):  # type: ignore[misc]
    """A model with the interface that lm-eval calls.

    The window rule: a row begins with what `encode` puts before every text, or else, where the context is empty, with
    `end`; then come the context and what is asked. A row longer than the window is cut to its last tokens. A text that
    is scored whole is cut into windows of which each predicts tokens that no other does, the first with nothing before
    it and the last as full as the others. Rows are sorted by length, the longest first, and padded at the end, which no
    token sees.

    Args:
        asked: the model with its tokenizer; a text can be asked to end at the name of a special token, too.
        window: most tokens that the model is given; None for no limit.

    Raises:
        ValueError: a window below 1.
    """

    def __init__(self, asked: TrainedModel, window: int | None = None) -> None:
        super().__init__()
        if window is not None and window < 1:
            raise ValueError(f"window: expected at least 1 token, got {window}")
        self.model, self.encode, self.decode, self.window = asked.model, asked.encode, asked.decode, window
        self.end, self.stop = asked.end, asked.stop
        self.before = asked.encode("")

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Log-likelihood in nats of a continuation after a context, and whether greedy decoding would give it.

        Args:
            requests: of lm-eval, with the arguments (context, continuation).

        Raises:
            ValueError: a continuation of no tokens, or that is longer than the window.
        """
        rows = []
        for context, continuation in (request.args for request in requests):
            tokens, asked = self._pair(context, continuation)
            if not asked or (self.window is not None and asked > self.window):
                most = "any number of" if self.window is None else f"the window's {self.window}"
                raise ValueError(f"continuation: expected 1 to {most} tokens, got {asked}")
            rows.append(self._row(tokens, asked))
        return [(-nats, greedy) for nats, greedy in self._scores(rows)]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Log-likelihood in nats of a whole text, in windows.

        Args:
            requests: of lm-eval, with the arguments (text,).
        """
        rows, owner = [], []
        for number, (text,) in enumerate(request.args for request in requests):
            tokens = [*self._start(), *self._tokens(text)]
            first = len(tokens) - len(self._tokens(text))
            size = self.window or len(tokens)
            for start in range(first, len(tokens), size):
                stop = min(start + size, len(tokens))
                rows.append(self._row(tokens[:stop], stop - start))
                owner.append(number)
        totals = [0.0] * len(requests)
        for number, (nats, _) in zip(owner, self._scores(rows), strict=True):
            totals[number] -= nats
        return totals

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """The continuations of contexts up to, and without, a stop text.

        Args:
            requests: of lm-eval, with the arguments (context, settings). Settings are `until` (a text or several),
                `max_gen_toks`, and `do_sample` with `temperature`, `top_k` and `top_p`.

        Raises:
            ValueError: another setting, one out of its range, or a window without room for a context.
        """
        asked = [self._continuation(*request.args) for request in requests]
        if not asked:
            return []
        longest = max(len(tokens) + most for tokens, most, _, _ in asked)
        generator = Generator(self.model, max(1, min(len(asked), TOKENS // longest)), longest, check_every=1)
        texts, unfolding = [""] * len(asked), dict[int, tuple[int, Unfolding]]()
        for number in sorted(range(len(asked)), key=lambda n: -len(asked[n][0])):
            tokens, most, until, sampling = asked[number]
            place = generator.add(tokens, most, stop=self.stop, seed=number, **sampling)
            unfolding[place] = number, Unfolding(self.decode, stop=until)
        for known in generator.stream():
            for place in known:
                request, (number, text) = generator.requests[place], unfolding[place]
                ended = request.tokens[-1] in request.stop
                texts[number] += text.after(request.tokens[:-1] if ended else request.tokens, request.done)
                if text.ended:
                    generator.cancel(place)
        return texts

    def _continuation(
        self, context: str, settings: Mapping[str, Any]
    ) -> tuple[list[int], int, list[str], dict[str, Any]]:
        """A context's tokens, how many may follow at most, the texts to stop at, and how tokens are drawn."""
        for name in settings:
            if name not in SETTINGS:
                raise unknown("setting", name, SETTINGS, of="generate_until")
        most, until = int(settings.get("max_gen_toks", MOST)), settings.get("until") or []
        if self.window is not None and self.window <= most:
            raise ValueError(
                f"window: expected more than the {most} tokens to generate (max_gen_toks), got {self.window}"
            )
        tokens = [*self._start(context), *self._tokens(context)]
        tokens = tokens[most - self.window :] if self.window is not None else tokens
        temperature = float(settings.get("temperature", 1.0)) if settings.get("do_sample") else 0.0
        sampling = {
            "temperature": temperature, "top_k": settings.get("top_k") or None, "top_p": float(settings.get("top_p", 1))
        }  # fmt: skip
        return tokens, most, [text for text in ([until] if isinstance(until, str) else until) if text], sampling

    def _tokens(self, text: str) -> list[int]:
        """The tokens of a text without the special tokens that the tokenizer puts before it."""
        return self.encode(text)[len(self.before) :]

    def _start(self, context: str = "") -> list[int]:
        if self.before or context:
            return self.before
        if self.end is None:
            raise ValueError("end: expected a token that ends documents, which stands before a text without a context")
        return [self.end]

    def _pair(self, context: str, continuation: str) -> tuple[list[int], int]:
        """The tokens of both texts, and the number of the continuation's, which gets spaces at the context's end.

        Where tokens merge across the border so that both texts have no more tokens than the context alone, the
        continuation's are those from the first different token on.
        """
        stripped = context.rstrip()
        tokens, before = self._tokens(context + continuation), self._tokens(stripped)
        asked = len(tokens) - len(before)
        if asked < 1:
            same = (one == other for one, other in zip(tokens, before, strict=False))
            asked = len(tokens) - sum(takewhile(bool, same))
        return [*self._start("" if asked == len(tokens) else stripped), *tokens], asked

    def _row(self, tokens: list[int], asked: int) -> tuple[list[int], int]:
        """The last ``window`` + 1 tokens, and the number of those that are scored."""
        return tokens if self.window is None else tokens[-self.window - 1 :], asked

    def _scores(self, rows: Sequence[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """The log-likelihood in nats of each row's scored end, and whether each of its tokens was the likeliest."""
        found = [(0.0, True)] * len(rows)
        for batch in _batches([len(tokens) - 1 for tokens, _ in rows]):
            length = len(rows[batch[0]][0]) - 1
            inputs = torch.zeros(len(batch), length, dtype=torch.long)
            targets = torch.full_like(inputs, UNASKED)
            for line, number in enumerate(batch):
                tokens, asked = rows[number]
                inputs[line, : len(tokens) - 1] = torch.tensor(tokens[:-1])
                targets[line, len(tokens) - 1 - asked : len(tokens) - 1] = torch.tensor(tokens[-asked:])
            nats, wrong = score_targets(self.model, inputs, targets)
            for number, sum_of, any_of in zip(batch, nats.sum(1).tolist(), wrong.any(1).tolist(), strict=True):
                found[number] = (sum_of, not any_of)
        return found


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield batches of row numbers, the longest rows first, with a bounded number of tokens including padding."""
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    first = 0
    while first < len(order):
        size = max(1, TOKENS // max(lengths[order[first]], 1))
        yield order[first : first + size]
        first += size


def run_harness(
    asked: TrainedModel,
    task: str,
    limit: int | None = None,
    shots: int | None = None,
    window: int | None = None,
    data: str | Path | None = None,
) -> HarnessScores:
    """The scores of a model on one of lm-eval's tasks, on a task that a file defines, or on a suite of tasks.

    Args:
        asked: the model with its tokenizer.
        task: a name that lm-eval knows, a YAML or JSON file in its format, with its `data_files` and functions beside
            it, or a name in :data:`~attnzoo.experiments.evaluate.suites.SUITES`, whose tasks give one metric each.
        limit: questions of each task that are asked; None for all.
        shots: examples before each; None for what the task says, and 0 in a suite.
        window: see :class:`HarnessModel`.
        data: a folder with the definitions of tasks by name, `piqa.yaml`, in place of lm-eval's own.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a number out of range, a file that is no task, a name that lm-eval does not know, or what it
            refuses.
    """
    for name, least, number in (("limit", 1, limit), ("shots", 0, shots)):
        if number is not None and number < least:
            raise ValueError(f"{name}: expected at least {least}, got {number}")
    adapter, columns = HarnessModel(asked, window), SUITES.get(task)
    names = list(dict.fromkeys(name for name, _ in columns)) if columns else [task]
    files = [Path(data, f"{name}.yaml") for name in names] if data else [Path(task)] if task.endswith(FILES) else []
    asked_shots = 0 if columns and shots is None else shots
    manager = TaskManager(include_defaults=not files)  # reading all stock tasks takes a minute
    for name in names if not files else ():
        if name not in manager.all_tasks:
            hint = did_you_mean(name, [*SUITES, *manager.all_tasks])
            raise ValueError(f"task: lm-eval has none of the name {name!r}{hint}")
    found = simple_evaluate(
        adapter, tasks=[_definition(file) for file in files] or names, num_fewshot=asked_shots,
        limit=limit, log_samples=False, bootstrap_iters=1000, task_manager=manager,
    )  # fmt: skip
    scores = {
        name: {key.removesuffix(",none"): float(value) for key, value in row.items() if isinstance(value, int | float)}
        for name, row in found["results"].items()
    }
    samples = {name: int(count["effective"]) for name, count in found["n-samples"].items()}
    average = None
    if columns:
        scores = _of_columns(scores, columns)
        shares = [scores[name][metric] for name, metric in columns if metric in AVERAGED]
        average = sum(shares) / len(shares) if shares else None
    return HarnessScores(task, window, limit, shots, samples, scores, average)


def _of_columns(
    scores: Mapping[str, Mapping[str, float]], columns: Sequence[tuple[str, str]]
) -> dict[str, dict[str, float]]:
    """The scores in a table's columns, with their standard errors.

    Raises:
        ValueError: a task does not give the metric of its column.
    """
    kept: dict[str, dict[str, float]] = {}
    for name, metric in columns:
        if metric not in scores[name]:
            raise ValueError(f"{name}: expected the metric {metric!r}, got {', '.join(scores[name]) or 'none'}")
        whole = {key: scores[name][key] for key in (metric, f"{metric}_stderr") if key in scores[name]}
        kept[name] = {**kept.get(name, {}), **whole}
    return kept


def _definition(path: Path) -> dict[str, Any]:
    """The definition of a task in a file, with absolute paths of its data and its functions as such."""
    import yaml

    if not path.is_file():
        raise FileNotFoundError(f"task: there is no file {str(path)!r}")

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        pass

    Loader.add_constructor("!function", lambda loader, node: _function(path, loader.construct_scalar(node)))
    try:
        fields = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"task: {path} is not readable: {error}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("task"), str):
        raise ValueError(f"task: expected {path} to name a task (task: NAME), got {fields!r}")
    options = fields.get("dataset_kwargs") or {}
    files = options.get("data_files")
    if files is not None:
        options = {**options, "data_files": _beside(path.resolve().parent, files)}
    return {**fields, "dataset_kwargs": options}


def _function(path: Path, name: str) -> Any:
    """The function MODULE.NAME of the file MODULE.py beside a task's file."""
    module, _, function = name.rpartition(".")
    file = path.with_name(f"{module}.py")
    if not file.is_file():
        raise FileNotFoundError(f"task: there is no file {str(file)!r}, from which {path} takes {name!r}")
    return getattr(run_file(file), function)


def _beside(folder: Path, files: Any) -> Any:
    if isinstance(files, str):
        return str(folder / files)
    if isinstance(files, list):
        return [_beside(folder, file) for file in files]
    return {split: _beside(folder, file) for split, file in files.items()}
