"""AdamW and its schedule, as in the Forgetting Transformer (Lin et al. 2025, appendix B)."""

from __future__ import annotations

import math

import torch
from torch import nn

from attnzoo.training.config import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices alone.

    Parameters with fewer than two dimensions (norms, biases, slopes) and those marked `_no_weight_decay` get
    none.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if decays(p)], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if not decays(p)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


def decays(parameter: nn.Parameter) -> bool:
    """Whether weight decay applies to a parameter."""
    return parameter.ndim >= 2 and not getattr(parameter, "_no_weight_decay", False)


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """The rate of update `step` (1 is the first, `steps` the last): a linear warm-up, then a cosine that ends
    at 0.

    It depends on the step alone, so that there is no schedule to save.
    """
    done = step - 1
    if done < config.warmup_steps:
        return config.lr * step / config.warmup_steps
    progress = (done - config.warmup_steps) / (steps - config.warmup_steps)
    return config.lr * 0.5 * (1 + math.cos(math.pi * progress))
