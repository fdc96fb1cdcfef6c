"""A call that fails leaves every cache as it was, and a cache serves the layer that it was made for alone."""

import copy
import pickle

import pytest
import torch
from layers import D, H, layer, rows
from torch.utils._python_dispatch import TorchDispatchMode

from attnzoo import build_attention, get, list_variants
from attnzoo.config import ModelConfig
from attnzoo.models import LanguageModel

HYBRID = ["mamba2", "path_fox", "retnet", "rope"]
PIECES = ((0, 5), (5, 6), (6, 9), (9, 10))


class StoppedError(Exception):
    """As an exhausted memory, or a key that the user presses."""


class FailAt(TorchDispatchMode):
    """Raises instead of computing the operation number `last`."""

    def __init__(self, last):
        super().__init__()
        self.last, self.count = last, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        if self.count > self.last:
            raise StoppedError
        return func(*args, **(kwargs or {}))


def operations(call):
    with FailAt(10**9) as mode:
        call()
    return mode.count


def steps(call, cache, x, mask):
    return [call(x[:, a:b], attention_mask=mask[:, a:b], cache=cache) for a, b in PIECES]


@pytest.mark.parametrize("block", [None, "pro"])
@pytest.mark.parametrize("name", list_variants())
@torch.no_grad()
def test_a_layer_that_fails_anywhere_has_moved_nothing(name, block):
    """An exception in each of some operations of the second and third call; then good calls, to the same bits."""
    attn, x = layer(name, block, conv_size=3), rows(2, 10)
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[0, :3] = mask[1, 6:8] = False
    expected = steps(attn, attn.new_cache(), x, mask)
    fails_anywhere(attn, attn.new_cache(), x, mask, PIECES, expected)


@pytest.mark.parametrize("name", ["fox", "path_fox"])
@torch.no_grad()
def test_a_layer_that_fails_anywhere_has_moved_nothing_in_its_pages(name):
    """Keys go in the third call; tables and buffers grow."""
    attn, x, pieces = layer(name, "pro"), rows(2, 300), ((0, 100), (100, 200), (200, 270), (270, 271), (271, 300))
    mask = torch.ones(2, 300, dtype=torch.bool)
    mask[0, :3] = mask[1, 106:178] = False
    whole, paged = attn.new_cache(), attn.new_cache(evict=1e-12)
    expected = [attn(x[:, a:b], attention_mask=mask[:, a:b], cache=whole) for a, b in pieces]

    def close(got, good):
        return (got - good).abs().max() < 1e-9

    share = 0.7  # a second try need not look for keys to go, and runs fewer operations
    fails_anywhere(attn, paged, x, mask, pieces, expected, close, share)


