"""Caches of the softmax side grow in place, and an earlier one still gives what it gave."""

import pytest
import torch

from attnzoo import build_attention, get, list_variants
from attnzoo.forms.cache import GrowingCache, KVCache, append_in_place

GROWING = ("nope", "alibi", "fox", "rope")


def stepper(name, form="reference"):
    """``step(t, state, sign)``: token t, its query and value turned by sign; by the reference or the kernels."""
    variant = get(name)
    torch.manual_seed(0)
    attn = build_attention(name, hidden_size=32, num_heads=2, head_dim=16)
    with torch.no_grad():
        parts = attn.project(torch.randn(2, 400, 32))

    def step(t, state, sign=1.0, until=None):
        now = slice(t, until or t + 1)
        q, k, v = (y[:, now] for y in (parts.q, parts.k, parts.v))
        return variant.extend(sign * q, k, sign * v, parts.gate.slice(now.start, now.stop), state, form=form)

    return step


@pytest.mark.parametrize(
    ("name", "form"),
    [*((name, "reference") for name in list_variants("softmax")), ("fox", "triton"), ("path_fox", "triton")],
)
@torch.no_grad()
def test_a_cache_can_be_continued_twice(name, form):
    step = stepper(name, form)
    _, state = step(0, None)
    for t in range(1, 6):
        _, state = step(t, state)
    first, after = step(6, state)
    other, _ = step(6, state, -1.0)
    assert not torch.equal(first, other)
    assert torch.equal(step(6, state)[0], first)
    assert torch.equal(step(7, after)[0], step(7, step(6, state)[1])[0])


@pytest.mark.parametrize("name", GROWING)
def test_steps_write_behind_the_cache_until_its_buffers_are_full(name):
    step = stepper(name)
    whole, _ = step(0, None, until=400)
    outputs, places = [], []
    state = None
    for t in range(400):
        o, state = step(t, state)
        outputs.append(o)
        places.append((state.k.data_ptr(), state.v.data_ptr()))
    torch.testing.assert_close(torch.cat(outputs, 1), whole)
    assert len(set(places[1:])) == 2  # buffers of 256 tokens, then larger ones
    assert state.room.used == len(state) == 400


def test_what_records_a_gradient_is_not_overwritten():
    """A cache inside a recorded computation is concatenated: the gradient is that of the whole sequence."""
    x = torch.randn(1, 9, 32, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(0)
    attn = build_attention("fox", hidden_size=32, num_heads=2).double()
    cache = attn.new_cache()
    steps = torch.cat([attn(x[:, t : t + 1], cache=cache) for t in range(9)], 1)
    assert type(cache.state) is KVCache
    grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in (steps, attn(x))]
    torch.testing.assert_close(*grads)


def test_a_cache_of_inference_mode_can_be_continued_outside():
    step = stepper("fox")
    with torch.inference_mode():
        _, state = step(1, step(0, None)[1])
    kept = state.k.clone()
    _, after = step(2, state)
    assert isinstance(after, GrowingCache)
    assert after.k.data_ptr() != state.k.data_ptr()
    assert torch.equal(after.k[:, :2], kept)


def test_nothing_is_cast_to_the_dtype_of_the_past():
    past = KVCache(torch.zeros(1, 3, 1, 4), torch.zeros(1, 3, 1, 4))
    new = torch.full((1, 1, 1, 4), 1 / 3, dtype=torch.float64)
    parts, room = append_in_place(past, {"k": past.k}, {"k": new})
    assert parts["k"].dtype == torch.float64
    assert parts["k"][0, 3, 0, 0] == 1 / 3
    narrow = torch.full((1, 1, 1, 4), 0.5, dtype=torch.float16)
    again, same = append_in_place(GrowingCache(parts["k"], past.v, room=room), parts, {"k": narrow})
    assert same is room
    assert again["k"][0, 4, 0, 0] == 0.5
