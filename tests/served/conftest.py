"""Settings of vLLM on a CPU."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def pytest_addoption(parser: pytest.Parser) -> None:
    served = parser.getgroup("served")
    served.addoption("--requests", type=int, default=60, help="requests to the server")
    served.addoption("--load-seed", type=int, default=0, help="seed of the requests")
