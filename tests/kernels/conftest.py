"""The kernels' tests are left out where there is no Triton; ``tests/conftest.py`` has the rest."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_fox*.py", "test_path*.py", "test_wall*.py"]
