"""Steps of layers whose parts between the products with weights are one call: the same as part by part."""

import copy

import pytest
import torch
from layers import assert_same, layer, rows

from attnzoo.forms.caches.inplace import BatchRows
from attnzoo.layer.inplace import FixedCache
from attnzoo.layer.modules import HeadNorm
from attnzoo.precision import GateAffine

SERVED = {
    "fox-pro": ("fox", {"block": "pro"}),
    "fox-gated": ("fox", {"block": "gated", "scale_forget": True, "qkv_bias": True}),
    "alibi": ("alibi", {"output_norm": "group", "output_norm_shared": True, "output_gate": "swish", "window": 5}),
    "nope": ("nope", {"qk_norm": "rms", "qk_norm_shared": True, "kv_shift": True, "output_gate": "sigmoid"}),
    "softplus": ("fox", {"gate": "softplus", "sinks": True, "output_gate": "swish", "output_gate_low_rank": True}),
}
OTHERS = {
    "rope": ("rope", {}),
    "rotary": ("nope", {"rotary": 100.0}),
    "path": ("path_fox", {}),
    "unit": ("fox", {"qk_norm": "l2"}),
    "together": ("fox", {"qk_norm": "rms_full"}),
    "mapped": ("fox", {"key_feature_map": "silu"}),
    "groups": ("fox", {"output_norm": "rms", "output_norm_groups": 2}),
    "before": ("fox", {"output_norm": "rms", "output_gate": "swish", "gate_before_norm": True}),
}


def filled(attn, lengths=(9, 0, 4), evict=None):
    like, batch = attn.new_cache(evict), BatchRows.idle(len(lengths))
    attn(rows(1, 1), cache=like)
    fixed = FixedCache.of(attn, like, batch, 24)
    for row, T in enumerate(lengths):
        if T:
            cache = attn.new_cache(evict)
            attn(rows(1, T, seed=row), cache=cache)
            fixed.admit(row, cache, 24)
            batch.begin(row, T)
    return fixed


def steps(attn, fixed):
    """Single tokens and several, of which the second sequence keeps some."""
    found, batch = [], fixed.rows
    for number, tokens in enumerate((1, 3, 1)):
        batch.tokens, there = tokens, batch.active != 0
        found.append(attn(rows(3, tokens, seed=10 + number), cache=fixed)[there])
        kept = torch.tensor([tokens, 0, (tokens + 1) // 2])
        if tokens > 1:
            fixed.keep(kept)
        batch.length += kept
    return torch.cat(found, 1)


@torch.no_grad()
@pytest.mark.parametrize("case", SERVED)
def test_a_whole_step_is_that_of_the_parts(case):
    name, options = SERVED[case]
    attn = layer(name, **options)
    whole = filled(attn)
    parts = copy.deepcopy(whole)
    assert whole.whole
    parts.whole = False
    assert_same(steps(attn, whole), steps(attn, parts))


@torch.no_grad()
@pytest.mark.parametrize("case", OTHERS)
def test_layers_with_other_parts_step_part_by_part(case):
    name, options = OTHERS[case]
    assert not filled(layer(name, **options)).whole


@torch.no_grad()
def test_parts_that_a_user_has_exchanged_or_listens_to_are_called():
    class Doubled(HeadNorm):
        def forward(self, x):
            return 2 * super().forward(x)

    exchanged, calls = layer("fox", output_norm="rms"), []
    exchanged.output_norm.__class__ = Doubled
    whole, parts = filled(exchanged), filled(exchanged)
    parts.whole = False
    assert torch.equal(exchanged(rows(3, 1), cache=whole), exchanged(rows(3, 1), cache=parts))
    for name in ("output_norm", "gate"):
        attn = layer("fox", output_norm="rms")
        getattr(attn, name).register_forward_hook(lambda *_, name=name: calls.append(name))
        fixed = filled(attn)
        calls.clear()
        attn(rows(3, 1), cache=fixed)
        assert calls == [name]


@torch.no_grad()
def test_a_gate_s_map_of_ones_own_is_called():
    class Doubled(GateAffine):
        def forward(self, x):
            return 2 * super().forward(x)

    attn = layer("fox", output_norm="rms")
    attn.gate.forget_proj.__class__ = Doubled
    whole, parts = filled(attn), filled(attn)
    parts.whole = False
    assert_same(steps(attn, whole), steps(attn, parts))
    low = layer("gla").gate
    low.up.__class__ = Doubled
    logits, bias, *_ = low.logits(rows(1, 3))
    assert bias is None
    assert_same(logits, low.up(low.down(rows(1, 3))))


@torch.no_grad()
def test_keys_that_may_come_back_from_the_host_are_looked_for_part_by_part():
    assert not filled(layer("fox", qk_norm="rms"), evict="offload").whole
