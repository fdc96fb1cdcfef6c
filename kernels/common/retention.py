"""Retention of keys (One-Pass Forgetting): how a key's logit falls with its age. No Triton here.

    r_j(n) = sigma(base_j - fade_j log(1 + n)),  or  exp(-fade_j max(n, 1)),      1 for ages n below ``remembers``
    B_j(n) = max(log sigma(temperature (r_j(n) - threshold)), -limit),            no sigma: 0 where r >= threshold

Retention never rises with age, so it is its own running minimum: B needs no scan, only two numbers per key. It is no
sum of a row's and a key's numbers, so it cannot ride in more channels of q and k.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from attnzoo.kernels.common.argument_checks import check_tensors
from attnzoo.kernels.common.constants import LOG2E
from attnzoo.precision import wide_dtype

DEEPEST = 60.0  # exp(-60) is far above the smallest numbers of float32, and exp(60) far below the largest

HELD_NONE = 40 / LOG2E  # a key is no longer counted from a probability of 2^-40 on that it is held


class Rule(NamedTuple):
    """From retention to a bias of logits.

    Args:
        temperature: sharpness; infinite: keys whose retention is below the threshold are not seen, others as they are.
        threshold: the retention at which a key is half forgotten.
        limit: no bias is below minus this, at most ``DEEPEST``.
        remembers: the last tokens, the row itself among them, that are remembered whatever their retention.
    """

    temperature: float
    threshold: float
    limit: float
    remembers: int


def numbers_of(rule: Rule | None, kind: int) -> tuple[float | None, ...] | None:
    """The numbers of a rule in the order in which kernels read them (``forgetful_bias.py``), for ``kind`` numbers of
    each key."""
    if rule is None:
        return None
    (temperature, threshold, limit, remembers), sharp = rule, not math.isinf(rule.temperature)
    lowest, least = (_fallen(threshold - x / temperature, kind) for x in (limit, HELD_NONE))
    return (
        float(threshold), float(remembers), float(limit) * LOG2E, float(temperature) if sharp else None,
        math.exp(-limit), lowest, least,
    )  # fmt: skip


def _fallen(r: float, kind: int) -> float:
    """``forgetful_bias.fallen`` of a retention, or a little more, where float32 is past it, too."""
    if r <= 0:
        return 1e20  # never
    return (math.log2(1 / r - 1) if kind == 2 else -math.log2(r)) + 1e-3


class Retention(NamedTuple):
    """What is remembered of each key.

    Args:
        keys: [B, S, G, 2] float32, base and fade >= 0 of each key, or [B, S, G, 1], the rate fade of an exponential.
        rule: see there.
    """

    keys: Tensor
    rule: Rule

    def at(self, age: Tensor) -> Tensor:
        """r of all keys at ages [T, S] (one past the row's reads as 0): [B, G, T, S]."""
        *base, fade = (x[:, :, None] for x in self.keys.transpose(1, 2).unbind(-1))  # [B, G, 1, S]
        n = age.clamp(min=0).to(fade.dtype)
        r = (base[0] - fade * n.log1p()).sigmoid() if base else (-fade * n.clamp(min=1)).exp()
        return r.masked_fill(age < self.rule.remembers, 1.0)

    def bias(self, age: Tensor) -> Tensor:
        """B of all keys at ages [T, S]: [B, G, T, S]."""
        r, rule = self.at(age), self.rule
        if math.isinf(rule.temperature):
            return (0.0 * r).masked_fill(r < rule.threshold, -math.inf)
        return F.logsigmoid(rule.temperature * (r - rule.threshold)).clamp(min=-rule.limit)

    def held(self, age: Tensor) -> Tensor:
        """The probability that a key is still held, of all keys at ages [T, S]: [B, G, T, S]."""
        return (self.rule.temperature * (self.at(age) - self.rule.threshold)).sigmoid()


def check_retention(retention: Retention | None, k: Tensor, valid: Tensor | None = None, gate_sums: Any = None) -> None:
    """Raise unless it is None, or a Retention of the keys k [B, S, G, K] in a call without ``valid`` or ``gate_sums``.

    Raises:
        TypeError: no Retention.
        ValueError: all else; the message names the argument.
    """
    if retention is None:
        return
    if not isinstance(retention, Retention) or not isinstance(retention.rule, Rule):
        raise TypeError(f"retention: expected Retention(keys, Rule(...)) or None, got {type(retention).__name__}")
    check_tensors({"retention.keys": retention.keys, "k": k}, needed=("retention.keys",))
    keys, (temperature, threshold, limit, remembers) = retention
    (B, S, G, _), wide = k.shape, wide_dtype(k.dtype)
    if keys.shape not in ((B, S, G, 1), (B, S, G, 2)) or keys.dtype != wide:
        got = f"{keys.dtype} {tuple(keys.shape)}"
        raise ValueError(f"retention.keys: expected {wide} [B={B}, S={S}, G={G}, 1 or 2] as k, got {got}")
    for name, right, expected, value in (
        ("temperature", temperature > 0, "a number above 0", temperature),
        ("threshold", 0 < threshold < 1, "a number in (0, 1)", threshold),
        ("limit", 0 < limit <= DEEPEST, f"a number in (0, {DEEPEST:g}]", limit),
        ("remembers", remembers >= 1, "at least 1 (the row itself)", remembers),
    ):
        if not right:
            raise ValueError(f"retention.rule.{name}: expected {expected}, got {value!r}")
    for other, given in (("valid", valid), ("gate_sums", gate_sums)):
        if given is not None:
            raise ValueError(f"{other}: expected None with retention (positions are ages), got {type(given).__name__}")
