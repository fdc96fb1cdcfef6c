"""The context of a block of code, for compiled layers too. Importing it loads the compiler."""

from __future__ import annotations

import torch

from attnzoo.parallel.context import CURRENT, Context


@torch.compiler.disable
def entered() -> Context | None:
    """The context of this thread's block, which compiled code cannot ask for."""
    return CURRENT.get()
