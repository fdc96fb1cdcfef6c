"""The numbers of ``constants.py`` as Triton and Gluon kernels read them."""

from __future__ import annotations

import triton.language as tl

from attnzoo.kernels.common import constants

TL_LOG2E = tl.constexpr(constants.LOG2E)
TL_CLOSED = tl.constexpr(constants.CLOSED)
