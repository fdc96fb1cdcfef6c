"""What retention learns from the attention to come (One-Pass Forgetting): its options, and its definition, dense.

With P the weights of attention and o its outputs, over the query heads that share a key,

    s_tj = sum_h |P_tj v_j|^2 / sum_h |o_t|^2                             what key j contributed to row t
    S_tj = sum_i w_i x_i,   x_i = discount^(i - t) s_ij  for rows i >= t    what later rows will need of it
    rho_tj = S_tj / (S_tj + mean_j S_tj),  or  S_tj / max_j S_tj          the target of r_j(t - j)

with w = softmax_i(temperature log x_i) ("power"), softmax_i(temperature x_i) ("softmax"), or all on the largest x_i
("max"). No Triton here.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange, reduce, repeat
from torch import Tensor

from attnzoo.errors import unknown
from attnzoo.kernels.common.dense_reference import segment_starts, summed_gates
from attnzoo.kernels.common.options import AttentionOptions
from attnzoo.kernels.common.retention import Retention
from attnzoo.kernels.common.rows import first_visible_without_gate

LEAST_DISCOUNT = 0.5  # over the rows of a tile it is still a number of float32
WORDS = {
    "pool": ("power", "softmax", "max"), "normalize": ("mean", "max"), "divergence": ("bernoulli", "mse")
}  # fmt: skip


SHORTEST = 2.0**-80  # |o|^2 of a row's outputs, for contributions that float32 holds where outputs are 0


class Lesson(NamedTuple):
    """How the retention of keys is taught.

    Args:
        pool: of later rows, "power", "softmax" or "max".
        discount: per row of distance, from 0.5 to 1; 1 with "softmax".
        normalize: the unit of a row's utilities, their "mean" or their "max".
        divergence: of target and retention: "bernoulli", the KL divergence of two coins, or "mse".
    """

    pool: str = "power"
    discount: float = 1.0
    normalize: str = "mean"
    divergence: str = "bernoulli"


def check_lesson(lesson: Lesson) -> None:
    """Raise TypeError unless it is a Lesson, and ValueError where one of its fields is wrong."""
    if not isinstance(lesson, Lesson):
        raise TypeError(f"lesson: expected Lesson(...), got {type(lesson).__name__}")
    for name, words in WORDS.items():
        if getattr(lesson, name) not in words:
            raise unknown(f"lesson.{name}", getattr(lesson, name), words)
    if not has_kernel(lesson.pool, lesson.discount):
        expected = "1 with pool='softmax'" if lesson.pool == "softmax" else f"a number from {LEAST_DISCOUNT} to 1"
        raise ValueError(f"lesson.discount: expected {expected}, got {lesson.discount!r}")


def has_kernel(pool: str, discount: float) -> bool:
    """Whether the utility of a row follows from the next row's within what float32 holds."""
    return LEAST_DISCOUNT <= discount <= 1 and (pool != "softmax" or discount == 1)


def key_divergence_reference(
    q: Tensor, k: Tensor, v: Tensor, retention: Retention, lesson: Lesson, o: Tensor, lse: Tensor,
    log_decay: Tensor | None, options: AttentionOptions,
) -> Tensor:  # fmt: skip
    """``key_divergence`` with memory O(T^2)."""
    (_, T, H, K), G, rule = q.shape, retention.keys.shape[2], retention.rule
    dtype, place = retention.keys.dtype, torch.arange(T, device=q.device)
    tiny = torch.finfo(dtype).tiny
    c, since = summed_gates(log_decay, q, T, options.window, options.cu_seqlens)
    first = first_visible_without_gate(segment_starts(options.cu_seqlens, T), options.window or 0, T, q.device)
    age = place[:, None] - place
    there = age >= 0 if first is None else (age >= 0) & (place >= first.view(T, 1))
    queries, keys = (repeat(x.to(dtype), "b t h k -> b (h r) t k", r=H // x.shape[2]) for x in (q, k))
    logits = options.scores(queries @ keys.mT, K) + (c[..., :, None] - c[..., None, :]).to(dtype)
    seen = there & (place >= since[..., None])
    weights = (logits - lse.to(dtype).transpose(1, 2)[..., None]).exp().masked_fill(~seen, 0.0)
    value = rearrange(v[:, :, :: v.shape[2] // G].to(dtype).square().sum(-1), "b t g -> b g 1 t")
    output = reduce(o.to(dtype).square(), "b t (g r) v -> b g t 1", "sum", g=G).clamp(min=SHORTEST)
    s = reduce(weights.square(), "b (g r) t j -> b g t j", "sum", g=G) * value / output
    utility = _pooled(s.clamp(min=tiny), there, lesson, rule.temperature)
    if lesson.normalize == "max":
        rho = utility / utility.amax(-1, keepdim=True).clamp(min=tiny)
    else:
        unit = utility.sum(-1, keepdim=True) / there.sum(-1, keepdim=True)
        rho = utility / (utility + unit).clamp(min=tiny)
    rho, learns = rho.detach(), there & (age >= rule.remembers)
    r = retention._replace(rule=rule._replace(remembers=1)).at(age.masked_fill(~learns, 1))
    if lesson.divergence == "mse":
        each = (r - rho).square()
    else:
        *_, fade = n = retention.keys.transpose(1, 2)[:, :, None].unbind(-1)
        late = age.clamp(min=1).to(dtype)
        if len(n) == 2:
            x = n[0] - fade * late.log1p()
            kept, lost = F.logsigmoid(x), F.logsigmoid(-x)
        else:
            kept, lost = -fade * late, (-torch.expm1(-fade * late)).log()
        each = -torch.special.entr(rho) - torch.special.entr(1 - rho) - rho * kept - (1 - rho) * lost
    return each.masked_fill(~learns, 0.0).sum(-2).transpose(1, 2)


def _pooled(s: Tensor, there: Tensor, lesson: Lesson, temperature: float) -> Tensor:
    """S of contributions [B, G, T, T], pooled over the later rows that see the key."""
    lag = math.log(lesson.discount) * torch.arange(s.shape[-1], dtype=s.dtype, device=s.device)[:, None]
    x = (s.log() + lag).masked_fill(~there, -torch.inf).flip(-2)
    if lesson.pool == "max":
        pooled = x.cummax(-2).values
    else:
        weight = temperature * x if lesson.pool == "power" else temperature * x.exp()
        weight = weight.masked_fill(~there.flip(-2), -torch.inf)
        pooled = (weight + x).logcumsumexp(-2) - weight.logcumsumexp(-2)
    return (pooled.flip(-2) - lag).exp().masked_fill(~there, 0.0)
