"""AdamW and its schedule, as in the Forgetting Transformer (Lin et al. 2025, appendix B)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from attnzoo.layer.weight_decay import param_groups
from attnzoo.training.config import Extension, OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW with the weight decay of :func:`~attnzoo.layer.weight_decay.param_groups`."""
    groups = param_groups(model, config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """The rate of update `step` (1 is the first, `steps` the last): a linear warm-up, then a cosine.

    The cosine reaches 0 one update after the last, so that the last one still learns.

    In an extended run the last :class:`~attnzoo.training.config.Extension` before the step determines the rate. The
    rate is a function of the step, so that no schedule is saved.
    """
    return _rate(step, steps, config, config.extensions)


def _rate(step: int, steps: int, config: OptimizerConfig, extensions: Sequence[Extension]) -> float:
    while extensions and step <= extensions[-1].after:
        extensions, steps = extensions[:-1], extensions[-1].planned
    if not extensions:
        start, peak, warmup, done = 0.0, config.lr, config.warmup_steps, step
    else:
        last = extensions[-1]
        start = _rate(last.after, last.planned, config, extensions[:-1])
        peak, warmup, done = last.lr, last.warmup_steps, step - last.after
        steps -= last.after
    if done <= warmup:
        return start + (peak - start) * done / warmup
    if extensions and extensions[-1].schedule == "constant":
        return peak
    return peak * 0.5 * (1 + math.cos(math.pi * (done - 1 - warmup) / (steps - warmup)))
