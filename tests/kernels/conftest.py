"""The kernels' tests are left out where there is no Triton; ``tests/conftest.py`` has the rest."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

NAMES = ("convolution", "decode", "fox", "linear", "norms", "path", "retention", "rotation", "wall")
collect_ignore_glob = [] if importlib.util.find_spec("triton") else [f"test_{name}*.py" for name in NAMES]


@pytest.fixture(autouse=True)
def memory_is_not_zero_by_chance() -> Iterator[None]:
    """New memory holds NaN, so that what no program has written is seen: on a CPU all of it, on a GPU much of it."""
    import torch

    if torch.cuda.is_available():
        torch.full((2**26,), torch.nan, device="cuda")  # freed, and handed out again
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def few_keys_are_pruned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a GPU, where pruning few keys is not worth the search for them."""
    import torch

    if torch.cuda.is_available():
        monkeypatch.setattr("attnzoo.kernels.fox.plan.SEARCHED_FROM", 0)
        monkeypatch.setattr("attnzoo.kernels.fox.plan.SEARCHED_WORK", 0)
