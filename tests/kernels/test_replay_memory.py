"""Memory of runs that are replayed."""

from __future__ import annotations

import pytest
import torch

from attnzoo.kernels.common import memory


@pytest.mark.parametrize(
    ("sizes", "events", "together"),
    [
        ({1: 1, 2: 2}, [1, -1, 2, -2], [1, 2]),  # small ones share whatever comes
        ({1: 90, 2: 1, 3: 50}, [1, 2, 3], [1, 2, 3]),  # held to the end
        ({1: 90, 2: 50}, [1, -1, 2], []),  # one after the other
        ({1: 50, 2: 60, 3: 90}, [1, 2, -2, 3, -1], [1]),
        ({1: 90, 2: 60, 3: 30}, [1, 3, -1, 2], [3]),
    ],
)
def test_tensors_share_memory_as_long_as_no_more_is_held(
    sizes: dict[int, int], events: list[int], together: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "SMALL", 9)
    assert memory.joined([*sizes], sizes, events) == together


def test_what_is_returned_counts_but_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SMALL", 9)
    assert memory.joined([1, 3], {1: 50, 2: 60, 3: 50}, [1, 2, 3, -1]) == [1, 3]
    assert memory.joined([1, 3], {1: 50, 2: 60, 3: 50}, [1, 2, -1, 3]) == []


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("inference", [True, False])
def test_memory_is_taken_as_asked(compiled: bool, inference: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cpu")
    with torch.inference_mode(inference):
        x = memory.allocator(torch.device("cpu"))((2, 3), (4, 1), torch.float16)
    assert (x.shape, x.stride(), x.dtype, x.device.type) == ((2, 3), (4, 1), torch.float16, "cpu")
    assert x.is_inference() == inference


def test_bytes_of_a_tensor_reach_to_the_next_aligned_one() -> None:
    assert memory.occupied((2, 3), (4, 1), torch.float32) == memory.ALIGNED
    assert memory.occupied((2, 128), (200, 1), torch.float32) == 3 * memory.ALIGNED
