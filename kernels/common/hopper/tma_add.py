"""Adding a tile to global memory by the bulk copy engine: the one place that reaches into Triton's compiler.

Gluon of Triton 3.6, the only version that these kernels run on, has no public name for the reduction: neither for the
instruction, nor for the enumeration that says which one. ``tests/kernels`` and every import of the Gluon backwards fail
where a later version moves them.
"""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import builtin


@builtin
def tma_add(desc, coord, src, _semantic=None):
    """Add a tile in shared memory to global memory, asynchronously."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)
