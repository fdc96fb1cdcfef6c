"""A forward takes few calls in few files: what does not vary between calls is decided when the layer is built."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from attnzoo.benchmarks.host import calls, hidden, layer

# calls of the package's functions and files that they are in, at most: what Python 3.11 counts, comprehensions too
MOST = {
    "fox": (60, 16), "rope": (52, 16), "mamba2": (100, 14), "fox, Pro block, acp": (125, 21), "path_fox": (175, 21),
    "gla": (95, 14),
}  # fmt: skip


@pytest.mark.parametrize("name", MOST)
@torch.no_grad()
def test_a_forward_takes_few_calls_in_few_files(name: str) -> None:
    forward = partial(layer(name), hidden())
    forward()  # some things are said or imported once
    count, files = calls(forward)
    assert count <= MOST[name][0]
    assert files <= MOST[name][1]


def test_calls_are_those_of_the_package_alone() -> None:
    assert calls(lambda: torch.nn.Linear(2, 2)(torch.zeros(1, 2))) == (0, 0)
    assert calls(hidden) == (1, 1)
