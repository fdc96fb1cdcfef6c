"""Fixtures of the tests of layers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def deterministic() -> Iterator[None]:
    """PyTorch's deterministic mode."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
