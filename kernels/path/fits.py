"""On which machines PaTH's kernels of blocks run, and which of them."""

from __future__ import annotations

import torch

from attnzoo.kernels.common.device import Machine, not_gluon, shared_memory

# KiB of shared memory per program that the block kernels need in float32, at head dims over 64: by release, and with
# others at most. In 16 bits all fits 99 KiB with these releases of Triton (``make test-versions``).
_FLOAT32_BLOCKS, _FLOAT32_MOST = {(3, 7): 160}, 176
_SMALL, _FITS = 163, ((3, 6), (3, 7), (3, 9))
_FLOAT32_3_8 = 112  # of the block kernels in float32 at head dims up to 64 with Triton 3.8; with the others 99 suffice


def blocks_in_gluon(K: int, dtype: torch.dtype, machine: Machine) -> bool:
    """Whether the block level of q and k in this dtype runs on its Gluon kernel."""
    return dtype == torch.bfloat16 and not not_gluon(machine, K, K, dtype)


def block_backward_at_once(dtype: torch.dtype, machine: Machine) -> bool:
    """Whether one kernel makes all gradients of a block.

    On other GPUs its values do not fit their registers. Nor quite with Triton 3.8 and 3.9, where it was not measured.
    """
    return dtype == torch.bfloat16 and machine.hopper and machine.triton < (3, 8)


def too_small(dtype: torch.dtype, head_dim: int, where: Machine) -> str:
    """Why the kernels do not fit a GPU's shared memory, or ""."""
    has = shared_memory(where.capability)
    this = f"this GPU {where.capability} has {has} KiB of shared memory per program"
    wide = _FLOAT32_BLOCKS.get(where.triton, _FLOAT32_MOST)
    if head_dim > 64 and dtype == torch.float32 and has < wide:
        return f"expected bfloat16 or float16 for head dims over 64 (float32 needs {wide} KiB), {this}"
    if head_dim <= 64 and dtype == torch.float32 and has < _FLOAT32_3_8 and where.triton == (3, 8):
        return (
            f"expected bfloat16 or float16, or another Triton than 3.8 (float32 needs {_FLOAT32_3_8} KiB there), {this}"
        )
    if head_dim > 64 and has < _SMALL and where.triton not in _FITS:
        *fits, got = (f"{major}.{minor}" for major, minor in (*_FITS, where.triton))
        return f"expected Triton {', '.join(fits)} for head dims over 64, got {got}: {this}"
    return ""
