"""Descriptors of tiles for Gluon kernels."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attnzoo.kernels.common.launched import descriptor
from attnzoo.kernels.common.launching import head_block

_GLUON = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def gluon_descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """Descriptor of x [B, R, H, D] for tiles of ``rows`` tokens of one head."""
    width = head_block(x.shape[3])
    return descriptor(TensorDescriptor, x, [1, rows, 1, width], _layout(rows, width, x.dtype))


def plain_descriptor(x: Tensor, block: list[int]) -> TensorDescriptor:
    """Descriptor of a contiguous float32 matrix, its tiles in plain row order."""
    return descriptor(TensorDescriptor, x, block, _plain_layout())


@cache  # Gluon takes microseconds to make one
def _layout(rows: int, width: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([1, rows, 1, width], _GLUON[dtype])


@cache
def _plain_layout() -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(0, 32, 2)
