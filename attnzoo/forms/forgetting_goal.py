"""What the retention of keys should be, by the teacher's later rows; defined in :mod:`attnzoo.algebra.forgetting`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from torch import Tensor

from attnzoo.algebra.forgetting import Forgetting, least
from attnzoo.forms.panels import Logits

KEPT = 2**22  # utilities of a call up to which they are kept, and not found again where they are asked for
NOTHING = math.log(torch.finfo(torch.float64).tiny)  # logarithm of a contribution of 0


@torch.no_grad()
def counts(logits: Logits, options: Forgetting) -> tuple[Tensor, Tensor]:
    """Keys that each row sees, ``[B or 1, 1, T]``, and how many pairs are not in the remember window."""
    tokens, old = [], []
    for start, stop in logits.panels():
        there = logits.exists(start, stop)
        tokens.append(F.pad(there.sum(-1), (start, 0)))
        old.append((there & (logits.age(start, stop) >= options.window)).sum())
    return torch.stack(tokens).sum(0), torch.stack(old).sum()


@dataclass(frozen=True, eq=False)
class Goal:
    """What the retention of a panel should be, by the teacher's later rows.

    Args:
        logits: the teacher's.
        lse: ``[B, H, T]``.
        value: ``log |v|^2``, ``[B, G, T]`` float64.
        output: ``log |y|^2``, likewise.
        options: how utilities are pooled.
        temperature: tau.
        unit: what the utilities of each row are measured by, ``[B, G, T]``.
        found: utilities by panel, where all of them are few.
    """

    logits: Logits
    lse: Tensor
    value: Tensor
    output: Tensor
    options: Forgetting
    temperature: float
    unit: Tensor
    found: dict[int, Tensor] = field(default_factory=dict)

    @staticmethod
    @torch.no_grad()
    def of(
        logits: Logits, values: Tensor, lse: Tensor, teacher: Tensor, options: Forgetting, temperature: float
    ) -> Goal:
        (B, _, T), G = logits.shape, logits.heads
        output = reduce(teacher.double().square(), "b t (g r) v -> b g t", "sum", g=G)
        unit = output.new_zeros(B, G, T)
        value = least(values.double().square().sum(-1)).log()
        goal = Goal(logits, lse, value, least(output).log(), options, temperature, unit)
        for start, stop in logits.panels():
            there = logits.exists(start, stop)
            utility = goal.utility(logits.panel(start, stop, there), there, start, stop)
            if B * G * T * T <= KEPT:
                goal.found[start] = utility
            if options.normalize == "max":
                unit[..., start:] = unit[..., start:].maximum(utility.amax(-1))
            else:
                unit[..., start:] += utility.sum(-1)
        if options.normalize == "mean":
            unit /= counts(logits, options)[0].clamp(min=1)
        return goal

    @torch.no_grad()
    def panel(self, a: Tensor, there: Tensor, start: int, stop: int) -> Tensor:
        """The target of a panel, ``[B, G, R, n]`` float64 in [0, 1]."""
        unit, utility = self.unit[..., start:, None], self.found.get(start)
        if utility is None:
            utility = self.utility(a, there, start, stop)
        if self.options.normalize == "max":
            return utility / least(unit)
        return utility / least(utility + unit)

    def utility(self, a: Tensor, there: Tensor, start: int, stop: int) -> Tensor:
        """S of a panel: the contributions of all rows, pooled from the last to the first."""
        G = self.logits.heads
        weights = 2 * (a.double() - self.lse.double()[..., start:, None])
        log_s = weights
        if weights.shape[1] != G:
            log_s = rearrange(weights, "b (g r) t j -> b g r t j", g=G).logsumexp(2)
        log_s = log_s + self.value[:, :, None, start:stop] - self.output[..., start:, None]
        found = pooled(log_s.clamp(min=NOTHING), there, self.options, self.temperature)
        return found.masked_fill(~there | (found < math.exp(NOTHING + 1)), 0.0)


def pooled(log_s: Tensor, there: Tensor, options: Forgetting, temperature: float) -> Tensor:
    """:func:`attnzoo.algebra.forgetting.future_utility` of a panel, from the logarithms of its contributions.

    With ``"softmax"`` and a discount below 1 the exponentials of one row are no multiples of those of the next:
    each row then sums over all later ones, in time O(T) for every pair.

    Args:
        log_s: ``[B, G, R, n]`` float64.
        there: ``[B or 1, 1, R, n]``.
    """
    R = log_s.shape[-2]
    if options.pool == "softmax" and options.discount < 1:
        rows = []
        for t in range(R):
            age = torch.arange(R - t, dtype=log_s.dtype, device=log_s.device)[:, None]
            x = options.discount**age * log_s[..., t:, :].exp()
            w = (temperature * x).masked_fill(~there[..., t:, :], -torch.inf).softmax(-2)
            rows.append((w * x).sum(-2))
        return torch.stack(rows, -2).nan_to_num(0.0)
    fade = torch.arange(R, dtype=log_s.dtype, device=log_s.device)[:, None] * math.log(options.discount)
    log_x = (log_s + fade).masked_fill(~there, -torch.inf)  # all discounted from the panel's first row
    if options.pool == "max":
        return (log_x.flip(-2).cummax(-2).values.flip(-2) - fade).exp()
    logits = temperature * (log_x if options.pool == "power" else log_s.exp())
    logits = logits.masked_fill(~there, -torch.inf)
    total, weighed = (x.flip(-2).logcumsumexp(-2).flip(-2) for x in (logits, logits + log_x))
    return (weighed - total - fade).exp().nan_to_num(0.0)
