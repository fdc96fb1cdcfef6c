"""Inputs of several files here."""

import pytest
import torch
from generated import LENGTHS


@pytest.fixture
def rows():
    """Rows for imported models, whose vocabulary is 70."""
    return torch.randint(1, 70, (2, 33), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def prompts():
    """Prompts of different lengths for the generator's models."""
    draws = torch.Generator().manual_seed(1)
    return [torch.randint(0, 40, (T,), generator=draws) for T in LENGTHS]
