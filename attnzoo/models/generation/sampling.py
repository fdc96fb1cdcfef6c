"""Sampling on the device: each row has its own settings and random numbers, independent of other rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnzoo.algebra.sums import running_sum
from attnzoo.errors import check_kinds, check_least

GREEDY, PLAIN, FILTERED = range(3)  # kinds of sampling: argmax, all tokens, top-k or top-p


@dataclass(frozen=True)
class Sampling:
    """The sampling settings of one sequence.

    Args:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: sample among the k likeliest; None for all.
        top_p: of these, sample among the fewest likeliest tokens with at least this share of the probability (Holtzman
            et al., 2020).
        seed: seed of the draws; the same prompt and seed give the same tokens.

    Raises:
        ValueError: a number out of its range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        kinds = {"temperature": "float", "top_k": "int | None", "top_p": "float", "seed": "int"}
        check_kinds(vars(self), kinds)
        check_least(0, temperature=self.temperature, seed=self.seed)
        check_least(1, top_k=self.top_k)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: expected above 0 and at most 1, got {self.top_p}")

    @property
    def needs(self) -> int:
        """The kind of sampling: ``GREEDY``, ``PLAIN`` or ``FILTERED``."""
        if self.temperature == 0:
            return GREEDY
        return PLAIN if self.top_k is None and self.top_p == 1 else FILTERED


@dataclass(eq=False)
class Samplers:
    """The sampling settings of B rows on the device, and the number of tokens that each has drawn.

    Args:
        temperature: ``[B]`` float32.
        top_k: ``[B]`` int64; the vocabulary's size where no filter is set.
        top_p: ``[B]`` float32.
        seed: ``[B]`` int64.
        drawn: ``[B]`` int64.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor
    drawn: Tensor

    @staticmethod
    def empty(rows: int, device: torch.device) -> Samplers:
        numbers = torch.zeros(3, rows, dtype=torch.int64, device=device)
        return Samplers(
            torch.zeros(rows, device=device), numbers[0], torch.ones(rows, device=device), numbers[1], numbers[2]
        )

    def set(self, row: int, sampling: Sampling, vocabulary: int) -> None:
        """Set the settings of row ``row`` and restart its draws."""
        self.temperature[row] = sampling.temperature
        self.top_k[row] = sampling.top_k or vocabulary
        # a rounded sum may reach 1 before the last token
        self.top_p[row] = sampling.top_p if sampling.top_p < 1 else torch.inf
        self.seed[row] = sampling.seed
        self.drawn[row] = 0

    def at(self, row: int) -> Samplers:
        """Views of one row's settings."""
        return Samplers(*(getattr(self, name)[row : row + 1] for name in self.__match_args__))

    def draw(self, logits: Tensor, needs: int) -> Tensor:
        """The next token of each row.

        Args:
            logits: ``[B, vocab]``.
            needs: the largest :attr:`Sampling.needs` of any row.

        Returns:
            ``[B]`` int64. Nothing here waits for the device.
        """
        likeliest = logits.argmax(-1)
        if needs != GREEDY:
            logits = logits.float()
            logits = logits - logits.amax(-1, keepdim=True)  # a small temperature then overflows to -inf, never inf
            heat = torch.where(self.temperature > 0, self.temperature, 1.0)[:, None]
            p = (logits / heat).softmax(-1, dtype=torch.float64)
            if needs == FILTERED:
                sizes, order = p.sort(dim=-1, descending=True, stable=True)
                below = torch.arange(p.shape[-1], device=p.device) >= self.top_k[:, None]
                sizes = sizes.masked_fill(below, 0.0)
                sums = running_sum(sizes, -1)
                out = below | (sums - sizes >= self.top_p[:, None] * sums[:, -1:])
                p = p.masked_fill(out.scatter(-1, order, out), 0.0)
            # in the vocabulary's order, so that rows without a filter draw as in a PLAIN step
            mass = running_sum(p, -1)
            at = uniform(self.seed, self.drawn)[:, None] * mass[:, -1:]
            sampled = torch.searchsorted(mass, at, right=True).clamp(max=p.shape[-1] - 1)[:, 0]
            likeliest = torch.where(self.temperature > 0, sampled, likeliest)
        self.drawn += 1
        return likeliest


def uniform(seed: Tensor, number: Tensor) -> Tensor:
    """Random numbers in [0, 1), float64, one for each int64 pair of a seed and a running number.

    They are the upper 48 bits of SplitMix64 (Steele et al., 2014) of the pair.
    """
    x = _mixed(seed * -7046029254386353131) + (number + 1) * -7046029254386353131
    return (_mixed(x) >> 16 & (1 << 48) - 1).double() * 2.0**-48


def _mixed(x: Tensor) -> Tensor:
    """SplitMix64's finaliser of x, in wrapping int64 arithmetic with unsigned shifts."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -4658895280553007687
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -7723592293110705685
    return x ^ (x >> 31 & (1 << 33) - 1)
