"""Speculative decoding: tokens proposed by a cheap draft, checked several at a time by the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from attnzoo.forms.linear import LinearForms
from attnzoo.kernels.decode.plan import MOST_ROWS
from attnzoo.layer.cache import LayerCache
from attnzoo.models.decoder import LanguageModel
from attnzoo.models.generation.request import Request, check_counts
from attnzoo.models.generation.sampling import Samplers

Draft = Callable[[Request], Sequence[int]]  # a request -> tokens that may follow


@dataclass(eq=False)
class Proposals:
    """The proposed tokens of each row of a batch and the model's draws, in fixed tensors.

    Args:
        given: proposed tokens, ``[B, 15]`` int64.
        counts: number of proposed tokens, ``[B]`` int64.
        drawn: tokens that the model draws after the last known token and after each proposed one, ``[B, 16]`` int64.
        kept: number of the step's tokens that count: the last known one and the accepted proposals, ``[B]`` int64.
    """

    given: Tensor
    counts: Tensor
    drawn: Tensor
    kept: Tensor

    @staticmethod
    def empty(rows: int, device: torch.device) -> Proposals:
        given, drawn = torch.zeros(2, rows, MOST_ROWS, dtype=torch.int64, device=device)
        return Proposals(given[:, 1:].contiguous(), drawn[:, 0] * 0, drawn, drawn[:, 0] * 0)

    def offer(self, offered: Mapping[int, Sequence[int]], vocabulary: int) -> int:
        """Store the proposed tokens by row; return how many tokens a step must take to check them all.

        Raises:
            ValueError: tokens beyond the vocabulary.
        """
        longest = max(map(len, offered.values()), default=0)
        given, counts = (
            torch.zeros(self.given.shape, dtype=torch.int64, device="cpu"),
            torch.zeros(len(self.counts), dtype=torch.int64, device="cpu"),
        )
        for row, tokens in offered.items():
            wrong = [token for token in tokens if not 0 <= token < vocabulary]
            if wrong:
                raise ValueError(f"draft: expected tokens from 0 to {vocabulary - 1}, got {wrong[0]}")
            counts[row] = len(tokens)
            given[row, : len(tokens)] = given.new_tensor(list(tokens))
        self.given.copy_(given)
        self.counts.copy_(counts)
        return 1 + longest

    def judge(self, logits: Tensor, samplers: Samplers, active: Tensor, needs: int) -> Tensor:
        """Draw after each token of a step, accept the proposals that agree, and return each row's last drawn token.

        A draw depends on the sequence, its seed and the number of earlier draws. So the accepted tokens are those that
        would have been drawn without proposals.

        Args:
            logits: ``[B, T, vocab]``.
            active: 1 for rows that hold a sequence, ``[B]``.
            needs: see :meth:`Samplers.draw`.
        """
        T = logits.shape[1]
        drawn = torch.stack([samplers.draw(logits[:, t], needs) for t in range(T)], 1)
        number = torch.arange(T - 1, device=drawn.device)
        agrees = (drawn[:, :-1] == self.given[:, : T - 1]) & (number < self.counts[:, None])
        accepted = agrees.long().cumprod(1).sum(1)
        self.kept.copy_((accepted + 1) * active)
        self.drawn[:, :T] = drawn
        samplers.drawn += self.kept - T
        return drawn.gather(1, accepted[:, None])[:, 0]


def look_up(tokens: int = 8, ngram: int = 3) -> Draft:
    """A draft that proposes the tokens that followed an earlier occurrence of the last tokens (prompt lookup).

    Args:
        tokens: the most tokens to propose.
        ngram: the most last tokens to look up; the longest match counts, and of equal ones the latest.

    Raises:
        TypeError, ValueError: no whole number, or one below 1.

    Source: Saxena, "Prompt Lookup Decoding", 2023.
    """
    check_counts(tokens=tokens, ngram=ngram)

    def draft(request: Request) -> list[int]:
        known = [*request.prompt, *request.tokens]
        for n in range(min(ngram, len(known) - 1), 0, -1):
            for start in range(len(known) - n - 1, -1, -1):
                if known[start : start + n] == known[-n:]:
                    return known[start + n : start + n + tokens]
        return []

    return draft


@dataclass(eq=False)
class ModelDraft:
    """A draft by a smaller model; see :func:`from_model`."""

    model: LanguageModel
    tokens: int
    caches: WeakKeyDictionary[Request, tuple[list[LayerCache], int, list[int]]] = field(
        default_factory=WeakKeyDictionary
    )

    def joins(self, model: LanguageModel, max_tokens: int) -> bool:
        """Whether the draft's steps can be a part of those of a batch of ``model``, of ``max_tokens`` per sequence.

        Its layers must be recurrences, as their states can be restored, on the same device, with the same vocabulary.
        """
        own, config = self.model, self.model.config
        return (
            config.vocab_size == model.config.vocab_size
            and own.embedding.weight.device == model.embedding.weight.device
            and max_tokens <= (config.learned_positions or max_tokens)
            and all(isinstance(layer.variant.form_set, LinearForms) for layer in own.attentions())
        )

    @torch.no_grad()
    def __call__(self, request: Request) -> list[int]:
        """The likeliest tokens after those of ``request``, as far as the model has learned positions."""
        known, model = [*request.prompt, *request.tokens], self.model
        positions = model.config.learned_positions or len(known) + self.tokens
        number = min(self.tokens, positions + 1 - len(known))
        if number < 1:
            return []
        cache, seen, last = self.caches.get(request) or (model.new_cache(), 0, [])
        if seen == len(known):  # the step that asked last has failed
            return last
        step = torch.tensor([known[seen:]], device=model.embedding.weight.device)
        likeliest = model.logits(model.hidden(step, cache=cache)[:, -1:]).argmax(-1)  # [1, 1]
        self.caches[request] = cache, len(known), []
        ahead, found = [copy(layer) for layer in cache], [likeliest]
        for _ in range(number - 1):
            found.append(model.logits(model.hidden(found[-1], cache=ahead)).argmax(-1))
        proposed: list[int] = torch.cat(found, 1)[0].tolist()
        self.caches[request] = cache, len(known), proposed
        return proposed


def from_model(model: LanguageModel, tokens: int = 5) -> ModelDraft:
    """A draft that proposes a smaller model's likeliest tokens, with its own cache for each sequence.

    Where all its layers are recurrences, and device and vocabulary are those of the model that checks them, its steps
    and the check of what they propose are one step of the batch, on a GPU one CUDA graph. Beyond the positions that it
    has learned, if it has, it proposes nothing.

    Args:
        model: the smaller model, with the same vocabulary, in evaluation mode.
        tokens: the number of tokens to propose.

    Raises:
        TypeError, ValueError: another model, no whole number, or one below 1.
    """
    if not isinstance(model, LanguageModel):
        raise TypeError(f"model: expected LanguageModel, got {type(model).__name__}")
    check_counts(tokens=tokens)
    return ModelDraft(model, tokens)
