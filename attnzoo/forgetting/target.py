"""The target of retention, from the teacher's later rows, with memory O(T); see :mod:`attnzoo.forgetting.rules`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from torch import Tensor

from attnzoo.forgetting.panels import Logits
from attnzoo.forgetting.rules import Forgetting, least
from attnzoo.forms.caches.device_memory import available

KEEPS = 1 / 64  # share of free memory for stored utilities; beyond it they are computed again
CHUNK = 128  # rows of a chunk in a scan: sequential within a chunk, parallel over chunks


@torch.no_grad()
def counts(logits: Logits, options: Forgetting) -> tuple[Tensor, Tensor]:
    """The number of keys that each row sees, ``[B or 1, 1, T]``, and of all pairs outside the remember window."""
    tokens, old = [], []
    for start, stop in logits.panels():
        there = logits.exists(start, stop)
        tokens.append(F.pad(there.sum(-1), (start, 0)))
        old.append((there & (logits.age(start, stop) >= options.window)).sum())
    return torch.stack(tokens).sum(0), torch.stack(old).sum()


@dataclass(frozen=True, eq=False)
class Goal:
    """The target of retention, panel by panel.

    Args:
        logits: the teacher's logits.
        lse: ``[B, H, T]``.
        value: ``log |v|^2``, ``[B, G, T]``.
        output: ``log |y|^2``, likewise.
        options: how utilities are pooled.
        temperature: tau.
        unit: each row's largest or mean utility, by ``normalize``, ``[B, G, T]``.
        found: stored utilities by panel, where all of them fit.
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
        value = least(values.square().sum(-1)).log()
        output = least(reduce(teacher.to(value).square(), "b t (g r) v -> b g t", "sum", g=G)).log()
        unit = output.new_zeros(B, G, T)
        goal = Goal(logits, lse, value, output, options, temperature, unit)
        free = available(unit.device) or 0
        kept = unit.itemsize * B * G * T * (T + logits.columns) / 2 <= KEEPS * free
        for start, stop in logits.panels():
            there = logits.exists(start, stop)
            utility = goal.utility(logits.panel(start, stop, there), there, start, stop)
            if kept:
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
        """The target of a panel, ``[B, G, R, n]`` in [0, 1]."""
        unit, utility = self.unit[..., start:, None], self.found.get(start)
        if utility is None:
            utility = self.utility(a, there, start, stop)
        if self.options.normalize == "max":
            return utility / least(unit)
        return utility / least(utility + unit)

    def utility(self, a: Tensor, there: Tensor, start: int, stop: int) -> Tensor:
        """S of a panel: the contributions pooled over later rows."""
        G, rows = self.logits.heads, slice(start, None)
        if a.shape[1] == G:
            log_s = torch.add(self.value[:, :, None, start:stop], a, alpha=2)
            log_s -= (self.output + 2 * self.lse)[..., rows, None]
        else:
            weights = rearrange(2 * (a - self.lse[..., rows, None]), "b (g r) t j -> b g r t j", g=G)
            log_s = weights.logsumexp(2) + self.value[:, :, None, start:stop] - self.output[..., rows, None]
        nothing = log_of_nothing(log_s)
        found = pooled(log_s.clamp_(min=nothing), there, self.options, self.temperature)
        return found.masked_fill_(~there | (found < math.exp(nothing + 1)), 0.0)


def log_of_nothing(like: Tensor) -> float:
    """The finite stand-in for log 0, the logarithm of a contribution of 0, in the dtype of ``like``."""
    return math.log(torch.finfo(like.dtype).tiny)


def pooled(log_s: Tensor, there: Tensor, options: Forgetting, temperature: float) -> Tensor:
    """:func:`attnzoo.forgetting.rules.future_utility` of a panel, from the logarithms of its contributions.

    With ``"softmax"`` and a discount below 1 the exponentials of one row are no multiples of those of the next: the
    cost is then O(T) per pair.

    Args:
        log_s: ``[B, G, R, n]``.
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
    last_first = there.flip(-2)
    log_x = log_s.flip(-2).masked_fill_(~last_first, -torch.inf)
    fade = math.log(options.discount)
    if options.pool == "max":
        return so_far(log_x, fade, largest=True).flip(-2).exp_()
    power = options.pool == "power"
    logits = temperature * log_x if power else (temperature * log_x.exp()).masked_fill_(~last_first, -torch.inf)
    total = so_far(logits, temperature * fade if power else 0.0)
    weighed = so_far(logits.add_(log_x), (temperature + 1) * fade if power else 0.0)
    return (weighed - total).flip(-2).exp_().nan_to_num_(0.0)


def so_far(x: Tensor, fade: float, largest: bool = False) -> Tensor:
    """``log sum_{i <= t} exp(x_i + (t - i) fade)`` along the rows, or the largest of these; fade <= 0.

    The scan runs within chunks of :data:`CHUNK` rows, and across chunks in float64, as fades of many rows add up. A
    maximum attained in two chunks passes half of its gradient to each.

    Args:
        x: ``[..., R, n]``.
    """
    R, rows = x.shape[-2], min(CHUNK, x.shape[-2])
    x = rearrange(F.pad(x, (0, 0, 0, -R % rows)), "... (m c) n -> ... m c n", c=rows)
    inside = _scan(x, fade, largest)
    if x.shape[-3] > 1:
        before = _scan(inside[..., -1, :].double(), rows * fade, largest)[..., :-1, None, :]
        late = torch.arange(1, rows + 1, dtype=before.dtype, device=x.device)[:, None] * fade
        before = F.pad((before + late if fade else before).to(x.dtype), (0, 0, 0, 0, 1, 0), value=-torch.inf)
        inside = (torch.maximum if largest else torch.logaddexp)(inside, before)
    return inside.flatten(-3, -2)[..., :R, :]


def _scan(x: Tensor, fade: float, largest: bool) -> Tensor:
    """:func:`so_far` by a loop over rows."""
    if not fade:
        return x.cummax(-2).values if largest else x.logcumsumexp(-2)
    late = torch.arange(x.shape[-2], dtype=x.dtype, device=x.device)[:, None] * fade
    return _scan(x - late, 0.0, largest) + late
