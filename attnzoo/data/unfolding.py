"""Incremental decoding of tokens to text, which ends before a stop text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

UNKNOWN = "\ufffd"  # replaces bytes that are no (or no complete) character
MARKS = 0xD800  # code points of surrogates, never in decoded text, each of which marks a special token


@dataclass(frozen=True)
class Decoding:
    """A function from tokens to text, with the special tokens by name.

    Args:
        text: a function from tokens to their text, in which special tokens have none.
        special: special tokens by their names.
        pieces: tokens for a byte each. A run of them that is not UTF-8 decodes to one U+FFFD per byte, so that a
            further byte may change the text of the whole run.
    """

    text: Callable[[Sequence[int]], str]
    special: Mapping[str, int] = field(default_factory=dict)
    pieces: frozenset[int] = frozenset()

    def __call__(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return self.text(tokens)

    @classmethod
    def of_tokenizer(cls, tokenizer: Any) -> Decoding:
        """The decoding of a `tokenizers.Tokenizer`."""
        added = tokenizer.get_added_tokens_decoder().items()
        names = [f"<0x{byte:02{case}}>" for byte in range(256) for case in "Xx"]  # names that ByteFallback decodes
        numbers = {name: tokenizer.token_to_id(name) for name in names}
        return cls(
            lambda tokens: str(tokenizer.decode(list(tokens))),
            {token.content: number for number, token in added if token.special},
            frozenset(n for name, n in numbers.items() if n is not None and tokenizer.decode([n]) != name),
        )


class Unfolding:
    """An incremental decoder of tokens, which decodes only the last of them again.

    Args:
        decode: a function from tokens to text, or a :class:`Decoding`. The text of a token may depend on the one
            before: many tokenizers put no space before the first word.
        prompt: the tokens before, whose text is known.
        stop: texts before the first of which decoding ends. A special token matches its name as a whole.

    Attributes:
        ended: whether a stop text has occurred.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = (), stop: Sequence[str] = ()
    ) -> None:
        self.decode = decode if isinstance(decode, Decoding) else Decoding(decode)
        self.tokens, self.prompt, self.ended = list(prompt), len(prompt), False
        self._waiting = self.decode.pieces.union(self.decode.special.values())
        named = [name for name in self.decode.special if any(name in text for text in stop)]
        marks = {name: chr(MARKS + number) for number, name in enumerate(sorted(named, key=len, reverse=True))}
        self.marks = {self.decode.special[name]: mark for name, mark in marks.items()}
        self.stop = [each for text in stop for each in {text, _replaced(text, marks)}]
        # tokens that are decoded again, and the end of those whose text is complete
        self.start, self.end = 0, len(self.tokens)
        self.given = self.decode(self.tokens)  # text of the tokens from `start` on that was returned
        self.waits = ""  # held back, as it may begin a stop text

    def after(self, tokens: Sequence[int], done: bool) -> str:
        """The new text for all tokens after the prompt.

        Text that later tokens may change, or that may begin a stop text, is held back unless ``done``.
        """
        text = self.waits
        for token in tokens[len(self.tokens) - self.prompt :]:
            if token in self.marks:
                text += self._new(done=True) + self.marks[token]
                if self.given.endswith(UNKNOWN):  # the incomplete character stays incomplete
                    self.start, self.given = self.end, ""
            self.tokens.append(token)
        text += self._new(done)
        ends = [(at + len(stop), at) for stop in self.stop if (at := text.find(stop)) >= 0]
        self.ended = bool(ends)
        shown = len(text)
        if ends:
            shown = min(ends)[1]
        elif not done:
            most = len(text) + 1  # a stop text may be far longer
            held = (n for stop in self.stop for n in range(min(len(stop), most)) if text.endswith(stop[:n]))
            shown -= max(held, default=0)
        self.waits = text[shown:]
        return text[:shown].translate({ord(mark): None for mark in self.marks.values()})

    def _new(self, done: bool) -> str:
        known = len(self.tokens)
        while not done and known > self.end and self.tokens[known - 1] in self._waiting:
            known -= 1
        if known == self.end and not done:
            return ""
        text = self.decode(self.tokens[self.start : known])
        if not text.startswith(self.given):  # the prompt ended within a character
            self.given = self.given.rstrip(UNKNOWN)
        if not text.startswith(self.given):  # or in bytes that the new ones made invalid
            self.start, self.given, text = self.end, "", self.decode(self.tokens[self.end : known])
        whole = text if done else text.rstrip(UNKNOWN)
        new = whole[len(self.given) :]
        self.given += new
        if self.given == text:
            rest = self.decode(self.tokens[self.end : known])
            if rest:  # else the next word would decode as a first word
                self.start, self.given = self.end, rest
            self.end = known
        return new


def _replaced(text: str, marks: Mapping[str, str]) -> str:
    for name, mark in marks.items():
        text = text.replace(name, mark)
    return text