def fails_anywhere(attn, cache, x, mask, pieces, expected, same=torch.equal, share=1.0):
    for (a, b), good in zip(pieces, expected, strict=True):
        now = {"attention_mask": mask[:, a:b]}
        spare = copy.deepcopy(cache)
        total = operations(lambda now=now, a=a, b=b, spare=spare: attn(x[:, a:b], cache=spare, **now))
        for last in range(1, int(total * share), max(1, total // 6)):
            with pytest.raises(StoppedError), FailAt(last):
                attn(x[:, a:b], cache=cache, **now)
        assert same(attn(x[:, a:b], cache=cache, **now), good)


@torch.no_grad()
def test_a_model_that_fails_in_any_layer_has_moved_none():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "vocab_size": 40}
    model = LanguageModel(ModelConfig(attention=HYBRID, num_layers=4, **sizes)).double()
    tokens = torch.randint(40, (2, 10))
    expected, cache = model.new_cache(), model.new_cache()
    for a, b in PIECES:
        good = model(tokens[:, a:b], cache=expected).logits
        spare = copy.deepcopy(cache)
        total = operations(lambda a=a, b=b, spare=spare: model(tokens[:, a:b], cache=spare))
        for last in range(1, total, max(1, total // 12)):
            with pytest.raises(StoppedError), FailAt(last):
                model(tokens[:, a:b], cache=cache)
        for bad in ({"targets": tokens}, {"attention_mask": torch.ones(2, 99)}, {"cu_seqlens": torch.tensor([0, 1])}):
            with pytest.raises(ValueError, match=next(iter(bad))):
                model(tokens[:, a:b], cache=cache, **bad)
        assert torch.equal(model(tokens[:, a:b], cache=cache).logits, good)


@torch.no_grad()
def test_refused_calls_leave_a_layers_cache_alone():
    attn, x = layer("path_fox", "pro"), rows(2, 4)
    expected, cache = attn.new_cache(), attn.new_cache()
    attn(x, cache=expected)
    attn(x, cache=cache)
    bad = torch.tensor([2.0, 0.0]).double()
    for call in (
        lambda: attn(x.half(), cache=cache),
        lambda: attn(x.float(), cache=cache),
        lambda: attn(x[:1], cache=cache),
        lambda: attn(x[..., 1:], cache=cache),
        lambda: attn(x, attention_mask=x[..., 0], cache=cache),
        lambda: attn(x, attention_mask=x[..., 0] > 9, cache={}),
        lambda: attn(x.reshape(1, 8, D), cu_seqlens=torch.tensor([0, 8]), cache=cache),
        lambda: cache.reorder(torch.tensor([0, 2])),
        lambda: cache.reorder(bad),
        lambda: cache.reorder(None),
    ):
        with pytest.raises((TypeError, ValueError), match="x|attention_mask|cache|index"):
            call()
    assert torch.equal(attn(x, cache=cache), attn(x, cache=expected))


def test_a_cache_serves_the_layer_that_it_was_made_for_alone():
    first, twin, other = layer("fox"), layer("fox"), layer("gla")
    cache = first.new_cache()
    for attn in (twin, other, copy.deepcopy(first)):
        with pytest.raises(ValueError, match=r"cache: expected what new_cache\(\) of this very layer gave, .*'fox'"):
            attn(rows(1, 3), cache=cache)
    first(rows(1, 3), cache=copy.deepcopy(cache))
    with pytest.raises(ValueError, match="this very layer"):
        twin(rows(1, 3), cache=copy.deepcopy(cache))
    del first
    with pytest.raises(ValueError, match="that of another layer$"):
        twin(rows(1, 3), cache=cache)


@torch.no_grad()
def test_a_pickled_cache_goes_on_in_the_layer_that_it_is_given_first():
    attn, x = layer("fox"), rows(1, 5)
    cache = attn.new_cache()
    attn(x[:, :4], cache=cache)
    again, loaded = pickle.loads(pickle.dumps((attn, cache)))
    assert torch.equal(again(x[:, 4:], cache=loaded), attn(x[:, 4:], cache=cache))
    with pytest.raises(ValueError, match="this very layer"):
        attn(x[:, 4:], cache=loaded)


@torch.no_grad()
def test_a_cache_of_another_dtype_or_batch_is_refused():
    attn = build_attention("gla", hidden_size=D, num_heads=H)
    cache = attn.new_cache()
    attn(torch.randn(2, 3, D), cache=cache)
    with pytest.raises(ValueError, match="cache: expected 2 rows as in the calls before, got 3"):
        attn(torch.randn(3, 1, D), cache=cache)
    with pytest.raises(ValueError, match="cache: expected x in torch.float32 on cpu .* got torch.float64 on cpu"):
        attn.double()(torch.randn(2, 1, D).double(), cache=cache)


@torch.no_grad()
def test_caches_of_a_model_in_another_order_or_of_other_lengths_are_refused():
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(attention="fox", hidden_size=16, num_layers=2, num_heads=2))
    tokens = torch.randint(256, (1, 3))
    cache = model.new_cache()
    model(tokens, cache=cache)
    for bad in (cache[::-1], [cache[0]] * 2, LanguageModel(model.config).new_cache(), copy.deepcopy(model).new_cache()):
        with pytest.raises(ValueError, match="cache: expected (what new_cache|layers that have seen)"):
            model(tokens, cache=bad)
    with pytest.raises(ValueError, match=r"cache: expected layers that have seen equally many tokens, got \[0, 3\]"):
        model(tokens, cache=[cache[0], model.new_cache()[1]])
    for bad in (7, "cache", [None, None], cache[0]):
        with pytest.raises(TypeError, match="cache: expected what new_cache"):
            model(tokens, cache=bad)


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (None, TypeError, "index: expected an int32 or int64 tensor of row numbers, got NoneType"),
        ([0, 1], TypeError, "index: expected an int32 or int64 tensor of row numbers, got list"),
        (torch.tensor([True, False]), TypeError, "got torch.bool"),
        (torch.tensor([0.0]), TypeError, "got torch.float32"),
        (torch.tensor([0, 2]), ValueError, r"index: expected row numbers from 0 to 1, got \[0, 2\]"),
        (torch.tensor([-1]), ValueError, "index: expected row numbers from 0 to 1"),
        (torch.tensor(1), ValueError, r"index: expected one axis of row numbers, got shape \(\)"),
    ],
)
@pytest.mark.parametrize("name", ["fox", "gla"])
@torch.no_grad()
def test_rows_are_named_by_their_numbers(name, index, error, message):
    attn = layer(name)
    cache = attn.new_cache()
    with pytest.raises(ValueError, match="index: expected a cache that has seen tokens"):
        cache.reorder(torch.tensor([0]))
    attn(rows(2, 3), cache=cache)
    for reorder in (cache.reorder, cache.state.reorder):
        with pytest.raises(error, match=message):
            reorder(index)


