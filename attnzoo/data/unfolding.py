"""Text from tokens that become known one after the other, cut where a text to stop at begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

UNKNOWN = "\ufffd"  # what stands for bytes that are no character, or none yet
MARKS = 0xD800  # characters from here on are in no decoded text: each stands for a special token


@dataclass(frozen=True)
class Decoding:
    """The text of tokens, and what must be known of them to cut it.

    Args:
        text: of tokens; special ones have none there.
        special: special tokens by their names.
        pieces: tokens that stand for a byte each. A run of them that is no UTF-8 as a whole is one U+FFFD per byte, so
            that the next of them may change all that the run has been.
    """

    text: Callable[[Sequence[int]], str]
    special: Mapping[str, int] = field(default_factory=dict)
    pieces: frozenset[int] = frozenset()

    def __call__(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return self.text(tokens)

    @classmethod
    def of_tokenizer(cls, tokenizer: Any) -> Decoding:
        """What a tokenizer, of tokenizers, makes of tokens."""
        added = tokenizer.get_added_tokens_decoder().items()
        names = [f"<0x{byte:02{case}}>" for byte in range(256) for case in "Xx"]  # as its ByteFallback reads them
        numbers = {name: tokenizer.token_to_id(name) for name in names}
        return cls(
            lambda tokens: str(tokenizer.decode(list(tokens))),
            {token.content: number for number, token in added if token.special},
            frozenset(n for name, n in numbers.items() if n is not None and tokenizer.decode([n]) != name),
        )


class Unfolding:
    """Text from tokens that become known one after the other; only the last of them are decoded again.

    Args:
        decode: the text of tokens, as a function or a :class:`Decoding`. What it makes of one may depend on the one
            before: many tokenizers give the first word no space in front.
        prompt: the tokens before, whose text is known.
        stop: texts before the first of which it ends. A special token in one of them counts as its name; no character
            lies on both of its sides then.

    Attributes:
        ended: whether one of these has come up.
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
        self.start, self.end = 0, len(self.tokens)  # those decoded last, and up to where all of their text is given
        self.given = self.decode(self.tokens)  # of the text from `start` on
        self.waits = ""  # may be the beginning of a text to stop at

    def after(self, tokens: Sequence[int], done: bool) -> str:
        """What is new by all tokens after the prompt. What later ones may change, or may show to be the beginning of a
        text to stop at, waits unless done.
        """
        text = self.waits
        for token in tokens[len(self.tokens) - self.prompt :]:
            if token in self.marks:
                text += self._new(done=True) + self.marks[token]
                if self.given.endswith(UNKNOWN):  # what was broken here stays so
                    self.start, self.given = self.end, ""
            self.tokens.append(token)
        text += self._new(done)
        ends = [(at + len(stop), at) for stop in self.stop if (at := text.find(stop)) >= 0]
        self.ended = bool(ends)
        shown = len(text)
        if ends:
            shown = min(ends)[1]
        elif not done:
            shown -= max((n for stop in self.stop for n in range(len(stop)) if text.endswith(stop[:n])), default=0)
        self.waits = text[shown:]
        return text[:shown].translate({ord(mark): None for mark in self.marks.values()})

    def _new(self, done: bool) -> str:
        known = len(self.tokens)
        while not done and known > self.end and self.tokens[known - 1] in self._waiting:
            known -= 1
        if known == self.end and not done:
            return ""
        text = self.decode(self.tokens[self.start : known])
        if not text.startswith(self.given):  # the prompt ends within a character
            self.given = self.given.rstrip(UNKNOWN)
        if not text.startswith(self.given):  # or in bytes, which those behind them have spoiled
            self.start, self.given, text = self.end, "", self.decode(self.tokens[self.end : known])
        whole = text if done else text.rstrip(UNKNOWN)
        new = whole[len(self.given) :]
        self.given += new
        if self.given == text:
            rest = self.decode(self.tokens[self.end : known])
            if rest:  # else the next word would be the first one
                self.start, self.given = self.end, rest
            self.end = known
        return new


def _replaced(text: str, marks: Mapping[str, str]) -> str:
    for name, mark in marks.items():
        text = text.replace(name, mark)
    return text
