"""The kernels' tests are left out where there is no Triton; ``tests/conftest.py`` has the rest."""

from __future__ import annotations

import importlib.util

NAMES = ("decode", "fox", "linear", "path", "wall")
collect_ignore_glob = [] if importlib.util.find_spec("triton") else [f"test_{name}*.py" for name in NAMES]
