"""What a layer asks of a serving engine, and which layers vLLM cannot serve; known without vLLM."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from attnzoo import build_attention
from attnzoo.models.vllm.refusals import check_layers, refusal
from attnzoo.models.vllm.storage import storage_of, storages_of


def layer(name: str, **options: Any) -> Any:
    with torch.device("meta"):
        return build_attention(name, hidden_size=32, num_heads=4, **options)


@pytest.mark.parametrize(
    ("name", "options", "kv_heads", "key_dim", "slots"),
    [
        ("nope", {"num_kv_heads": 2}, 2, 8, {}),
        ("alibi", {"num_kv_heads": 2}, 2, 8 + 2 * 3, {}),  # two query heads share a key
        ("rope", {"value_dim": 24}, 4, 24, {}),
        ("rope", {"gate": "selective", "num_kv_heads": 2}, 4, 8, {"angle": (3, 16), "phase": (4, 4)}),
        ("fox", {"block": "pro"}, 4, 8 + 3, {"k_shift": (1, 32), "v_shift": (1, 32), "sums": (4,)}),
        ("fox_rope", {"gate": ["rotary", "forget"]}, 4, 8 + 3, {"sums": (4,)}),
        ("mamba2", {"conv_size": 0}, 0, 0, {"matrix": (4, 128, 16)}),
        (
            "gated_deltanet",
            {"num_qk_heads": 2, "head_dim": 16, "value_dim": 24, "conv_size": 4},
            0,
            0,
            {"q": (3, 32), "k": (3, 32), "v": (3, 96), "matrix": (4, 16, 24)},
        ),
    ],
)
def test_keys_and_state_of_a_layer(name: str, options: Any, kv_heads: int, key_dim: int, slots: Any) -> None:
    found = storage_of(layer(name, **options), 3)
    assert (found.kv_heads, found.key_dim) == (kv_heads, key_dim)
    assert {slot.name: slot.shape for slot in found.slots} == slots
    ends = [(at, at + slot.bytes) for slot, at in found.places()]
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ends))
    assert not ends or ends[-1][1] <= found.bytes
    assert all(at % slot.dtype.itemsize == 0 for slot, at in found.places())


def test_layers_with_keys_store_equally_many_heads_of_them() -> None:
    layers = [
        layer("fox", num_kv_heads=2),
        layer("mamba2"),
        layer("rope", num_kv_heads=1),
        layer("rope", num_kv_heads=4),
    ]
    found = storages_of(layers, 3)
    assert [(one.kv_heads, one.key_dim) for one in found] == [(4, 8 + 3), (0, 0), (4, 8), (4, 8)]
    assert [one.kv_heads for one in storages_of(layers[:3], 3)] == [2, 0, 2]
    assert [one.kv_heads for one in storages_of(layers[1:2], 3)] == [0]


@pytest.mark.parametrize(
    ("name", "options", "dtype", "reason"),
    [
        ("path", {}, torch.float32, "later tokens change its cached keys (w, beta)"),
        ("wall", {}, torch.float32, "later tokens change its cached keys (log_diag)"),
        ("fox", {"sinks": True}, torch.float32, "a sink takes part"),
        ("alibi", {"softcap": 5.0}, torch.float32, "softcap"),
        ("fox", {}, torch.float16, "expected --dtype bfloat16 or float32"),
        ("nope", {"softcap": 5.0}, torch.float16, ""),
        ("rope", {"sinks": True, "window": 8}, torch.bfloat16, ""),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(name: str, options: Any, dtype: torch.dtype, reason: str) -> None:
    one = layer(name, **options)
    assert reason in refusal(one, dtype)
    if not reason:
        assert not refusal(one, dtype)
        return
    with pytest.raises(ValueError, match=f"^layer 1: expected one that vLLM can serve, got '{name}': "):
        check_layers([layer("nope"), one], dtype)


def test_tokens_that_attention_and_mlp_mix_are_kept_where_values_of_the_first_layer_are_mixed_in() -> None:
    one = layer("rwkv7", value_residual=2)
    found = {slot.name: slot.shape for slot in storage_of(one, 3, mixes=True).slots}
    assert found == {"mix": (1, 32), "gate_mix": (1, 32), "mlp_mix": (1, 32), "matrix": (4, 8, 8)}
    assert not refusal(one, torch.float32)
