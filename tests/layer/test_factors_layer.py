"""Layers of several factors per token: caches, padding, packing, options, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from layers import D, assert_same, layer, rows

from attnzoo import build_attention
from attnzoo.forms.caches.inplace import BatchRows
from attnzoo.layer.inplace import FixedCache

NAMES = ("deltanet", "gated_deltanet", "path", "path_fox")
PRODUCTS = ("kda", "rope_gated_deltanet", "rope_gated_path_wall")
T = 23


@pytest.mark.parametrize("name", NAMES + PRODUCTS)
@torch.no_grad()
def test_pieces_padding_and_packing_equal_whole_sequences(name):
    attn, x = layer(name, num_householder=3), rows(2, T)
    whole, cache = attn(x), attn.new_cache()
    for a, b in ((0, 9), (9, 10), (10, 11), (11, T)):
        assert_same(attn(x[:, a:b], cache=cache), whole[:, a:b])
        assert cache.tokens == b
    mask = torch.ones(2, T, dtype=torch.bool)
    mask[0, :4], mask[1, 15:] = False, False
    y = attn(x, attention_mask=mask)
    assert_same(y[:1, 4:], attn(x[:1, 4:]))
    assert_same(y[1:, :15], attn(x[1:, :15]))
    packed = attn(x[:1], cu_seqlens=torch.tensor([0, 8, 9, T]))
    assert_same(packed, torch.cat([attn(x[:1, a:b]) for a, b in ((0, 8), (8, 9), (9, T))], 1))


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_steps_of_a_fixed_memory_equal_those_of_a_cache(name):
    attn, x = layer(name, num_householder=2), rows(2, 12)
    whole, like, batch = attn(x), attn.new_cache(), BatchRows.idle(2)
    attn(x[:1, :1], cache=like)
    fixed = FixedCache.of(attn, like, batch, 16)
    for row in range(2):
        cache = attn.new_cache()
        attn(x[row : row + 1, :5], cache=cache)
        fixed.admit(row, cache, 16)
        batch.begin(row, 5)
    for t in range(5, 12):
        fixed.ready([0, 1])
        assert_same(attn(x[:, t : t + 1], cache=fixed), whole[:, t : t + 1])
        batch.length += 1
        batch.lengths[:] = [t + 1] * 2


@pytest.mark.parametrize("name", ["path", "path_fox"])
@torch.no_grad()
def test_keys_in_pages_equal_a_whole_cache(name):
    attn, x = layer(name, "pro", num_householder=2, window=None if name == "path_fox" else 70), rows(2, 150)
    whole, paged = attn.new_cache(), attn.new_cache(evict=1e-25)
    for a, b in ((0, 70), (70, 71), (71, 140), *((t, t + 1) for t in range(140, 150))):
        assert_same(attn(x[:, a:b], cache=paged), attn(x[:, a:b], cache=whole))


@pytest.mark.parametrize("name", NAMES)
def test_one_factor_is_the_default(name):
    torch.manual_seed(0)
    one = build_attention(name, hidden_size=D, num_heads=2, num_householder=1)
    torch.manual_seed(0)
    assert torch.equal(one(torch.ones(1, 3, D)), build_attention(name, hidden_size=D, num_heads=2)(torch.ones(1, 3, D)))


def test_a_token_has_a_key_a_value_and_a_strength_for_each_factor():
    attn = build_attention("gated_deltanet", hidden_size=D, num_heads=3, num_householder=2, head_dim=8)
    assert attn.k_proj.weight.shape == attn.v_proj.weight.shape == (2 * 24, D)
    assert attn.gate.members[1].beta_proj.weight.shape == (2 * 3, D)
    projected = attn.project(torch.randn(1, 5, D))
    assert projected.k.shape == projected.v.shape == (1, 10, 3, 8)  # as the core gets them
    assert not projected.q[:, 0::2].any()
    path = build_attention("path_fox", hidden_size=D, num_heads=3, num_householder=2, head_dim=8)
    assert path.k_proj.weight.shape == (24, D)
    assert path.project(torch.randn(1, 5, D)).gate.w.shape == (1, 5, 3, 2, 8)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("name", ["gated_deltanet", "kda"])
@torch.no_grad()
def test_queries_and_keys_of_several_heads_are_those_of_each(name, number):
    sizes = {"hidden_size": D, "num_heads": 4, "head_dim": 8, "num_householder": 3}
    shared, own = build_attention(name, **sizes, num_qk_heads=number), build_attention(name, **sizes)
    weights = shared.state_dict()
    for key, x in own.state_dict().items():
        if weights[key].shape != x.shape:
            weights[key] = weights[key].unflatten(0, (number, -1)).repeat_interleave(4 // number, 0).flatten(0, 1)
    own.load_state_dict(weights)
    x = rows(2, T)
    assert_same(shared.double()(x), own.double()(x))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("deltanet", {"num_householder": 0}, "num_householder: expected at least 1 factor per token, got 0"),
        ("path", {"num_householder": -1}, "num_householder: expected at least 1 factor per token, got -1"),
        ("path", {"num_householder": 2, "w": "key"}, "num_householder: expected 1 with w='key'"),
        ("path", {"w_rank": 8, "w": "key"}, "w_rank: expected 32 with w='key'"),
        ("path_fox", {"w_conv_size": 0, "w": "key"}, "w_conv_size: expected 3 with w='key'"),
        ("deltanet", {"num_householder": 2, "skip": True}, "num_householder: expected 1 with skip"),
        ("kda", {"num_householder": 3, "query_correction": True}, "num_householder: expected 1 with query_correction"),
        ("gated_deltanet", {"num_householder": 2, "gate": ("mamba2", "delta")}, "a second write strength in gate"),
        ("fox", {"num_householder": 2}, "option 'num_householder' of 'fox'"),
        ("deltanet", {"num_housholder": 2}, "did you mean 'num_householder'"),
    ],
)
def test_what_does_not_go_together_is_refused(name, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        build_attention(name, hidden_size=D, num_heads=2, **options)


def test_a_kernel_that_takes_one_factor_says_so():
    attn = build_attention("path", hidden_size=32, num_heads=2, num_householder=2, impl="triton")
    with pytest.raises(RuntimeError, match="its kernels of whole sequences take one factor per token, got 2"):
        attn(torch.randn(1, 4, 32))


@pytest.mark.parametrize("name", ["gated_deltanet", "path_fox"])
def test_a_layer_compiles_as_one_graph(name):
    attn, x = layer(name, num_householder=2), rows(1, 5)
    torch._dynamo.reset()  # what else was compiled in this process counts towards its limit
    assert_same(torch.compile(attn, fullgraph=True, backend="eager")(x), attn(x))
