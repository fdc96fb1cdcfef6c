"""Caches of fixed size: a step of one token of each sequence changes them where they stand."""

import pytest
import torch
from generated import build, filled
from layers import assert_same, layer, rows

from attnzoo import build_attention
from attnzoo.errors import UnavailableError
from attnzoo.forms.caches.inplace import BatchRows
from attnzoo.forms.caches.inplace_keys import CarriedMemory
from attnzoo.forms.softmax import SoftmaxForms
from attnzoo.layer.inplace import FixedCache
from attnzoo.models import Generator
from attnzoo.registry import get, list_variants


@pytest.mark.covering
@pytest.mark.parametrize("name", list_variants())
@pytest.mark.parametrize("options", [{}, {"window": 6, "sinks": True}, {"block": "pro"}], ids=["", "window", "pro"])
@pytest.mark.parametrize("paged", [None, False], ids=["paged", "whole"])
def test_a_step_in_place_is_the_layers_own_step(name, options, paged):
    if "window" in options and get(name).side == "linear":
        options = {"kv_shift": True, "conv_size": 3, "rotary": 100.0}
    attn = layer(name, **options)
    fixed, caches = filled(attn, (1, 9, 4), 16, paged)
    with torch.no_grad():
        for step in range(4):
            x = rows(3, 1, seed=10 + step)
            y = attn(x, cache=fixed)
            expected = torch.cat([attn(x[n : n + 1], cache=cache) for n, cache in enumerate(caches)])
            assert_same(y, expected)
            fixed.rows.length += 1


@pytest.mark.parametrize(("name", "options"), [
    ("path_fox", {"window": 6, "sinks": True}), ("rope_path", {"num_kv_heads": 4}),
], ids=["window", "turned"])  # fmt: skip
def test_the_kernel_of_path_steps_where_the_keys_stand(name, options):
    """Of the three tokens of a step in the midst, each sequence keeps some."""
    torch.manual_seed(0)
    attn = build_attention(name, **{"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, **options})
    lengths, batch = (1, 9, 4, 0), BatchRows.idle(4)
    caches, like = [attn.new_cache() for _ in lengths[:3]], attn.new_cache()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        attn(torch.randn(1, 1, 32, generator=draw), cache=like)
        memory = attn.variant.form_set.kernels["triton"].in_place(like.state, batch, 16, "cpu")
        assert isinstance(memory, CarriedMemory)
        windows = {name: x.new_zeros(4, *x.shape[1:]) for name, x in like.windows.items()}
        fixed = FixedCache(memory, windows, batch)
        for row, (T, cache) in enumerate(zip(lengths, caches, strict=False)):
            attn(torch.randn(1, T, 32, generator=draw), cache=cache)
            fixed.admit(row, cache, 16)
            batch.begin(row, T)
        for kept in ((1, 1, 1), (3, 1, 2), (1, 1, 1)):
            batch.tokens = max(kept)
            x = torch.randn(4, batch.tokens, 32, generator=draw)
            y = attn(x, cache=fixed)
            for n, (some, cache) in enumerate(zip(kept, caches, strict=True)):
                expected = attn(x[n : n + 1, :some], cache=cache)
                error = 2e-6 * float(expected.abs().max()) + 1e-8
                torch.testing.assert_close(y[n : n + 1, :some], expected, rtol=0, atol=error)
            moved = torch.tensor([*kept, 0])
            if batch.tokens > 1:
                fixed.keep(moved)
            batch.length += moved


def test_a_cache_of_fixed_size_takes_one_token_of_each_sequence():
    model = build()
    generator = Generator(model, 2, 8)
    layer, cache = model.attentions()[0], generator.batch.caches[0]
    with pytest.raises(ValueError, match=r"x: expected one token of each of 2 rows, got \(2, 2, 32\)"):
        layer(torch.randn(2, 2, 32), cache=cache)
    with pytest.raises(ValueError, match="attention_mask: expected None with a cache of fixed size"):
        layer(torch.randn(2, 1, 32), cache=cache, attention_mask=torch.ones(2, 1))


def test_steps_in_place_are_refused_where_nothing_that_was_asked_for_takes_them(monkeypatch):
    model = build(attention="path")
    like = model.new_cache()
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.int64), cache=like)
    layer = model.attentions()[0]
    layer.impl = "triton"
    with pytest.raises(UnavailableError, match="impl='triton': no kernel takes a step of 'path' in place"):
        FixedCache.of(layer, like[0], BatchRows.idle(1), 8)
    monkeypatch.delattr(SoftmaxForms, "in_place")
    with pytest.raises(ValueError, match="variant: expected one whose FORMS offer a memory of fixed size, got 'path'"):
        Generator(build(attention="path"), 1, 8)
