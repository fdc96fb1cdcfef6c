"""Caches that give up keys: against caches that keep all, in every way that a cache is used."""

import copy
import math
import pickle

import pytest
import torch
from layers import FORGETS, TINY, assert_same, forgetful, layer, rows
from thinning import in_long

from attnzoo import Evict, Prune, build_attention
from attnzoo.config import ModelConfig
from attnzoo.forms.caches.pages.page_table import CHUNK, PAGE
from attnzoo.models import LanguageModel

T = 300
pytestmark = pytest.mark.usefixtures("small_groups")


def live(cache):
    return int(cache.state.pool.live().sum())


@pytest.mark.parametrize(("name", "options"), [
    ("fox", {}), ("fox", {"window": 70}), ("fox", {"acp": Prune(eps=1e-30)}), ("fox", {"sinks": True}), ("alibi", {}),
    ("rope", {"window": 70}), ("nope", {"window": 70}), ("alibi", {"rotary": 1e4}),
    ("path_fox", {}), ("path_fox", {"window": 70}), ("path", {"window": 70, "sinks": True}), ("fox_rope", {}),
    ("rope", {"window": 70, "gate": "selective"}),
])  # fmt: skip
@torch.no_grad()
def test_outputs_equal_those_of_a_whole_cache(name, options):
    """In pieces of many sizes; what is given up weighs less than any rounding."""
    attn, x = forgetful(name, **options), rows(2, T)
    whole, paged = attn.new_cache(), attn.new_cache(evict=TINY)
    for a, b in ((0, 100), (100, 101), (101, 260), (260, 270), *((t, t + 1) for t in range(270, in_long(278, T)))):
        assert_same(attn(x[:, a:b], cache=paged), attn(x[:, a:b], cache=whole))
    assert paged.state.pool.first.any() == (name in FORGETS or "window" in options)
    if "window" in options:
        heads = 4 if "gate" in options else 2  # angles of its own give each query head its own keys
        assert live(paged) <= 2 * heads * (70 // PAGE + 2)


@pytest.mark.parametrize("name", ["fox", "path", "path_fox"])
@torch.no_grad()
def test_a_window_of_one_leaves_no_page(name):
    attn, x = forgetful(name, window=1), rows(2, 2 * PAGE + 3)
    whole, paged = attn.new_cache(), attn.new_cache(evict=TINY)
    for a, b in ((0, PAGE), (PAGE, PAGE + 1), (PAGE + 1, 2 * PAGE), (2 * PAGE, 2 * PAGE + 3)):
        assert_same(attn(x[:, a:b], cache=paged), attn(x[:, a:b], cache=whole))
    assert live(paged) <= 2 * 2


@pytest.mark.parametrize("name", ["fox", "path_fox"])
@torch.no_grad()
def test_a_table_that_is_full_grows(name):
    attn, x = forgetful(name), rows(1, CHUNK * PAGE + 1)
    whole, paged = attn.new_cache(), attn.new_cache(evict=TINY)
    for now in (x[:, :-1], x[:, -1:]):
        assert_same(attn(now, cache=paged), attn(now, cache=whole))


@pytest.mark.parametrize("name", ["fox", "path_fox"])
@torch.no_grad()
def test_padding_and_packing_go_on_as_in_a_whole_cache(name):
    attn, x = forgetful(name), rows(3, 200)
    mask = torch.rand(3, 200, generator=torch.Generator().manual_seed(0)) < torch.tensor([[1.0], [0.6], [0.05]])
    mask[1, :70] = False
    whole, paged = attn.new_cache(), attn.new_cache(evict=TINY)
    for a, b in ((0, 65), (65, 66), (66, 199), (199, 200)):
        now = {"attention_mask": mask[:, a:b]}
        assert_same(attn(x[:, a:b], cache=paged, **now), attn(x[:, a:b], cache=whole, **now))
    borders, (one, two) = torch.tensor([0, 90, 91, 200]), (attn.new_cache(), attn.new_cache(evict=TINY))
    for _ in range(2):
        now = {"cu_seqlens": borders}
        assert_same(attn(x[:1], cache=two, **now), attn(x[:1], cache=one, **now))


@pytest.mark.parametrize("name", FORGETS)
@torch.no_grad()
def test_padding_alone_is_followed_by_tokens(name):
    attn, x = forgetful(name), rows(2, 8)
    paged = attn.new_cache(evict=TINY)
    for _ in range(2):
        attn(x[:, :3], attention_mask=torch.zeros(2, 3, dtype=torch.bool), cache=paged)
    got = torch.cat([attn(x[:, a:b], cache=paged) for a, b in ((0, 7), (7, 8))], 1)
    assert_same(got, attn(x))
    assert len(paged.state) == 14


@pytest.mark.parametrize("name", ["fox", "alibi", "path_fox"])
@torch.no_grad()
def test_the_output_moves_by_twice_eps_and_keys_are_given_back(name):
    """Measured before the output's projection, where |v| is known."""
    eps, steps = 1e-3, 1200
    attn, x = forgetful(name), rows(1, steps)
    values = []
    attn.o_proj.register_forward_hook(lambda module, given, _: values.append(given[0]))
    attn.output_norm = attn.output_gate = None
    whole, paged, most = attn.new_cache(), attn.new_cache(evict=eps), []
    for start in range(0, steps, 20):
        for cache in (whole, paged):
            attn(x[:, start : start + 20], cache=cache)
        most.append(live(paged))
    exact, got = torch.cat(values[::2], 1), torch.cat(values[1::2], 1)
    longest = whole.state.v.norm(dim=-1).max()
    moved = (exact - got).unflatten(-1, (4, -1)).norm(dim=-1)
    assert 0 < moved.max() <= 2 * eps * longest
    if name != "alibi":  # one of two key heads serves a query head that forgets little
        assert most[-1] < 2 * steps / PAGE
        assert len(paged.state.pool.k) < 2 * steps / PAGE  # room for what has gone is used again


@pytest.mark.parametrize("name", ["fox", "path_fox"])
@torch.no_grad()
def test_beams_share_pages_and_go_their_own_ways(name):
    attn, x = forgetful(name), rows(4, T)
    whole, paged = attn.new_cache(), attn.new_cache(evict=TINY)
    for cache in (whole, paged):
        attn(x[:1, :150], cache=cache)
    one = live(paged)
    for cache in (whole, paged):
        cache.reorder(torch.zeros(4, dtype=torch.int64))
    assert paged.state.pool.used() == one
    for start, order in ((150, [3, 1, 1, 0]), (190, [0, 2]), (230, [1, 0, 0])):
        assert_same(*(attn(x[: len(whole.seen), start : start + 40], cache=cache) for cache in (paged, whole)))
        for cache in (whole, paged):
            cache.reorder(torch.tensor(order))
    pool = paged.state.pool
    assert pool.used() == len(pool.pages[pool.pages >= 0].unique())


@pytest.mark.parametrize("name", ["fox", "path_fox"])
@torch.no_grad()
def test_rejected_tokens_are_taken_back(name):
    """Layers without convolutions and shifts, which keep their last tokens alone."""
    attn, x = forgetful(name, **({"w_conv_size": 0} if name == "path_fox" else {})), rows(2, T)
    attn.k_shift = attn.v_shift = None
    whole, paged = attn.new_cache(), attn.new_cache(evict=TINY)
    for start in range(0, 200, 5):
        attn(rows(2, 8, seed=start), cache=paged)
        paged.state = paged.state.crop(start)
        paged.seen = torch.full_like(paged.seen, start)
        assert_same(*(attn(x[:, start : start + 5], cache=cache) for cache in (paged, whole)))
    assert not paged.windows


@torch.no_grad()
@pytest.mark.parametrize("tokens", [172, 2 * PAGE], ids=["recent", "whole groups"])
def test_carried_keys_are_known_as_they_came_for_some_pages(tokens):
    attn, x = layer("path_fox", w_conv_size=0, qk_norm="rms"), rows(1, T)
    attn.k_shift = attn.v_shift = None
    whole, cache = attn.new_cache(), attn.new_cache(evict=1e-300)  # nothing goes
    attn(x, cache=cache)
    with pytest.raises(ValueError, match=r"tokens: expected at least 172 \(earlier keys have been carried\), got 171"):
        cache.state.crop(171)
    cache.state = cache.state.crop(tokens)
    cache.seen = torch.full_like(cache.seen, tokens)
    attn(x[:, :tokens], cache=whole)
    assert_same(*(attn(x[:, tokens:], cache=one) for one in (cache, whole)))


@pytest.mark.parametrize("name", ["fox", "path_fox"])
@torch.no_grad()
def test_tokens_leave_when_a_shorter_cache_goes_on(name):
    """Until then either can; a call that fails is forgotten from there too."""
    attn, x = forgetful(name, **({"w_conv_size": 0} if name == "path_fox" else {})), rows(2, 200)
    attn.k_shift = attn.v_shift = None
    whole, paged = attn.new_cache(), attn.new_cache(evict=TINY)
    for cache in (whole, paged):
        attn(x[:, :130], cache=cache)
    longer = paged.state
    short = longer.crop(129).crop(100)
    assert paged.state.pool.lengths == [130, 130]
    for cache in (whole, paged):
        attn(x[:, 130:140], cache=cache)  # from the longer one
    with pytest.raises(ValueError, match="state: expected the last that this pool"):
        short.begin()
    longer = paged.state
    paged.state = short = longer.crop(135)
    before = vars(paged).copy()
    attn(x[:, :70], cache=paged)  # fails
    vars(paged).update(before)
    with pytest.raises(ValueError, match="state: expected the last that this pool"):
        longer.begin()
    again = attn.new_cache()
    attn(torch.cat([x[:, :130], x[:, 130:135]], 1), cache=again)
    assert_same(*(attn(x[:, 140:], cache=cache) for cache in (paged, again)))


@torch.no_grad()
def test_no_key_is_taken_back_to_that_an_earlier_row_needs():
    attn, x = forgetful(), rows(1, 640)
    attn.k_shift = attn.v_shift = None
    cache = attn.new_cache(evict=0.1)
    for start in range(0, 640, 64):
        attn(x[:, start : start + 64], cache=cache)
    state, first = cache.state, int(cache.state.pool.first.max())
    assert first > 1
    with pytest.raises(ValueError, match=r"tokens: expected at least \d+ \(keys that earlier rows need"):
        state.crop((first - 1) * PAGE)
    least = next(n for n in range(1, 640) if state._may_crop([n]))
    assert first * PAGE < least <= 576
    with pytest.raises(ValueError, match=f"at least {least} "):
        state.crop(least - 1)
    assert len(state.crop(least)) == least


@pytest.mark.parametrize("name", ["fox", "path_fox"])
@torch.no_grad()
def test_failed_calls_are_forgotten(name):
    """A later layer fails; the pages hold tokens that were never seen, and a page may have gone."""
    attn, x = forgetful(name), rows(2, T)
    whole, paged = attn.new_cache(), attn.new_cache(evict=TINY)
    for start in range(0, T, 30):
        before = vars(paged).copy()
        attn(rows(2, 70, seed=start), cache=paged)
        vars(paged).update(before)
        assert_same(*(attn(x[:, start : start + 30], cache=cache) for cache in (paged, whole)))
    old = paged.state
    for _ in range(2):
        attn(x, cache=paged)
    paged.state = old
    with pytest.raises(ValueError, match="state: expected the last that this pool"):
        attn(x, cache=paged)


@pytest.mark.parametrize("name", ["fox", "path_fox"])
@torch.no_grad()
def test_a_copy_and_a_loaded_cache_go_on_alone(tmp_path, name):
    attn, x = forgetful(name), rows(2, T)
    cache = attn.new_cache(evict=1e-3)
    for a, b in ((0, 199), (199, 200)):
        attn(x[:, a:b], cache=cache)
    torch.save(cache, tmp_path / "cache.pt")
    copied = copy.deepcopy(cache)
    pool, used = copied.state.pool, cache.state.pool.used()
    assert len(pool.k) == pool.used() == used < len(cache.state.pool.k)
    other = cache.state.to("cpu")
    assert other.pool is not cache.state.pool
    assert torch.equal(other.pool.table, pool.table)
    expected = [attn(x[:, a:b], cache=cache) for a, b in ((200, 201), (201, 300))]
    loaded = torch.load(tmp_path / "cache.pt", weights_only=False)
    for other in (copied, loaded, pickle.loads(pickle.dumps(loaded))):
        got = [attn(x[:, a:b], cache=other) for a, b in ((200, 201), (201, 300))]
        assert all(torch.equal(one, two) for one, two in zip(got, expected, strict=True))


@pytest.mark.parametrize("name", ["fox", "path_fox"])
@torch.no_grad()
def test_offloaded_keys_come_back_for_a_row_that_needs_them(name):
    """Without QK-norm: calm rows, then one with a long query, then calm ones; exact all the time."""
    attn, x = forgetful(name, qk_norm="none"), rows(2, T)
    x[:, 250] *= 40
    whole, paged = attn.new_cache(), attn.new_cache(evict=Evict(TINY, offload=True))
    away = []
    for a, b in ((0, 129), (129, 200), (200, 249), *((t, t + 1) for t in range(249, 260)), (260, T)):
        assert_same(*(attn(x[:, a:b], cache=cache) for cache in (paged, whole)))
        away.append(sum(len(head) for row in paged.state.evict.offload.pages for head in row))
        pool = paged.state.pool
        assert away[-1] == int(pool.first.sum())
        assert pool.used() == sum(2 * -(-n // PAGE) for n in pool.lengths) - away[-1]
    assert away[3] > 0
    assert paged.state.evict.offload.returned > 0


@torch.no_grad()
def test_a_cache_with_offloaded_keys_is_used_in_every_way():
    attn, x = forgetful(qk_norm="none"), rows(3, 400)
    attn.k_shift = attn.v_shift = None
    whole, paged = attn.new_cache(), attn.new_cache(evict=Evict(TINY, offload=True))
    for a, b in ((0, 200), (200, 320)):
        assert_same(*(attn(x[:, a:b], cache=cache) for cache in (paged, whole)))
    assert paged.state.pool.first.any()
    for cache in (whole, paged):
        cache.reorder(torch.tensor([2, 0, 2]))
        cache.state = cache.state.crop(40)  # all that is away is needed again, or behind the end
        cache.seen = torch.full_like(cache.seen, 40)
    assert not paged.state.pool.first.any()
    for other in (copy.deepcopy(paged), paged):
        assert_same(*(attn(x[:, 40:], cache=cache) for cache in (other, copy.deepcopy(whole))))


@torch.no_grad()
def test_a_model_gives_up_what_some_layers_need_no_more():
    torch.manual_seed(0)
    fox, rope = {"name": "fox", "options": {"block": "pro"}}, {"name": "rope", "options": {"window": 64}}
    attention = [fox, "mamba2", "nope", rope]
    sizes = {"hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "vocab_size": 40}
    model = LanguageModel(ModelConfig(attention=attention, num_layers=4, **sizes)).double()
    tokens = torch.randint(40, (2, 200))
    whole, paged = model.new_cache(), model.new_cache(evict=math.exp(-10))
    for a, b in ((0, 150), (150, 151), (151, 200)):
        assert_same(model(tokens[:, a:b], cache=paged).logits, model(tokens[:, a:b], cache=whole).logits)
    assert [hasattr(layer.state, "pool") for layer in paged] == [True, False, False, True]
    greedy = [model.generate(tokens[:, :100], 60, temperature=0, evict=evict) for evict in (None, math.exp(-10))]
    assert torch.equal(*greedy)


@pytest.mark.parametrize(
    ("name", "options", "evict", "message"),
    [
        (
            "fox",
            {"qk_norm": "none"},
            1e-4,
            "evict: expected None or a layer with qk_norm or softcap, .* or 'offload', got 0.0001 and",
        ),
        ("mamba2", {}, 1e-4, "evict: 'mamba2' is the linear side, whose state does not grow"),
        (
            "rope",
            {},
            1e-4,
            r"evict: 'rope' needs all its keys: nothing decays \(it serves alibi, fox, path_fox, fox_rope and",
        ),
        ("gated_wall", {}, 1e-4, "evict: 'gated_wall' needs all its keys: its keys lie in no pages"),
        ("fox", {"qk_norm": "rms"}, 1.5, r"evict: expected a weight in \(0, 1\), got 1.5"),
        ("fox", {"qk_norm": "rms"}, "load", r"evict: expected a weight in \(0, 1\) or 'offload', got 'load'"),
    ],
)
def test_what_cannot_be_certified_is_refused(name, options, evict, message):
    with pytest.raises(ValueError, match=message):
        build_attention(name, hidden_size=16, num_heads=2, **options).new_cache(evict=evict)


def test_gradients_are_refused():
    attn = forgetful()
    with pytest.raises(ValueError, match=r"state: expected torch.no_grad\(\)"):
        attn(rows(1, 4), cache=attn.new_cache(evict=1e-4))


@pytest.mark.parametrize("offload", ["no", 1, None])
def test_offload_is_true_or_false(offload: object) -> None:
    with pytest.raises(TypeError, match="offload: expected True or False"):
        Evict(TINY, offload=offload)  # type: ignore[arg-type]
