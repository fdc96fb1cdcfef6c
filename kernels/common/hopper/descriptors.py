"""Descriptors of tiles for Gluon kernels, and adding a tile to global memory."""

from __future__ import annotations

import torch
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
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


@builtin
def tma_add(desc, coord, src, _semantic=None):
    """Add a tile in shared memory to global memory, asynchronously."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)
