"""NaN in a token is seen in its row and, by way of its key and value, in those after it: no weight of 0 hides it."""

from __future__ import annotations

import pytest
import torch

from attnzoo import Gate, get


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("T", [1, 2, 3, 4, 7, 8, 15, 16, 17, 33, 257])
@pytest.mark.parametrize("name", ["nope", "rope", "fox"])
def test_nan_is_not_hidden(name: str, T: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    parts = {"rope": Gate(angle=torch.rand(4)), "fox": Gate(log_decay=-torch.rand(1, T, 2) / 100), "nope": Gate()}
    for part in "qkv":
        for at in {0, T // 2, T - 1}:
            x = {n: torch.randn(1, T, 2, 8, dtype=dtype) for n in "qkv"}
            x[part][:, at] = torch.nan
            o = get(name).forms["parallel"](x["q"], x["k"], x["v"], parts[name])
            rows = o.isnan().all(-1).all(-1)[0]
            assert bool(rows[at]), (part, at)
            assert part == "q" or bool(rows[at:].all()), (part, at)
            assert part == "v" or not bool(rows[:at].any()), (part, at)
