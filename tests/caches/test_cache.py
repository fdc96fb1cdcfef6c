"""Caches of the softmax side grow in place, and an earlier one still gives what it gave."""

import itertools

import pytest
import torch

from attnzoo import Gate, KVCache, RecurrentState, build_attention, get, list_variants, oracle
from attnzoo.forms.caches.state import GrowingCache, append_in_place
from attnzoo.testing import Case, relative_error

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
    step, (_, state) = stepper(name, form), stepper(name)(0, None, until=5)
    _, state = step(5, state)
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
    assert state.buffers.used == len(state) == 400


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


@pytest.mark.parametrize(("form", "reader"), [("reference", "q"), ("triton", "q"), ("triton", "sink")])
def test_what_a_recorded_query_has_read_is_not_written_to(form, reader):
    """A gradient of queries or sinks alone needs the keys of every step as they were then."""
    fox = get("fox")
    q, k, v, gate = Case("fox", B=1, T=5, H=1, G=1, K=16, V=16, regime="open").inputs(torch.float32)
    sink, grads = torch.zeros(1), []
    (q if reader == "q" else sink).requires_grad_()
    for cuts, way in (([0, 3, 4, 5], form), ([0, 5], "reference")):
        outputs, state = [], None
        for a, b in itertools.pairwise(cuts):
            now = q[:, a:b], k[:, a:b], v[:, a:b], gate.slice(a, b)
            o, state = fox.extend(*now, state, form=way, sink=sink)
            outputs.append(o)
        grads.append(torch.autograd.grad(torch.cat(outputs, 1).square().sum(), q if reader == "q" else sink)[0])
    torch.testing.assert_close(*grads)


def test_carried_keys_of_inference_mode_can_be_continued_outside():
    q, k, v, gate = Case("wall", B=1, T=6, H=1, G=1).inputs()
    with torch.inference_mode():
        _, state = get("wall").extend(q[:, :1], k[:, :1], v[:, :1], gate.slice(0, 1))
    got, _ = get("wall").extend(q[:, 1:], k[:, 1:], v[:, 1:], gate.slice(1, 6), state)
    assert relative_error(got, oracle.softmax(q, k, v, gate)[:, 1:]) < 1e-12


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
    parts, buffers = append_in_place(past, {"k": past.k}, {"k": new})
    assert parts["k"].dtype == torch.float64
    assert parts["k"][0, 3, 0, 0] == 1 / 3
    narrow = torch.full((1, 1, 1, 4), 0.5, dtype=torch.float16)
    again, same = append_in_place(GrowingCache(parts["k"], past.v, buffers=buffers), parts, {"k": narrow})
    assert same is buffers
    assert again["k"][0, 4, 0, 0] == 0.5


# both kinds of state


def continued(name, state, inputs, start, stop, **options):
    q, k, v, gate = inputs
    now = slice(start, stop)
    return get(name).extend(q[:, now], k[:, now], v[:, now], gate.slice(start, stop), state, **options)


def prefixed(name, tokens, **sizes):
    inputs = Case(name, B=3, T=20, shared_angle=True, **sizes).inputs()
    return inputs, continued(name, None, inputs, 0, tokens)[1]


@pytest.mark.parametrize("name", list_variants())
def test_a_state_is_as_long_as_the_tokens_it_has_seen(name):
    inputs, state = prefixed(name, 7)
    assert isinstance(state, RecurrentState if get(name).side == "linear" else KVCache)
    assert len(state) == 7
    assert len(continued(name, state, inputs, 7, 12)[1]) == 12
    assert len(state) == 7


@pytest.mark.parametrize("name", list_variants())
def test_reordered_rows_continue_as_those_rows(name):
    inputs, state = prefixed(name, 7)
    index = torch.tensor([2, 0, 2, 1])
    rows = (*(x[index] for x in inputs[:3]), inputs[3].map(lambda x: x if x.ndim == 1 else x[index]))
    expected = continued(name, state, inputs, 7, 20)[0][index]
    assert relative_error(continued(name, state.reorder(index), rows, 7, 20)[0], expected) <= 1e-14


