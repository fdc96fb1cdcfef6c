"""AdamW and its schedule, as in the Forgetting Transformer (Lin et al. 2025, appendix B)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from attnzoo.layer.modules import HeadNorm, ShortConvolution
from attnzoo.precision import PreciseModule
from attnzoo.training.config import Extension, OptimizerConfig

NORMS = (HeadNorm, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
MATRICES = (ShortConvolution, nn.Linear, nn.Embedding)  # their weights, also where a sharding has flattened them


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices alone: none on what :func:`spared` names."""
    no_decay = spared(model)
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    groups = [
        {"params": [p for name, p in parameters.items() if name not in no_decay], "weight_decay": config.weight_decay},
        {"params": [p for name, p in parameters.items() if name in no_decay], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


def spared(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay leaves alone, by the kind of their module and their name.

    These are norms, biases, what a :class:`PreciseModule` keeps precise (slopes, step sizes, sinks), and whatever has
    fewer than two dimensions in a module of an unknown kind.
    """
    names = set()
    for prefix, module in model.named_modules():
        precise = module.precise if isinstance(module, PreciseModule) else ()
        for name, parameter in module.named_parameters(recurse=False):
            small = parameter.ndim < 2 and not isinstance(module, MATRICES)
            if isinstance(module, NORMS) or name.endswith("bias") or name in precise or small:
                names.add(f"{prefix}.{name}" if prefix else name)
    return names


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """The rate of update `step` (1 is the first, `steps` the last): a linear warm-up, then a cosine.

    The cosine would reach 0 one update after the last, so that the last one still learns.

    Where the run was made longer, the last :class:`~attnzoo.training.config.Extension` before the step says it. It
    depends on the step alone, so that there is no schedule to save.
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
