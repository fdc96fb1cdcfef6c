"""Parameter groups for weight decay, which shrinks matrices alone."""

from __future__ import annotations

from typing import Any

from torch import nn

from attnzoo.errors import check_kinds, check_least
from attnzoo.layer.modules import HeadNorm, ShortConvolution, TokenMix
from attnzoo.precision import GateAffine, PreciseModule

NORMS = (HeadNorm, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, TokenMix)  # and mixtures, which scale channels too
MATRICES = (ShortConvolution, GateAffine, nn.Linear, nn.Embedding)  # these decay, even flattened by a sharding


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trainable parameters in two groups, as an optimizer takes them: those with weight decay, and those in
    :func:`spared`.

    Args:
        model: a layer, a decoder, or any module that holds some.
        weight_decay: of the first group; it is 0 in the second.

    Raises:
        TypeError, ValueError: no module, or a number below 0.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a module, got {type(model).__name__}")
    check_kinds({"weight_decay": weight_decay}, {"weight_decay": "float"})
    check_least(0, weight_decay=weight_decay)
    no_decay = spared(model)
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return [
        {"params": [p for name, p in parameters.items() if name not in no_decay], "weight_decay": weight_decay},
        {"params": [p for name, p in parameters.items() if name in no_decay], "weight_decay": 0.0},
    ]


def spared(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay leaves alone, by the kind of their module and their name.

    These are norms, mixtures of tokens, biases, what a :class:`PreciseModule` keeps precise (slopes, step sizes,
    sinks), and whatever has fewer than two dimensions in a module of an unknown kind.
    """
    names = set()
    for prefix, module in model.named_modules():
        precise = module.precise if isinstance(module, PreciseModule) else ()
        for name, parameter in module.named_parameters(recurse=False):
            small = parameter.ndim < 2 and not isinstance(module, MATRICES)
            if isinstance(module, NORMS) or name.endswith("bias") or name in precise or small:
                names.add(f"{prefix}.{name}" if prefix else name)
    return names
