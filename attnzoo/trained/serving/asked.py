"""The fields of a request in OpenAI's form, checked; what is not served is refused by name."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from attnzoo.errors import check_kinds, did_you_mean
from attnzoo.models.generation.sampling import Sampling
from attnzoo.trained.model import TrainedModel
from attnzoo.trained.serving.worker import WantedText

KINDS = {"max_tokens": "int", "temperature": "float", "top_p": "float", "top_k": "int", "seed": "int", "n": "int",
         "stream": "bool", "model": "str", "user": "str"}  # fmt: skip
FIELDS = (*KINDS, "stop", "stream_options")
NEUTRAL: dict[str, tuple[Any, ...]] = {  # fields of which only the value that changes nothing is served
    "best_of": (1,), "echo": (False,), "suffix": ("",), "logprobs": (False,), "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0), "logit_bias": ({},),
}  # fmt: skip
MOST = 128  # sequences of one request


@dataclass(frozen=True)
class CompletionRequest:
    """A request that can be served.

    Args:
        wanted: its sequences.
        stream: whether pieces are sent as they are drawn.
        usage: whether a stream ends with the counts of tokens.
    """

    wanted: tuple[WantedText, ...]
    stream: bool
    usage: bool


class FieldError(ValueError):
    """A field of a request that cannot be served; the message begins with its name."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name}: {problem}")
        self.name = name


@dataclass(frozen=True)
class Reader:
    """The readings of requests to one model.

    Args:
        source: the model with its tokenizer.
        name: the model's name in requests.
        limit: most tokens of a sequence, its prompt included.
        template: a function from checked chat messages to the prompt's text; None without a chat template.
    """

    source: TrainedModel
    name: str
    limit: int
    template: Callable[[list[dict[str, str]]], str] | None = None

    def completion(self, fields: Mapping[str, Any]) -> CompletionRequest:
        """A request of ``/v1/completions``.

        Raises:
            FieldError: a field that is unknown, missing, of another kind or out of its range.
        """
        given = _known(fields, ("prompt", *FIELDS))
        if "prompt" not in given:
            raise FieldError("prompt", "expected a text, tokens, or a list of either, got none")
        prompt = given["prompt"]
        several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        return self._asked(given, [self._tokens(one) for one in (prompt if several else [prompt])], 16)

    def chat(self, fields: Mapping[str, Any]) -> CompletionRequest:
        """A request of ``/v1/chat/completions``; raises as :meth:`completion`."""
        given = _known(fields, ("messages", "max_completion_tokens", *FIELDS))
        if self.template is None:
            raise FieldError("messages", "the model's tokenizer has no chat template: /v1/completions takes a text")
        if "max_completion_tokens" in given:
            given["max_tokens"] = given.pop("max_completion_tokens")
        messages = given.get("messages")
        if not isinstance(messages, list) or not messages:
            raise FieldError("messages", f"expected a list of at least one message, got {messages!r}")
        tokens = self.source.rendered(self.template([_message(one) for one in messages]))
        return self._asked(given, [self._checked(tokens)], None)

    def _tokens(self, prompt: Any) -> list[int]:
        if isinstance(prompt, list):
            return self._checked(prompt)
        if not isinstance(prompt, str):
            raise FieldError("prompt", f"expected a text, tokens, or a list of either, got {prompt!r}")
        return self._checked(self.source.encode(_text("prompt", prompt)))

    def _checked(self, tokens: list[Any]) -> list[int]:
        size = self.source.model.config.vocab_size
        for token in tokens:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < size:
                raise FieldError("prompt", f"expected a text, or tokens from 0 to {size - 1}, got {token!r}")
        if not tokens:
            raise FieldError("prompt", "expected at least one token, got none")
        if len(tokens) >= self.limit:
            raise FieldError(
                "prompt", f"expected at most {self.limit - 1} tokens (--max-tokens {self.limit}), got {len(tokens)}"
            )
        return tokens

    def _asked(self, given: dict[str, Any], prompts: list[list[int]], default: int | None) -> CompletionRequest:
        try:
            check_kinds(given, KINDS)
            stops, usage = _stops(given.get("stop", [])), _usage(given)
            number, new = given.get("n", 1), given.get("max_tokens", default)
            if not 1 <= number <= MOST // len(prompts):
                raise FieldError("n", f"expected 1 to {MOST} sequences, got {number} of {len(prompts)} prompts")
            left = self.limit - max(map(len, prompts))
            if new is not None and not 1 <= new <= left:
                held = f"after {self.limit - left} tokens of the prompt (--max-tokens {self.limit})"
                raise FieldError("max_tokens", f"expected from 1 to {left} {held}, got {new}")
            seed = given.get("seed", secrets.randbelow(2**31))
            top_k = None if given.get("top_k") in (0, -1) else given.get("top_k")  # vLLM's words for all tokens
            drawn = {name: given[name] for name in ("temperature", "top_p") if name in given}
            samplings = [Sampling(top_k=top_k, seed=seed + each, **drawn) for each in range(number)]
        except FieldError:
            raise
        except ValueError as error:
            name, _, problem = str(error).partition(": ")
            raise FieldError(name, problem) from None
        wanted = (
            WantedText(prompt, self.limit - len(prompt) if new is None else new, sampling, stops)
            for prompt in prompts for sampling in samplings
        )  # fmt: skip
        return CompletionRequest(tuple(wanted), given.get("stream", False), usage)


def _known(fields: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The fields that are not null, which all have a meaning here."""
    given = {name: value for name, value in fields.items() if value is not None}
    for name, value in given.items():
        if name in NEUTRAL:
            if not any(type(value) is type(one) and value == one for one in NEUTRAL[name]):
                raise FieldError(name, f"expected {NEUTRAL[name][0]!r}, for nothing else is served, got {value!r}")
        elif name not in names:
            chat = ": /v1/chat/completions takes messages" if name == "messages" else did_you_mean(name, names)
            raise FieldError(name, "no such field is served" + chat)
    return {name: value for name, value in given.items() if name not in NEUTRAL}


def _text(name: str, text: str) -> str:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise FieldError(name, f"expected text, got half of a surrogate pair in {text[:40]!r}")
    return text


def _stops(given: Any) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise FieldError("stop", f"expected a text of at least one character or a list of them, got {given!r}")
    return tuple(_text("stop", stop) for stop in stops)


def _usage(given: Mapping[str, Any]) -> bool:
    options = given.get("stream_options", {})
    if not isinstance(options, dict) or options.keys() - {"include_usage"}:
        raise FieldError("stream_options", f"expected {{'include_usage': true}}, got {options!r}")
    if options and not given.get("stream"):
        raise FieldError("stream_options", 'expected none without "stream": true')
    usage = options.get("include_usage") or False
    if not isinstance(usage, bool):
        raise FieldError("stream_options", f"include_usage: expected true or false, got {usage!r}")
    return usage


def _message(given: Any) -> dict[str, str]:
    if not isinstance(given, dict) or given.keys() != {"role", "content"} or not isinstance(given["role"], str):
        raise FieldError("messages", f"expected {{'role': ..., 'content': ...}} each, got {given!r}")
    content = given["content"]
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise FieldError("messages", f"content: expected a text or parts of type 'text', got {content!r}")
    return {"role": _text("messages", given["role"]), "content": _text("messages", content)}
