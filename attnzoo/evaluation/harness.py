"""An adapter to lm-eval's tasks (EleutherAI's Language Model Evaluation Harness).

Needs lm-eval (`pip install 'attnzoo[eval]'`). Its stock tasks fetch their questions from a network; a task defined by a
file of one's own, with questions in a file beside it, needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from torch import Tensor, nn

from attnzoo.data.tasks import UNASKED
from attnzoo.data.unfolding import Unfolding
from attnzoo.errors import nearest, unknown
from attnzoo.evaluation.scores import score_targets

TOKENS = 2**15  # tokens of a forward pass, if a row is not longer
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
    """

    task: str
    window: int | None
    limit: int | None
    shots: int | None
    samples: dict[str, int]
    scores: dict[str, dict[str, float]]


class HarnessModel(LM):  # type: ignore[misc]
    """A model with the interface that lm-eval calls.

    The window rule: a row begins with what `encode` puts before every text, or else, where the context is empty, with
    `end`; then come the context and what is asked. A row longer than the window is cut to its last tokens. A text that
    is scored whole is cut into windows of which each predicts tokens that no other does, the first with nothing before
    it and the last as full as the others. Rows are sorted by length, the longest first, and padded at the end, which no
    token sees.

    Args:
        model: an :class:`attnzoo.models.LanguageModel`.
        encode: a text's tokens, behind what stands before every text.
        decode: the text of tokens; a :class:`~attnzoo.data.unfolding.Decoding` knows special tokens, at whose names a
            text can be asked to end.
        end: the token that ends a document; None where there is none.
        window: most tokens that the model is given; None for no limit.
        stop: other tokens that end what it writes.

    Raises:
        ValueError: a window below 1.
    """

    def __init__(
        self, model: nn.Module, encode: Callable[[str], list[int]], decode: Callable[[Sequence[int]], str],
        end: int | None, window: int | None = None, stop: Collection[int] = (),
    ) -> None:  # fmt: skip
        super().__init__()
        if window is not None and window < 1:
            raise ValueError(f"window: expected at least 1 token, got {window}")
        self.model, self.encode, self.decode, self.end, self.window = model, encode, decode, end, window
        self.stop = frozenset(stop) | (frozenset() if end is None else {end})
        self.before = encode("")
        self._device = next(model.parameters()).device

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
                `max_gen_toks`, `do_sample` with `temperature` and `top_k`; `top_p` must be 1.

        Raises:
            ValueError: another setting, or a window without room for a context.
        """
        order = sorted(range(len(requests)), key=lambda n: (str(requests[n].args[1]), -len(requests[n].args[0])))
        texts, first = [""] * len(requests), 0
        while first < len(order):
            settings = requests[order[first]].args[1]
            contexts: list[list[int]] = []
            most = int(settings.get("max_gen_toks", MOST))
            if self.window is not None and self.window <= most:
                raise ValueError(
                    f"window: expected more than the {most} tokens to generate (max_gen_toks), got {self.window}"
                )
            for number in order[first:]:
                context, other = requests[number].args
                tokens = [*self._start(context), *self._tokens(context)]
                tokens = tokens[most - self.window :] if self.window is not None else tokens
                longest = max(map(len, [*contexts, tokens])) + most
                if other != settings or (contexts and longest * (len(contexts) + 1) > TOKENS):
                    break
                contexts.append(tokens)
            for number, text in zip(order[first:], self._continued(contexts, settings, most), strict=False):
                texts[number] = text
            first += len(contexts)
        return texts

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

    @torch.inference_mode()
    def _continued(self, contexts: Sequence[list[int]], settings: Mapping[str, Any], most: int) -> list[str]:
        """The text generated after each context."""
        for name in settings:
            if name not in SETTINGS:
                raise unknown("setting", name, SETTINGS, of="generate_until")
        if settings.get("top_p", 1) != 1:
            raise ValueError(f"top_p: expected 1 in generate_until, got {settings['top_p']}")
        until = settings.get("until") or []
        until = [until] if isinstance(until, str) else list(until)
        length, model = max(map(len, contexts)), self.model
        tokens = torch.zeros(len(contexts), length, dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for line, context in enumerate(contexts):
            tokens[line, length - len(context) :] = torch.tensor(context)
            mask[line, length - len(context) :] = 1
        whole: Any = model
        cache, random = whole.new_cache(), torch.Generator(self._device).manual_seed(0)
        step, given = tokens.to(self._device), None if bool(mask.all()) else mask.to(self._device)
        new: list[list[int]] = [[] for _ in contexts]
        unfolding = [Unfolding(self.decode, stop=[text for text in until if text]) for _ in contexts]
        texts, open_rows = [""] * len(contexts), set(range(len(contexts)))
        for number in range(1, most + 1):
            hidden = whole.hidden(step, attention_mask=given, cache=cache)
            step, given = _drawn(whole.head(hidden[:, -1]).float(), settings, random), None
            for row in list(open_rows):
                token = int(step[row])
                ended = token in self.stop
                new[row] += [] if ended else [token]
                texts[row] += unfolding[row].after(new[row], ended or number == most)
                if ended or unfolding[row].ended:
                    open_rows.remove(row)
            if not open_rows:
                break
        return texts


def _drawn(logits: Tensor, settings: Mapping[str, Any], random: torch.Generator) -> Tensor:
    """The drawn tokens [B, 1] for logits [B, vocabulary]."""
    temperature = float(settings.get("temperature", 1.0)) if settings.get("do_sample") else 0.0
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if settings.get("top_k"):
        smallest = logits.topk(min(int(settings["top_k"]), logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # at most 0, at any temperature
    return torch.multinomial(logits.softmax(-1), 1, generator=random)


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield batches of row numbers, the longest rows first, with a bounded number of tokens including padding."""
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    first = 0
    while first < len(order):
        size = max(1, TOKENS // max(lengths[order[first]], 1))
        yield order[first : first + size]
        first += size


def run_harness(
    model: nn.Module, encode: Callable[[str], list[int]], decode: Callable[[Sequence[int]], str], end: int | None,
    task: str, limit: int | None = None, shots: int | None = None, window: int | None = None,
    stop: Collection[int] = (),
) -> HarnessScores:  # fmt: skip
    """The scores of a model on one of lm-eval's tasks, or on a task that a file defines.

    Args:
        model: as :class:`HarnessModel` takes it, as `encode`, `decode`, `end`, `window` and `stop`.
        task: a name that lm-eval knows, or a YAML or JSON file in its format, with its `data_files` beside it.
        limit: questions that are asked; None for all.
        shots: examples before each; None for what the task says.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a number out of range, a file that is no task, a name that lm-eval does not know, or what it
            refuses.
    """
    for name, least, number in (("limit", 1, limit), ("shots", 0, shots)):
        if number is not None and number < least:
            raise ValueError(f"{name}: expected at least {least}, got {number}")
    adapter = HarnessModel(model, encode, decode, end, window, stop)
    own = task.endswith((".yaml", ".yml", ".json"))
    asked: Any = _definition(Path(task)) if own else task
    manager = TaskManager(include_defaults=not own)  # reading all stock tasks takes a minute
    if not own and task not in manager.all_tasks:
        close = nearest(task, manager.all_tasks)
        raise ValueError(
            f"task: lm-eval has none of the name {task!r}" + (f"; did you mean {close!r}?" if close else "")
        )
    found = simple_evaluate(
        adapter, tasks=[asked], num_fewshot=shots, limit=limit, log_samples=False, bootstrap_iters=1000,
        task_manager=manager,
    )  # fmt: skip
    scores = {
        name: {key.removesuffix(",none"): float(value) for key, value in row.items() if isinstance(value, int | float)}
        for name, row in found["results"].items()
    }
    samples = {name: int(count["effective"]) for name, count in found["n-samples"].items()}
    return HarnessScores(task, window, limit, shots, samples, scores)


def _definition(path: Path) -> dict[str, Any]:
    """The definition of a task in a file, with absolute paths of its data."""
    import yaml  # type: ignore[import-untyped]

    if not path.is_file():
        raise FileNotFoundError(f"task: there is no file {str(path)!r}")
    try:
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"task: {path} is not readable: {error}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("task"), str):
        raise ValueError(f"task: expected {path} to name a task (task: NAME), got {fields!r}")
    options = fields.get("dataset_kwargs") or {}
    files = options.get("data_files")
    if files is not None:
        options = {**options, "data_files": _beside(path.resolve().parent, files)}
    return {**fields, "dataset_kwargs": options}


def _beside(folder: Path, files: Any) -> Any:
    if isinstance(files, str):
        return str(folder / files)
    if isinstance(files, list):
        return [_beside(folder, file) for file in files]
    return {split: _beside(folder, file) for split, file in files.items()}
