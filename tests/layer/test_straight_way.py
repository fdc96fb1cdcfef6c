"""A forward takes few calls in few files: what does not vary between calls is decided when the layer is built."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from attnzoo import build_attention
from attnzoo.benchmarks.host import HEADS, WIDTH, calls, hidden, layer

# calls of the package's functions and files that they are in, at most: what Python 3.11 counts, comprehensions too
MOST = {
    "fox": (50, 12), "rope": (39, 12), "mamba2": (80, 12), "fox, Pro block, acp": (82, 16), "path_fox": (103, 17),
    "gla": (72, 12),
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


@pytest.mark.parametrize("name", ["fox", "path_fox", "wall", "kda", "deltanet", "rope_path"])
def test_a_forward_without_a_gradient_gives_the_same_numbers(name: str) -> None:
    attn, x = build_attention(name, hidden_size=WIDTH, num_heads=HEADS), hidden()
    for mask in (None, torch.arange(x.shape[1])[None] > 3):
        expected = attn(x, attention_mask=mask).detach()
        with torch.no_grad():
            assert torch.equal(attn(x, attention_mask=mask), expected)
