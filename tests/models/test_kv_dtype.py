"""A generator whose keys and values have 8 bits: half the memory, the same sequences however they are drawn, bounds
that hold for what is stored."""

import re

import pytest
import torch
from generated import LAYERS, build, filled, forgetful
from layers import layer, rows
from test_engine_pruning import EPS, forget_within_tokens, looks, small_things_are_looked_through_too, steps  # noqa: F401
from test_proposals import proposals

from attnzoo.algebra.pruning import Prune
from attnzoo.forms.caches.device_memory import size_of
from attnzoo.forms.caches.pages.pool import PAGE
from attnzoo.kernels.decode.eight_bits import longer
from attnzoo.models import Generator

NEW = 10
SERVED = ("fox-pro-acp", "fox-window-sinks", "rope-grouped", "alibi", "nope", "fox_rope")


def prompts(device="cpu"):
    draws = torch.Generator().manual_seed(1)
    return [torch.randint(0, 39, (T,), generator=draws).to(device) for T in (70, 3, 20)]


def drawn(model, given, draft=None, *, at_once=2, remember=False, **limits):
    generator = Generator(model, at_once, 160, kv_dtype="fp8", **limits)
    if remember:
        generator.remember(8)
    ids = [generator.add(prompt, NEW, temperature=0.7 * n, seed=n) for n, prompt in enumerate(given)]
    generator.run(draft)
    return [generator.requests[n].tokens for n in ids], generator


def same_however_drawn(model, device="cpu"):
    """Beside others or alone, after a prefix that was kept, and with most tokens proposed."""
    given = prompts(device)
    given.append(torch.cat([given[0], given[1]]))
    found, _ = drawn(model, given)
    assert drawn(model, given, at_once=1, check_every=1)[0] == found
    again, generator = drawn(model, given, remember=True)
    assert again == found
    assert generator.requests[3].found == len(given[0])
    assert drawn(model, given, proposals(dict(enumerate(found))))[0] == found
    return found


@pytest.mark.parametrize("name", SERVED[:3:2])
def test_sequences_are_the_same_however_they_are_drawn(name):
    same_however_drawn(build(**LAYERS[name]))


@torch.no_grad()
def test_steps_differ_from_those_in_the_models_dtype_by_rounding_alone():
    for name in ("fox", "alibi", "nope", "rope", "fox_rope"):
        attn = layer(name)
        outputs = []
        for eight in (False, True):
            fixed, _ = filled(attn, (70, 9), 90, eight_bits=eight)
            fixed.ready([0, 1])
            outputs.append(attn(rows(2, 1, seed=5), cache=fixed))
        apart = float((outputs[1] - outputs[0]).norm() / outputs[0].norm())
        assert 1e-4 < apart < 0.08, name


def test_memory_of_keys_and_values_halves():
    model = build(attention=["fox", "mamba2", "rope"], num_layers=3, hidden_size=128, num_heads=2).bfloat16()
    whole, half = (Generator(model, 4, 8 * PAGE, kv_dtype=of) for of in (None, "fp8"))
    pages, eight = ([c.memory.pool.of_pages() for c in g.batch.caches[::2]] for g in (whole, half))
    keys = sum(size_of(x) for layer in pages for name, x in layer.items() if name != "decay")
    bits = sum(size_of(x) for layer in eight for name, x in layer.items() if name != "decay")
    assert bits == keys * (128 + 2) / 256  # of 64 channels, and a power of two for keys and for values
    assert half.bytes() == whole.bytes() - keys + bits  # sums of gates stay


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"qk_norm": "rms", "qk_norm_shared": True}], ids=["norms", "known-bound"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_pages_that_are_skipped_weigh_at_most_eps(options, tokens, looks):  # noqa: F811
    attn = layer("fox", acp=Prune(EPS), **options)
    forget_within_tokens(attn)
    fixed, _ = filled(attn, (700, 330, 0, 64), 740, eight_bits=True)
    steps(attn, fixed, tokens, looks)
    assert len(looks) == 2
    for first, begin, dropped in looks:
        assert dropped.amax() <= EPS
        assert ((begin - first)[0] > 3).any() or ((begin - first)[0] > 0).all()


@torch.no_grad()
def test_bounds_hold_for_the_keys_that_are_stored():
    """Those by the weights of QK-norm grow by what rounding may add; the longest key of a page is at least as long."""
    attn = layer("fox", acp=True, qk_norm="rms")
    fixed, _ = filled(attn, (130, 70), 200, eight_bits=True)
    for _ in range(3):
        fixed.ready([0, 1])
        attn(rows(2, 1, seed=3), cache=fixed)
        fixed.rows.length += 1
        fixed.rows.lengths = fixed.memory.pool.lengths = fixed.rows.length.tolist()
    assert torch.equal(fixed.bound, attn.logit_bound(torch.float64) * longer(attn.config.key_dim))
    pool = fixed.memory.pool
    for b, n in enumerate((133, 73)):
        for g in range(pool.table.shape[1]):
            norms = pool.gather(b, g)[0].norm(dim=-1)
            assert len(norms) == n
            for page, longest in enumerate(norms.split(PAGE)):
                assert longest.max() <= pool.k_norm[b, g, page] <= longest.max() * 1.2


def test_keys_are_given_up_that_no_token_misses():
    model, (prompt, *_) = forgetful("fox"), prompts()
    prompt = torch.cat([prompt] * 2)
    (kept,), _ = drawn(model, [prompt])
    (found,), generator = drawn(model, [prompt], evict=1e-30)
    assert found == kept
    forgets, remembers = generator.requests[0].kept[0]
    assert forgets <= remembers - PAGE
    bounds, plain = generator.batch.caches[0].promised(), model.attentions()[0].query_bounds(torch.float32)
    assert torch.equal(bounds.own, plain.own * longer(16))
    assert torch.equal(bounds.score, plain.score * longer(16))


def test_layers_that_cannot_are_refused_by_name():
    for options, limits, message in (
        ({"attention": "path"}, {}, "a layer of 'path' (later tokens change its cached keys), got 'fp8'"),
        ({"attention": ["fox", "wall"]}, {}, "a layer of 'wall' (later tokens change its cached keys), got 'fp8'"),
        ({"attention": "fox"}, {"evict": "offload"}, "a layer of 'fox' (keys on the host have the model's dtype)"),
        ({"attention": "mamba2"}, {}, "(no layer keeps keys), got 'fp8'"),
    ):
        with pytest.raises(ValueError, match=rf"kv_dtype: expected None.*{re.escape(message)}"):
            Generator(build(**options), 1, 32, kv_dtype="fp8", **limits)
    with pytest.raises(ValueError, match="kv_dtype: expected 'fp8' or None, got 'int8'"):
        Generator(build(), 1, 32, kv_dtype="int8")


@pytest.mark.gpu
@pytest.mark.parametrize("name", SERVED)
def test_a_graph_of_steps_over_8_bits_gives_the_same_tokens(name):
    model = build(**{**LAYERS[name], "hidden_size": 128, "initializer_range": 0.1}).cuda()
    found = same_however_drawn(model, "cuda")
    assert drawn(model, [*prompts("cuda"), torch.cat(prompts("cuda")[:2])], graph=False)[0] == found
