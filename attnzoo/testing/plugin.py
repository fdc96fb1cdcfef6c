"""Options of pytest for :func:`attnzoo.testing.battery`, in every repository that has attnzoo installed."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("attnzoo").addoption(
        "--laws", choices=("quick", "thorough"), default="quick",
        help="examples of each law of attnzoo.testing.battery: 10 or 200",
    )  # fmt: skip
