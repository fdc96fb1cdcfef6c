"""What ``torch.func`` may ask of a kernel's public function."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


def assert_only_auto_is_transformed(loss: Callable[[Tensor, str], Tensor], q: Tensor) -> None:
    """An explicit kernel says that ``torch.func`` has no way into it; ``auto`` takes what can be transformed.

    Args:
        loss: a number from q and ``impl``.
        q: queries.
    """
    with pytest.raises(ValueError, match=r"torch.func \(grad, vmap, jvp\) cannot see .* impl='reference'"):
        torch.func.grad(loss)(q, "triton")
    (want,) = torch.autograd.grad(loss(q.requires_grad_(), "triton"), q)
    torch.testing.assert_close(torch.func.grad(loss)(q.detach(), "auto"), want, atol=1e-5, rtol=1e-4)
    many = torch.stack([q.detach(), 2 * q.detach()])
    got = torch.vmap(torch.func.grad(loss), in_dims=(0, None))(many, "auto")
    torch.testing.assert_close(got[0], want, atol=1e-5, rtol=1e-4)
