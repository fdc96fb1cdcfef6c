"""Descriptors of tiles for Gluon kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attnzoo.kernels.common.launching import head_block

_GLUON = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def gluon_descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """Descriptor of x [B, R, H, D] for tiles of ``rows`` tokens of one head."""
    block = [1, rows, 1, head_block(x.shape[3])]
    layout = gl.NVMMASharedLayout.get_default_for(block, _GLUON[x.dtype])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


def plain_descriptor(x: Tensor, block: list[int]) -> TensorDescriptor:
    """Descriptor of a contiguous float32 matrix, its tiles in plain row order."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, gl.NVMMASharedLayout(0, 32, 2))
