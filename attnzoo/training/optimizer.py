"""The optimizers, AdamW or Muon, and their schedule, as in the Forgetting Transformer (Lin et al. 2025, appendix B)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from attnzoo.layer.weight_decay import param_groups
from attnzoo.training.config import Extension, OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer of ``config.name``, with the weight decay of :func:`~attnzoo.layer.weight_decay.param_groups`.

    Raises:
        ValueError: Muon with a torch that lacks it.
    """
    groups = param_groups(model, config.weight_decay)
    if config.name == "muon":
        return Muon(split_groups(model, groups), config)
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) for groups with ``muon=True``, whose parameters are matrices, and AdamW for the others.

    A matrix's update has the root mean square of AdamW's, 0.2 times the rate (Liu et al. 2025, arXiv:2502.16982,
    equation 4), so that one learning rate serves both.

    Args:
        groups: parameter groups; each says ``muon``.
        config: ``beta1`` is the momentum of both.

    Raises:
        ValueError: a torch that lacks Muon.
    """

    def __init__(self, groups: list[dict[str, Any]], config: OptimizerConfig):
        if not hasattr(torch.optim, "Muon"):
            raise ValueError(f"optimizer.name: muon needs torch 2.9 or newer, got {torch.__version__}")
        make: dict[bool, Callable[..., torch.optim.Optimizer]] = {
            True: partial(torch.optim.Muon, lr=config.lr, momentum=config.beta1, adjust_lr_fn="match_rms_adamw"),
            False: partial(torch.optim.AdamW, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps),
        }
        cut = {kind: [group for group in groups if group["muon"] is kind] for kind in make}
        self.parts = {kind: make[kind](own) for kind, own in cut.items() if own}  # perhaps only gates are trained
        super().__init__([group for part in self.parts.values() for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of all groups; a ``closure`` is not taken."""
        for kind, part in self.parts.items():  # a loaded state brings its own groups
            part.state, part.param_groups = self.state, [group for group in self.param_groups if group["muon"] is kind]
            part.step()


def split_groups(model: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups cut in two by ``muon``: it is True for the matrices of linear layers, except gates and the head, as
    Jordan et al. have it."""
    head = getattr(model, "head", None)
    matrices = {id(x.weight) for x in model.modules() if isinstance(x, nn.Linear) and x is not head}
    cut = []
    for group in groups:
        for kind in (True, False):
            kept = [parameter for parameter in group["params"] if (id(parameter) in matrices) is kind]
            cut += [{**group, "params": kept, "muon": kind}] if kept else []
    return cut


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """The rate of update `step` (1 is the first, `steps` the last): a linear warm-up, then a cosine.

    The cosine reaches `min_lr` one update after the last, so that the last one still learns.

    In an extended run the last :class:`~attnzoo.training.config.Extension` before the step determines the rate. The
    rate is a function of the step, so that no schedule is saved.
    """
    return _rate(step, steps, config, config.extensions)


def _rate(step: int, steps: int, config: OptimizerConfig, extensions: Sequence[Extension]) -> float:
    while extensions and step <= extensions[-1].after:
        extensions, steps = extensions[:-1], extensions[-1].planned
    if not extensions:
        start, peak, warmup, done = config.min_lr, config.lr, config.warmup_steps, step
    else:
        last = extensions[-1]
        start = _rate(last.after, last.planned, config, extensions[:-1])
        peak, warmup, done = last.lr, last.warmup_steps, step - last.after
        steps -= last.after
    if done <= warmup:
        return start + (peak - start) * done / warmup
    if extensions and extensions[-1].schedule == "constant":
        return peak
    share = 0.5 * (1 + math.cos(math.pi * (done - 1 - warmup) / (steps - warmup)))
    end = min(config.min_lr, peak)
    return end + (peak - end) * share
