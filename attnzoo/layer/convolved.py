"""The short convolutions of q, k and v as one of all their channels, where their products with the rows are one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo.kernels import convolution
from attnzoo.layer.modules import ShortConvolution, on_kernels, untouched
from attnzoo.layer.stream import Stream


def one_convolution(parts: Sequence[nn.Module | None], x: Tensor, stream: Stream) -> bool:
    """Whether convolutions of products of rows x can be one, by kernels, where gradients may be recorded: of whole
    sequences without a cache."""
    if not torch.is_grad_enabled() or type(stream) is not Stream:
        return False
    if stream.valid is not None or stream.cache is not None:
        return False
    kinds = set()
    for part in parts:
        if type(part) is not ShortConvolution or not untouched(part):
            return False
        if not on_kernels(part.impl, x, part.weight, part.bias) or part.unavailable(x):
            return False
        kinds.add((part.size, part.activation, part.bias is None, part.weight.dtype))
    return len(kinds) == 1


def convolved(parts: Sequence[Any], whole: Tensor, stream: Stream) -> tuple[Tensor, Tensor, Tensor]:
    """The convolution of each of three parts of its share of ``whole [B, T, channels of all]``."""
    biases = [part.bias for part in parts if part.bias is not None]
    y = convolution.causal_convolution(
        whole, torch.cat([part.weight for part in parts]), torch.cat(biases) if biases else None,
        cu_seqlens=stream.cu_seqlens, silu=parts[0].activation is F.silu,
    )  # fmt: skip
    q, k, v = y.split([part.weight.shape[0] for part in parts], -1)
    return q, k, v
