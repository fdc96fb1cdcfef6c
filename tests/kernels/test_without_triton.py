"""The kernels' packages where Triton is not installed."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name.startswith("triton") else find(name, *a)
import torch
from attnzoo.kernels.fox import fox_attention
from attnzoo.kernels.path import path_attention
assert "triton" not in sys.modules, "importing the packages imported triton"
x = torch.nn.functional.normalize(torch.randn(1, 4, 1, 16), dim=-1)
gates = {fox_attention: {"log_decay": None}, path_attention: {"w": x, "beta": torch.ones(1, 4, 1)}}
for attention, gate in gates.items():
    attention(x, x, x, **gate)
    try:
        attention(x, x, x, **gate, impl="triton")
    except ImportError as e:
        assert "triton package is not installed" in str(e), e
    else:
        raise AssertionError(f"no error of {attention}")
assert "triton" not in sys.modules
"""


def test_importing_needs_no_triton_and_asking_for_it_says_so() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