@pytest.mark.parametrize("name", list_variants())
def test_a_detached_state_has_the_same_numbers_and_no_history(name):
    inputs, _ = prefixed(name, 7)
    leaf = inputs[2].clone().requires_grad_()
    _, state = continued(name, None, (*inputs[:2], leaf, inputs[3]), 0, 7)
    plain, cut = (continued(name, s, inputs, 7, 20)[0] for s in (state, state.detach()))
    assert plain.requires_grad
    assert not cut.requires_grad
    assert torch.equal(plain.detach(), cut)
    assert torch.equal(continued(name, state.detach().to("cpu"), inputs, 7, 20)[0], cut)
    moved = state.detach().to("meta")
    kept = [moved.matrix] if get(name).side == "linear" else [moved.k, moved.v]
    assert all(x.device.type == "meta" for x in kept)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", GROWING)
def test_a_cropped_cache_is_the_cache_of_fewer_tokens(name, padded):
    inputs, _ = prefixed(name, 1)
    valid = torch.ones(3, 20, dtype=torch.bool)
    if padded:
        valid[0, :4], valid[1, 9:11] = False, False
    there = {"valid": valid} if padded else {}
    _, state = get(name).extend(*inputs, **there)
    for n in (12, 20, 1):
        _, shorter = continued(name, None, inputs, 0, n, **{key: x[:, :n] for key, x in there.items()})
        cropped = state.crop(n)
        assert len(cropped) == n
        step = (*(x[:, :1] for x in inputs[:3]), inputs[3].slice(0, 1))
        got, expected = (get(name).extend(*step, s) for s in (cropped, shorter))
        assert relative_error(got[0], expected[0]) <= 1e-12
        assert len(got[1]) == n + 1
    assert len(state) == 20


@pytest.mark.parametrize("name", list_variants())
def test_what_cannot_be_cropped_says_why(name):
    inputs, state = prefixed(name, 7)
    assert state.crop(7) is state
    if "angle" in get(name).requires:
        inputs = Case(name, B=3, T=20).inputs()
        _, state = continued(name, None, inputs, 0, 7)
    if name not in ("nope", "alibi", "fox"):
        why = {"linear": "forgets none", "softmax": "changed the cached keys|angles of single tokens"}
        with pytest.raises(ValueError, match=rf"tokens: expected all 7 \(.*({why[get(name).side]}).*\), got 3"):
            state.crop(3)
    with pytest.raises(ValueError, match="tokens: expected (0 to 7|all 7 .*), got 8"):
        state.crop(8)


def test_angles_that_changed_between_calls_are_not_cropped():
    inputs = Case("rope", T=20, shared_angle=True).inputs()
    _, state = continued("rope", None, inputs, 0, 7)
    _, state = continued("rope", state, (*inputs[:3], Gate(angle=2 * inputs[3].angle)), 7, 9)
    with pytest.raises(ValueError, match="the angles of single tokens are not kept"):
        state.crop(8)


@torch.no_grad()
def test_cached_keys_of_the_kernel_have_its_dtype():
    """RoPE's rotated keys are rounded once, when they are stored, as the kernel would at every step."""
    inputs = Case("rope", T=40, K=16, V=16, shared_angle=True, regime="open").inputs(torch.float32)
    q, k, v = (x.half() for x in inputs[:3])
    half = (q, k, v, inputs[3])
    outputs, state = [], None
    for start, stop in ((0, 30), (30, 31), (31, 40)):
        o, state = continued("rope", state, half, start, stop, form="triton")
        assert state.k.dtype == torch.float16
        outputs.append(o)
    wide = (q.double(), k.double(), v.double(), inputs[3].map(torch.Tensor.double))
    expected = oracle.softmax(*wide)
    plain = get("rope").forms["triton"](*half)
    assert relative_error(torch.cat(outputs, 1), expected) <= 1.1 * relative_error(plain, expected) + 2**-11
    _, after = continued("rope", state, half, 0, 1)  # the reference goes on from it, and the kernel from that
    assert len(continued("rope", after, half, 0, 1, form="triton")[1]) == 42
