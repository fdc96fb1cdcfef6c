"""Checks of ops that are declared by named tuples, under ``torch.library``'s own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attnzoo.kernels.common.named_op import NamedOp

ALL = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
FAKES = ("test_schema", "test_faketensor")


def opcheck(op: NamedOp[Any, Any], given: Any, test_utils: Sequence[str] = ALL) -> None:
    """``torch.library.opcheck`` of the op on the leaves of its inputs."""
    torch.library.opcheck(op.op, tuple(op.inputs.leaves(given)), test_utils=test_utils)
