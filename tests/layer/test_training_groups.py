"""Shifted sparse attention: in training rows see the tokens of their own group, by an oracle; in evaluation all."""

from __future__ import annotations

import pytest
import torch
from layers import assert_same, layer, rows

from attnzoo import build_attention
from attnzoo.forgetting.rules import Forgetting

GROUP, T = 4, 11


def by_mask(attn, x):
    """The core's output where a mask over all pairs leaves each row the keys of its group, from the layer's projections
    and the weights of whole rows."""
    projected = attn.project(x)
    form = attn.variant.forms["parallel"]
    G = projected.v.shape[2]
    one = torch.eye(T, dtype=x.dtype)[:, None].expand(len(x), T, G, T)
    sink = {} if attn.sinks is None else {"sink": attn.sinks}
    weights = form(projected.q, projected.k, one, projected.gate, return_lse=True, **sink)
    weights, lse = weights[0].transpose(1, 2), weights[1].transpose(1, 2)
    place, H = torch.arange(T), weights.shape[1]
    rest = 0.0 if attn.sinks is None else (attn.sinks[:, None] - lse).exp()[..., None]
    seen = torch.stack([(place + half) // GROUP == ((place + half) // GROUP)[:, None] for half in (0, GROUP // 2)])
    weights = weights * seen.repeat_interleave(H // 2, 0)
    weights = weights / (weights.sum(-1, keepdim=True) + rest)
    return (weights @ projected.v.repeat_interleave(H // G, 2).transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize(
    ("name", "options"), [("rope", {}), ("fox", {"sinks": True}), ("alibi", {}), ("path_fox", {}), ("wall", {})]
)
def test_rows_of_training_see_their_own_group_alone(name, options):
    attn, whole = (layer(name, training_groups=groups, **options).train() for groups in (GROUP, None))
    whole.load_state_dict(attn.state_dict())
    x = rows(2, T)
    core = attn._core
    found = []
    attn._core = lambda *args: found.append(core(*args)) or found[-1]
    attn(x)
    assert_same(found[0][0], by_mask(attn, x))
    assert_same(attn.eval()(x), whole(x))


def test_padding_stays_outside_of_the_groups():
    attn, x = layer("rope", training_groups=GROUP).train(), rows(1, T)
    mask = torch.tensor([[1] * T + [0] * 2])
    padded = torch.cat([x, torch.full_like(x[:, :2], torch.nan)], 1)
    assert_same(attn(padded, attention_mask=mask)[:, :T], attn(x))


def test_groups_that_cannot_be_say_why():
    with pytest.raises(ValueError, match="training_groups: expected an even number of tokens and of key heads, got 5"):
        layer("rope", training_groups=5)
    with pytest.raises(ValueError, match="and of key heads, got 4 tokens and 3 key heads"):
        build_attention("rope", hidden_size=48, num_heads=3, training_groups=4)
    with pytest.raises(ValueError, match="training_groups: expected None .*linear_attention"):
        layer("linear_attention", training_groups=4)
    with pytest.raises(ValueError, match="training_groups: expected None with forgetting"):
        layer("rope", training_groups=4, forgetting=Forgetting())
    attn = layer("rope", training_groups=4).train()
    with pytest.raises(ValueError, match="cu_seqlens: expected None with training_groups"):
        attn(rows(1, 9), cu_seqlens=torch.tensor([0, 4, 9]))
