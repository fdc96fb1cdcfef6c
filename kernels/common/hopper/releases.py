"""What Triton's releases call differently: the kernels take these names from here, and nothing else of them differs.

Releases that compile every Gluon kernel for sm_90a are in ``common/device.py``; ``make test-versions`` finds out.
"""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # since 3.7
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # since 3.8
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global  # since 3.8


@builtin
def tma_add(desc, coord, src, _semantic=None):
    """Add a tile in shared memory to global memory, asynchronously.

    ``tma.async_atomic_add`` since 3.8; before, neither the instruction nor the enumeration that says which one has a
    public name.
    """
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)
