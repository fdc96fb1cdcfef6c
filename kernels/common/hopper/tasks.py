"""Programs that stay: as many as the GPU holds at once. The loader of each takes one task after another."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnzoo.kernels.common.hopper.releases import barrier


@gluon.jit
def announce_task(task_s, n, j):
    """Loader, of one warp: the j-th task is n. The barrier that is completed next tells others that it is there."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    zero = gl.full([1], 0, gl.int32, one)
    task_s.index(0).store(zero + n)
    task_s.index(1).store(zero + j)
    barrier()


@gluon.jit
def announced(task_s):
    """Task, and how many the loader had taken before."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(task_s.index(0).load(one), 0), gl.max(task_s.index(1).load(one), 0)
