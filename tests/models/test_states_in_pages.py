"""Recurrences over states in an engine's pages: requests in pieces, beside others, go on as each sequence alone."""

import types

import pytest
import torch

from attnzoo import build_attention, get, list_variants
from attnzoo.models.vllm.linear import recur
from attnzoo.models.vllm.storage import storage_of
from attnzoo.models.vllm.stream import ServedStream, Step

LINEAR = {name: (name, {}) for name in list_variants() if get(name).side == "linear"} | {
    "hgrn2": ("gla", {"block": "hgrn2"}),
    "deltaproduct": ("deltanet", {"num_householder": 3, "conv_size": 4}),
    "gated_deltaproduct": ("gated_deltanet", {"num_householder": 2}),
    "grouped": ("gated_deltanet", {"num_heads": 4, "num_qk_heads": 2, "head_dim": 8, "value_dim": 12, "conv_size": 4}),
    "trapezoid": ("mamba3", {"trapezoid": True, "qk_bias": True, "head_dim": 16}),
    "corrected": ("gated_deltanet", {"query_correction": True}),
    "rotary": ("retnet", {"rotary": 10000.0, "block": "pro"}),
}
LENGTHS = (23, 1, 9, 70)
STEPS = (  # (request, tokens) of each step
    ((3, 40), (0, 7)), ((0, 1), (3, 13)), ((1, 1), (0, 12), (2, 8)), ((2, 1), (3, 17), (0, 2)), ((0, 1),),
)  # fmt: skip
PAGES = (5, 2, 7, 0)  # of the requests


@pytest.mark.parametrize("name", LINEAR)
@torch.no_grad()
def test_requests_in_pieces_beside_others_go_on_as_each_alone(name):
    variant, options = LINEAR[name]
    torch.manual_seed(0)
    layer = build_attention(variant, **{"hidden_size": 32, "num_heads": 2, **options}).double().eval()
    slots = storage_of(layer, 3).slots
    tensors = {slot.name: torch.full((8, *slot.shape), torch.nan, dtype=slot.dtype) for slot in slots}
    served = types.SimpleNamespace(states=types.SimpleNamespace(tensors=tensors))
    served.core = lambda stream, own, form, call, n: recur(stream, own, layer.impl, call, n)
    x = [torch.randn(1, T, 32, dtype=torch.float64) for T in LENGTHS]
    read, found = [0] * len(x), [[] for _ in x]
    for step in STEPS:
        rows = torch.cat([x[i][:, read[i] : read[i] + n] for i, n in step], 1)
        place = torch.cat([torch.arange(read[i], read[i] + n) for i, n in step])
        borders = torch.tensor([0, *(n for _, n in step)]).cumsum(0)
        metadata = types.SimpleNamespace(
            query_start_loc=borders, state_indices_tensor=torch.tensor([PAGES[i] for i, _ in step]),
            seq_lens=torch.tensor([read[i] + n for i, n in step]),
        )  # fmt: skip
        T = rows.shape[1]
        stream = ServedStream(None, None, (1, T), rows.device, layer=served, place=place, step=Step.of(metadata, T))
        y = layer(rows, cache=stream)
        for (i, n), a in zip(step, borders.tolist(), strict=False):
            found[i].append(y[:, a : a + n])
            read[i] += n
    assert read == list(LENGTHS)
    for i, whole in enumerate(x):
        torch.testing.assert_close(torch.cat(found[i], 1), layer(whole), rtol=0, atol=1e-10)
    untouched = [page for page in range(8) if page not in PAGES]
    assert all(bool(kept[untouched].isnan().all()) for kept in tensors.values())
