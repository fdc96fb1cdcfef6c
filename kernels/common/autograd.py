"""What autograd must know of the ops that compute gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from torch._library.custom_ops import CustomOpDef


def refuse_second_derivatives(op: CustomOpDef) -> None:
    """Let ``op``, which computes gradients, say that these have no gradients themselves."""

    def backward(ctx: Any, *grads: Tensor | None) -> None:
        raise RuntimeError(
            "the kernels have first derivatives only: a gradient of a gradient (create_graph=True) expects "
            "impl='reference' of the kernels' functions, or attnzoo.oracle"
        )

    op.register_autograd(backward)


__all__ = ["refuse_second_derivatives"]
