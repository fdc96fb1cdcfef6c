"""Functions of single numbers, in float32, that the kernels share."""

import triton
import triton.language as tl


@triton.jit
def log_sigmoid(x):
    """-log(1 + exp(-x)), with a small relative error however small it is. # float32"""
    y = tl.exp(-tl.abs(x))
    s = y / (2.0 + y)  # log(1 + y) = 2 artanh(s), s <= 1/3
    z = s * s
    p = 1.0 + z * (1 / 3 + z * (1 / 5 + z * (1 / 7 + z * (1 / 9 + z * (1 / 11 + z * (1 / 13 + z / 15))))))
    return tl.minimum(x, 0.0) - 2.0 * s * p
