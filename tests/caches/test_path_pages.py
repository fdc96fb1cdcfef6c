"""Keys of PaTH in groups of pages: histories of calls and crops against the whole text."""

from __future__ import annotations

import pytest
import torch

from attnzoo import get
from attnzoo.forms.caches.pages.page_table import PAGE, PoolSizes
from attnzoo.forms.caches.pages.paged_cache import PagedCache
from attnzoo.forms.caches.path_pages.pool import CarriedPool
from attnzoo.samples import random_inputs
from attnzoo.testing import relative_error

# Tokens that are taken, or, below 0, how many are left.
CROPS = [(6, 140, -130, 20, -148, 5), (6, 140, -2 * PAGE, 70, 20, -198, 20), (10, 270, -140, 30, -160, 3, -157, 4)]


@pytest.mark.parametrize("history", CROPS, ids=str)
@torch.no_grad()
def test_tokens_after_a_crop_are_cropped_as_others_are(history: tuple[int, ...]) -> None:
    """Also where the first of them went back behind a record of the tokens as they came."""
    variant, T = get("path_fox"), sum(n for n in history if n > 0)
    q, k, v, gate = random_inputs("path_fox", 1, T, 2, 1, 8, 4, seed=1)
    state = PagedCache.of(CarriedPool.empty(PoolSizes(1, 1, 2, 8, 4), dtype=torch.float64, recent=(), group=1))
    kept, at = list[int](), 0
    for n in history:
        if n < 0:
            state, kept = state.crop(-n), kept[:-n]
            continue
        now, at = slice(at, at + n), at + n
        o, state = variant.extend(q[:, now], k[:, now], v[:, now], gate.slice(now.start, now.stop), state)
        kept += range(now.start, now.stop)
        whole = variant.forms["parallel"](q[:, kept], k[:, kept], v[:, kept], gate.map(lambda x: x[:, kept]))  # noqa: B023
        assert relative_error(o, whole[:, -n:]) <= 1e-12