@pytest.mark.covering
@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("evict", [None, 1e-30])
@pytest.mark.parametrize("options", [{}, {"rotary": 100.0}], ids=["", "rotary"])
@torch.no_grad()
def test_tokens_that_are_taken_back_leave_no_trace(options, evict, padding):
    attn, x, other = layer("fox", qk_norm="rms", **options), rows(2, 9), rows(2, 1, seed=1)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :padding] = 0
    cache, short = attn.new_cache(evict), attn.new_cache(evict)
    attn(x, attention_mask=mask, cache=cache)
    cache.crop(6)
    attn(x[:, :6], attention_mask=mask[:, :6], cache=short)
    assert (cache.tokens, cache.seen.tolist()) == (6, [6 - padding, 6])
    torch.testing.assert_close(attn(other, cache=cache), attn(other, cache=short), rtol=0, atol=1e-6)


@torch.no_grad()
def test_what_cannot_take_tokens_back_says_so_and_stays():
    for name, options, message in (
        ("fox", {"block": "pro"}, r"tokens: expected all 5 \(k_shift, v_shift keep only the last ones\), got 4"),
        ("mamba2", {}, r"tokens: expected all 5 \(k, q, v keep only the last ones\), got 4"),
        ("gla", {}, r"tokens: expected all 5 \(a recurrent state forgets none\), got 4"),
        ("path", {"w_conv_size": 0}, r"tokens: expected all 5 \(later tokens have changed the cached keys\), got 4"),
    ):
        attn, x = layer(name, **options), rows(2, 6)
        cache, whole = attn.new_cache(), attn.new_cache()
        with pytest.raises(ValueError, match="tokens: expected 0, as the cache is empty, got 1"):
            cache.crop(1)
        for filled in (cache, whole):
            attn(x[:, :5], cache=filled)
        with pytest.raises(ValueError, match=message):
            cache.crop(4)
        with pytest.raises(TypeError, match="tokens: expected"):
            cache.crop(4.0)
        cache.crop(5)
        assert torch.equal(attn(x[:, 5:], cache=cache), attn(x[:, 5:], cache=whole))


@pytest.mark.parametrize("name", ["fox", "gla"])
@torch.no_grad()
def test_a_state_is_cropped_to_a_number_of_tokens(name):
    attn = layer(name)
    cache = attn.new_cache()
    attn(rows(2, 3), cache=cache)
    for tokens, error in ((-1, ValueError), (4, ValueError), (2.0, TypeError), (True, TypeError), (None, TypeError)):
        with pytest.raises(error, match="tokens: expected"):
            cache.state.crop(tokens)


@pytest.mark.parametrize("name", ["fox", "mamba2", "path_fox"])
@torch.no_grad()
def test_a_mask_that_hides_cached_tokens_is_refused(name):
    """What is cached stays seen: such a mask would count for nothing."""
    attn, x = layer(name), rows(2, 8)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, :2] = 0  # padding on the left, as it was given
    expected, cache = attn(x, attention_mask=mask), attn.new_cache()
    first = attn(x[:, :5], attention_mask=mask[:, :5], cache=cache)
    hidden = mask.clone()
    hidden[0, 1] = 0
    with pytest.raises(ValueError, match=r"all cached tokens, \[5, 3\] per row, got \[4, 3\] of them"):
        attn(x[:, 5:], attention_mask=hidden, cache=cache)
    if get(name).side == "softmax":  # a recurrent state does not know where padding was
        moved = mask.clone()
        moved[1, :5] = torch.tensor([0, 1, 1, 1, 0])
        with pytest.raises(ValueError, match=r"all cached tokens, \[5, 3\] per row, got \[5, 2\] of them"):
            attn(x[:, 5:], attention_mask=moved, cache=cache)
    torch.testing.assert_close(torch.cat([first, attn(x[:, 5:], attention_mask=mask, cache=cache)], 1), expected)
