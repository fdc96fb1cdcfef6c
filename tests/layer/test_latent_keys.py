"""Latent keys and values (MLA), and Comba's correction of the query: what they compute, and that caches go on."""

import pytest
import torch

from attnzoo import build_attention
from attnzoo.layer.modules import l2_normalize

MLA = {"hidden_size": 24, "num_heads": 3, "head_dim": 10, "value_dim": 7, "kv_rank": 9, "shared_key_dim": 4}


def layer(name, **options):
    torch.manual_seed(0)
    attn = build_attention(name, **options).double()
    for one in attn.parameters():
        torch.nn.init.normal_(one, std=0.5)
    return attn


@pytest.fixture
def x():
    return torch.randn(2, 9, 24, generator=torch.Generator().manual_seed(1)).double()


def test_keys_are_shared_channels_and_each_heads_own_from_the_normed_map(x):
    attn = layer("nope", **MLA)
    low = torch.nn.functional.rms_norm(attn.latent.down(x), (9,), attn.latent.norm.weight, 1e-6)
    own = attn.k_proj(low).unflatten(-1, (3, 6))
    k = torch.cat([attn.latent.shared(x)[:, :, None].expand(-1, -1, 3, -1), own], -1)
    q, v = attn.q_proj(x).unflatten(-1, (3, 10)), attn.v_proj(low).unflatten(-1, (3, 7))
    scores = torch.einsum("bthk,bjhk->bhtj", q, k) * 10**-0.5
    weights = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf).softmax(-1)
    torch.testing.assert_close(attn(x), attn.o_proj(torch.einsum("bhtj,bjhv->bthv", weights, v).flatten(2)))


def test_the_query_is_corrected_before_its_norm(x):
    attn = layer("gated_deltanet", hidden_size=24, num_heads=2, head_dim=6, conv_size=0, query_correction=True)
    q, k = (attn.q_proj(x).unflatten(-1, (2, 6)), attn.k_proj(x).unflatten(-1, (2, 6)))
    torch.testing.assert_close(attn.project(x).q, l2_normalize(q - attn.correction[:, None] * k))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rope", {**MLA, "rotated": 4}),
        ("fox", {**MLA, "shared_key_dim": 0, "num_kv_heads": 1}),
        ("gated_deltanet", {"hidden_size": 24, "num_heads": 2, "query_correction": True, "kv_rank": 5}),
    ],
)
def test_a_cache_goes_on(name, options, x):
    attn = layer(name, **options)
    cache = attn.new_cache()
    torch.testing.assert_close(torch.cat([attn(part, cache=cache) for part in x.split([5, 1, 3], 1)], 1), attn(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shared_key_dim": 4}, "shared_key_dim: expected 0 without kv_rank, got 4"),
        ({"kv_rank": 9, "shared_key_dim": 12}, "shared_key_dim: expected less than a key's 12, got 12"),
        ({"kv_rank": 0}, "kv_rank: expected a positive integer, got 0"),
        ({"num_kv_heads": 1, "query_correction": True}, "query_correction: expected False with 1 keys of 2 queries"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build_attention("nope", hidden_size=24, num_heads=2, **options)
