"""Functions of float32 that a GPU computes in one instruction, where Triton's own take many.

Triton's ``log2`` is about twenty instructions, and its quotient eight; what these lose is a rounding or two.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from attnzoo.kernels.common.device import interpreted

_INTERPRETED = tl.constexpr(interpreted())  # which knows Triton's own alone


@triton.jit
def log2(x):
    """log2 of normal numbers, to 2^-22 of the result, or of 1 where it is less."""
    return tl.log2(x) if _INTERPRETED else libdevice.fast_log2f(x)


@triton.jit
def reciprocal(x):
    """1 / x to a rounding; 0 from 2^126 on."""
    return 1.0 / x if _INTERPRETED else _reciprocal(x)


@triton.jit
def _reciprocal(x):
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
