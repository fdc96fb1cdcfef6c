"""What launches ask of tensors' addresses and strides."""

from __future__ import annotations

import pytest
import torch

from attnzoo.kernels.common.launching import can_describe, describable

SHAPE = (2, 5, 3, 16)


@pytest.mark.parametrize("offset", [0, 1, 4, 8])
def test_a_contiguous_view_can_be_described_wherever_it_begins(offset: int) -> None:
    x = torch.randn(offset + 2 * 5 * 3 * 16, dtype=torch.float32).half()[offset:].view(SHAPE)
    y = describable(x)
    assert can_describe(y)
    assert torch.equal(x, y)
    assert (y is x) == (offset % 8 == 0)


@pytest.mark.parametrize("stand", [(0, 2, 1, 3), (0, 1, 3, 2), (1, 0, 2, 3)])
def test_strided_and_broadcast_tensors_can_be_described(stand: tuple[int, ...]) -> None:
    x = torch.randn([SHAPE[i] for i in stand]).half().permute([stand.index(i) for i in range(4)])
    for y in (x, x[:, :1].expand(SHAPE), x[..., :8]):
        assert can_describe(describable(y))
        assert torch.equal(describable(y), y)
