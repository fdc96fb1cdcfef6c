"""Where kernel families run: tables from a plan's names to launchers, one of each per kind of machine."""

from __future__ import annotations

import inspect

import pytest

from attnzoo.kernels.common.device import triton_version
from attnzoo.kernels.common.plans import launcher
from attnzoo.kernels.fox import plan as fox
from attnzoo.kernels.levels import plan as levels

pytest.importorskip("triton")
TABLES = {"fox": (fox.FORWARD, fox.BACKWARD), "levels": (levels.FORWARD, levels.BACKWARD)}


@pytest.mark.skipif(triton_version() < (3, 6), reason="needs Triton 3.6 for Gluon")
@pytest.mark.parametrize("family", TABLES)
@pytest.mark.parametrize("backward", [False, True])
def test_launchers_of_a_table_exist_and_take_the_same_arguments(family: str, backward: bool) -> None:
    found = {name: launcher(place) for name, place in TABLES[family][backward].items()}
    assert {"portable", "hopper"} <= found.keys()
    assert len({tuple(inspect.signature(function).parameters) for function in found.values()}) == 1
    assert len({function.__name__ for function in found.values()}) == len(found)
