"""Kernel tests run on the Triton interpreter where there is no GPU; bfloat16 (wrong there) needs one."""

from __future__ import annotations

import importlib.util
import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, so it is set before anything else

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_fox*.py", "test_path*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") and not item.get_closest_marker("skip"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, and this machine has none"))
