"""What launches ask of tensors' addresses and strides."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from attnzoo.kernels import norms
from attnzoo.kernels.common.launching import can_describe, describable, dot_precision

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


@pytest.fixture
def settings() -> Iterator[None]:
    """The settings of float32 products, left as they were."""
    newer = hasattr(torch.backends.cuda.matmul, "fp32_precision")
    if newer:
        before = torch.backends.fp32_precision, torch.backends.cuda.matmul.fp32_precision
    yield
    torch.set_float32_matmul_precision("highest")
    if newer:
        torch.backends.fp32_precision, torch.backends.cuda.matmul.fp32_precision = before


def by_name(precision: str) -> None:
    torch.backends.cuda.matmul.fp32_precision = precision


def of_all(precision: str) -> None:
    torch.backends.fp32_precision = precision


@pytest.mark.parametrize(
    ("sets", "found"),
    [
        ([], "ieee"),
        ([(torch.set_float32_matmul_precision, "high")], "tf32"),
        ([(torch.set_float32_matmul_precision, "high"), (torch.set_float32_matmul_precision, "highest")], "ieee"),
        ([(by_name, "tf32")], "tf32"),
        ([(of_all, "tf32")], "tf32"),
        ([(torch.set_float32_matmul_precision, "high"), (by_name, "ieee")], "ieee"),
    ],
)  # fmt: skip
def test_products_of_float32_are_as_exact_as_torch_was_asked_for_by_either_name(
    sets: list[tuple[Callable[[str], None], str]], found: str, settings: None
) -> None:
    """torch raises an error, or answers by the older setting, where it is asked by the older name after a newer one."""
    newer = any(one is not torch.set_float32_matmul_precision for one, _ in sets)
    if newer and not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this torch has the older name alone")
    for one, value in sets:
        one(value)
    assert dot_precision(torch.float32) == found
    assert dot_precision(torch.float16) == "ieee"
    x = torch.randn(1, 3, 2, 8)
    torch.testing.assert_close(norms.head_norm(x, kind="l2", eps=1e-6), torch.nn.functional.normalize(x, dim=-1))
