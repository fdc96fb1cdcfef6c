"""The attention layer: padding, packing, caches, gradients, windows and sinks."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from layers import D, G, H, assert_same, forgetful, layer, pieces, rows
from thinning import given_variant
from torch.utils.checkpoint import checkpoint

from attnzoo import Prune, build_attention, get, list_variants, oracle
from attnzoo.layer.modules import HeadNorm

BLOCKS = (None, "llama", "pro")
PRUNABLE = [n for n in list_variants() if get(n).prunable]


def every_layer(test):
    blocks = [
        (n, b) for n in list_variants() for b in BLOCKS if (get(n).side, b) != ("softmax", "llama")
    ]  # which is None
    return pytest.mark.covering("layers")(pytest.mark.parametrize(("name", "block"), blocks)(test))


@pytest.mark.parametrize("name", list_variants("softmax"))
def test_a_softmax_layer_is_the_one_of_the_llama_block(name):
    assert layer(name).config == layer(name, "llama").config


@every_layer
@given_variant(data=st.data())
def test_calls_in_pieces_equal_one_call(name, block, data):
    T = data.draw(st.integers(2, 21))
    attn, x = layer(name, block), rows(2, T)
    with torch.no_grad():
        cache = attn.new_cache()
        got = torch.cat([attn(x[:, a:b], cache=cache) for a, b in pieces(data.draw, T)], 1)
        assert_same(got, attn(x))


@every_layer
@given_variant(data=st.data())
def test_padding_changes_nothing(name, block, data):
    """Left, right and inner padding, in one call and across cached calls, against rows without any."""
    T = data.draw(st.integers(2, 17))
    attn, x = layer(name, block), rows(3, T)
    left, right = data.draw(st.integers(0, T - 1)), data.draw(st.integers(0, T - 1))
    mask = torch.ones(3, T, dtype=torch.long)
    mask[0, :left] = 0
    mask[1, T - right :] = 0
    mask[2] = torch.tensor(data.draw(st.lists(st.integers(0, 1), min_size=T, max_size=T)))
    with torch.no_grad():
        got = attn(x, attention_mask=mask)
        for b in range(3):
            there = mask[b].bool()
            assert got[b, ~there].eq(0).all()
            if there.any():
                assert_same(got[b, there], attn(x[b : b + 1, there])[0])
        cache = attn.new_cache()
        steps = pieces(data.draw, T)
        again = [attn(x[:, a:b], attention_mask=mask[:, a:b], cache=cache) for a, b in steps]
        assert_same(torch.cat(again, 1), got)


@every_layer
@given_variant(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any))
def test_packed_equals_separate(name, block, lengths):
    attn, x = layer(name, block), rows(1, sum(lengths))
    cu = torch.tensor([0, *lengths]).cumsum(0)
    with torch.no_grad():
        expected = [attn(part) for part in x.split(lengths, 1) if part.shape[1]]
        assert_same(attn(x, cu_seqlens=cu), torch.cat(expected, 1))


@every_layer
def test_gradients_of_packed_equal_those_of_separate(name, block):
    attn, lengths = layer(name, block), [5, 0, 1, 8]
    cu, x = torch.tensor([0, *lengths]).cumsum(0), rows(1, 14).requires_grad_()
    separate = torch.cat([attn(part) for part in x.split(lengths, 1) if part.shape[1]], 1)
    wanted = [x, *attn.parameters()]
    expected = torch.autograd.grad(separate.square().sum(), wanted)
    for pair in zip(torch.autograd.grad(attn(x, cu_seqlens=cu).square().sum(), wanted), expected, strict=True):
        assert_same(*pair)


@every_layer
@torch.no_grad()
def test_no_rows_give_no_rows(name, block):
    attn, x = layer(name, block), rows(0, 5)
    cache, mask = attn.new_cache(), torch.ones(0, 5, dtype=torch.bool)
    for y in (attn(x), attn(x, attention_mask=mask), attn(x, cache=cache), attn(x, cache=cache)):
        assert y.shape == (0, 5, D)


@pytest.mark.parametrize("name", list_variants())
def test_packed_prefill_then_stepping(name):
    """After a packed prefill the cache has one row per sequence: both packed and batched calls continue it."""
    attn, lengths, more = layer(name), [5, 2, 7], 3
    prompts, tails = [rows(1, n, seed=n) for n in lengths], rows(3, more)
    with torch.no_grad():
        cache = attn.new_cache()
        attn(torch.cat(prompts, 1), cu_seqlens=torch.tensor([0, 5, 7, 14]), cache=cache)
        first = attn(tails[:, :1], cache=cache)
        rest = attn(tails[:, 1:].reshape(1, -1, D), cu_seqlens=torch.tensor([0, 2, 4, 6]), cache=cache)
        got = torch.cat([first, rest.view(3, 2, D)], 1)
        for b, prompt in enumerate(prompts):
            assert_same(got[b], attn(torch.cat([prompt, tails[b : b + 1]], 1))[0, -more:])


@pytest.mark.parametrize("name", list_variants())
def test_a_mask_over_cached_tokens_too_is_accepted(name):
    attn, x = layer(name), rows(2, 8)
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[0, :3] = False
    with torch.no_grad():
        cache = attn.new_cache()
        attn(x[:, :6], attention_mask=mask[:, :6], cache=cache)
        assert_same(attn(x[:, 6:], attention_mask=mask, cache=cache), attn(x, attention_mask=mask)[:, 6:])


@pytest.mark.parametrize("name", list_variants())
def test_reordered_cache_follows_its_rows(name):
    attn, x = layer(name, "pro"), rows(3, 9)
    index = torch.tensor([2, 0, 2])
    with torch.no_grad():
        cache = attn.new_cache()
        attn(x[:, :6], cache=cache)
        cache.reorder(index)
        assert_same(attn(x[index][:, 6:], cache=cache), attn(x)[index][:, 6:])


@every_layer
def test_every_parameter_gets_a_gradient(name, block):
    attn = layer(name, block)
    attn(rows(2, 9)).square().sum().backward()
    missing = [p for p, value in attn.named_parameters() if value.grad is None or not value.grad.abs().max() > 0]
    assert not missing


@every_layer
def test_activation_checkpointing_changes_nothing(name, block):
    """The layer is run again in the backward, and its own row blocks inside it."""
    attn, x = layer(name, block, acp=get(name).prunable), rows(2, 9).requires_grad_()
    wanted, outputs = [x, *attn.parameters()], []
    for y in (attn(x), checkpoint(attn, x, use_reentrant=False)):
        outputs.append([y, *torch.autograd.grad(y.square().sum(), wanted)])
    assert all(torch.equal(*pair) for pair in zip(*outputs, strict=True))


@every_layer
def test_future_changes_nothing(name, block):
    attn, x = layer(name, block), rows(2, 12)
    with torch.no_grad():
        y = attn(x)
        x[:, 7:] += 5
        assert_same(attn(x)[:, :7], y[:, :7])


@pytest.mark.parametrize("name", PRUNABLE)
def test_pruned_layer_stays_within_eps(name):
    attn, x = layer(name, "pro", acp=Prune(eps=1e-6)), rows(1, 700)
    with torch.no_grad():
        for part in attn.gate.modules():
            if hasattr(part, "forget_proj"):
                part.forget_proj.bias.fill_(1.5)  # slow enough that what is dropped is not below rounding
        got = attn(x)
        attn.prune = None
        assert (got - attn(x)).abs().max() < 1e-4
        assert not torch.equal(got, attn(x))  # something was pruned, or the test says nothing


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("options", [{"qk_norm": "rms"}, {"qk_norm": "l2"}, {"qk_norm": "rms", "rotary": 1e4}], ids=str)
@pytest.mark.parametrize("name", PRUNABLE)
def test_qk_norm_bounds_every_logit(name, options, dtype):
    attn, x = layer(name, **options).to(dtype), rows(2, 40).to(dtype)
    with torch.no_grad():
        for channel, norm in enumerate((attn.q_norm, attn.k_norm)):
            if norm is not None:
                norm.weight *= 0.3
                norm.weight[:, channel] = 3.0  # what mixes channels brings the two together
        projected = attn.project(x)
        bound = attn.logit_bound(dtype)
        scores, _ = oracle.scores(projected.q, projected.k, projected.gate)
        query, longest = attn.query_bounds(dtype).query, projected.q.double().norm(dim=-1).amax((0, 1)) * 8**-0.5
    assert (longest <= query).all()
    assert bound.shape == query.shape == (H,)
    largest = scores.abs().amax((0, 2, 3))
    assert (largest <= bound).all()
    assert (largest > 0.05 * bound).all()  # a bound that means something


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("qk_norm", ["rms", "rms_full", "l2"])
def test_the_bounds_of_qk_norm_allow_for_what_a_rotation_rounds(qk_norm, dtype):
    """Sines and cosines, and what they turn, are rounded to the dtype of x: a turned vector may be longer."""
    attn = build_attention("fox", hidden_size=8, num_heads=1, qk_norm=qk_norm, rotary=1e4).to(dtype)
    turn = torch.linspace(0, 1000, 9000)
    x = F.pad(torch.stack([turn.cos(), turn.sin()], -1), (0, 6))[None].to(dtype)  # in the pair that turns fastest
    with torch.no_grad():
        for projection in (attn.q_proj, attn.k_proj):
            projection.weight.copy_(1000 * torch.eye(8))
        projected = attn.project(x)
        q, k = projected.q.double(), projected.k.double()
        assert ((q * k).sum(-1).abs() * 8**-0.5).max() <= attn.logit_bound(dtype)
        assert (q.norm(dim=-1) * 8**-0.5).max() <= attn.query_bounds(dtype).query


def test_the_logit_bound_is_reached():
    """q and k along the channel with the largest weights have the bound as their logit, up to the rounding margin; q
    alone along its own largest has that of its length."""
    attn = layer("fox", qk_norm="rms")
    with torch.no_grad():
        weights = attn.q_norm.weight * attn.k_norm.weight.repeat_interleave(H // G, 0)
        spike = F.one_hot(weights.abs().argmax(-1), 8).double()[None, None] * 1e3  # [1, 1, H, K]
        k = torch.cat([attn.k_norm(spike[:, :, h :: H // G])[:, :, :, None] for h in range(H // G)], 3).flatten(2, 3)
        largest = (attn.q_norm(spike) * k).sum(-1).abs()[0, 0] * 8**-0.5
        alone = F.one_hot(attn.q_norm.weight.abs().argmax(-1), 8).double()[None, None] * 1e3
        longest = attn.q_norm(alone).norm(dim=-1)[0, 0] * 8**-0.5
    for most, bound in ((largest, attn.logit_bound(torch.float64)), (longest, attn.query_bounds(torch.float64).query)):
        assert (most <= bound * (1 + 1e-6)).all()
        assert (most >= bound * (1 - 1e-5)).all()


@pytest.mark.parametrize("w", ["low_rank", "key"])
@pytest.mark.parametrize("name", ["path", "path_fox"])
def test_no_direction_is_longer_than_1_in_a_16_bit_layer(name, w):
    """A w rounded to 16 bits may be longer than 1, and a factor with beta = 2 would then expand."""
    attn = layer(name, w=w).bfloat16()
    with torch.no_grad():
        length = attn.project(rows(1, 40).bfloat16()).gate.w.double().norm(dim=-1)
    assert 0.9 < length.min() < length.max() < 1 + 1e-6


@pytest.mark.parametrize("options", [{}, {"num_householder": 2}], ids=str)
@pytest.mark.parametrize("name", ["deltanet", "gated_deltanet", "kda"])
def test_no_reflection_grows_in_a_16_bit_layer(name, options):
    """The state along a key that comes again and again would grow with every token, by 1e20 over 8192 of them."""
    attn = layer(name, allow_neg_eigval=True, **options).bfloat16()
    with torch.no_grad():
        gate = (attn.gate.members[-1] if hasattr(attn.gate, "members") else attn.gate).beta_proj
        gate.weight.mul_(1e3)
        found = attn.project(rows(1, 40).bfloat16()).gate
        erased = found.beta.double() * found.w.double().square().sum(-1)
    assert 1.9 < erased.max() < 2 + 1e-6


def test_no_logit_bound_without_qk_norm():
    assert layer("fox", "llama").logit_bound() is None


class Longer(HeadNorm):
    def forward(self, x):
        return 30 * super().forward(x)


def longer(attn, how):
    if how == "class":
        attn.q_norm.__class__ = Longer
    elif how == "module":
        attn.q_norm = torch.nn.LayerNorm(8, elementwise_affine=False).double()
        attn.q_norm.forward = lambda x: 30 * x
    else:
        attn.k_norm.register_forward_hook(lambda module, given, y: 30 * y)


@pytest.mark.parametrize("how", ["class", "module", "hook"])
def test_norms_of_ones_own_or_with_hooks_bound_nothing(how):
    """Their weights, if they have any, do not say how long queries and keys become."""
    pruned = forgetful(acp=Prune(eps=1e-12))
    longer(pruned, how)
    whole = copy.deepcopy(pruned)
    whole.prune = None
    with torch.no_grad():
        assert_same(pruned(rows(1, 400)), whole(rows(1, 400)))
    assert pruned.logit_bound() is pruned.query_bounds(torch.float32) is None
    with pytest.raises(ValueError, match="^evict: expected 'offload', or q_norm and k_norm as the layer made them"):
        pruned.new_cache(evict=1e-6)
    pruned.new_cache(evict="offload")
    forgetful(softcap=20.0).new_cache(evict=1e-6)


def test_hooks_that_move_weights_to_their_device_leave_the_bounds():
    """As accelerate puts one on every module where layers lie on several GPUs."""
    hooks, attn = pytest.importorskip("accelerate.hooks"), forgetful()
    expected = attn.logit_bound()
    for norm in (attn.q_norm, attn.k_norm):
        hooks.add_hook_to_module(norm, hooks.AlignDevicesHook("cpu"))
    assert torch.equal(attn.logit_bound(), expected)
    attn.new_cache(evict=1e-6)


@pytest.mark.parametrize("name", PRUNABLE)
def test_the_layer_prunes_by_its_qk_norm(name, monkeypatch):
    """The pruning is given the bound of the weights as they are now."""
    import attnzoo.forms.additive
    import attnzoo.forms.softmax

    seen, found = [], attnzoo.forms.softmax.first_kept_keys

    def record(*args, **options):
        seen.append(args[4])
        return found(*args, **options)

    for forms in (attnzoo.forms.additive, attnzoo.forms.softmax):
        monkeypatch.setattr(forms, "first_kept_keys", record)
    attn = layer(name, "pro", acp=True)
    with torch.no_grad():
        attn(rows(1, 150))
        attn.q_norm.weight *= 2
        attn(rows(1, 150))
    assert torch.equal(seen[1], 2 * seen[0])
    assert torch.equal(seen[1], attn.logit_bound(torch.float64))


@pytest.mark.parametrize("name", list_variants())
def test_autocast_keeps_gates_and_states_in_float32(name):
    attn = build_attention(name, hidden_size=D, num_heads=H, head_dim=8)
    x = rows(2, 33).float()
    plain = attn(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        projected = attn.project(x)
        cache = attn.new_cache()
        mixed = attn(x, cache=cache)
    assert projected.q.dtype == torch.bfloat16
    for part in set(projected.gate.parts) - {"w"}:
        assert getattr(projected.gate, part).dtype == torch.float32
    if get(name).side == "linear":
        assert cache.state.matrix.dtype == torch.float32
    assert (mixed.float() - plain).norm() < 0.05 * plain.norm()


@pytest.mark.parametrize("name", list_variants())
def test_bfloat16_layer_runs_forward_and_backward(name):
    attn = build_attention(name, hidden_size=D, num_heads=H, head_dim=8).bfloat16()
    y = attn(rows(2, 17).bfloat16())
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16
    assert y.isfinite().all()


@pytest.mark.parametrize("name", list_variants())
def test_state_dict_round_trip_and_reset(name):
    attn, x = layer(name), rows(1, 5)
    other = layer(name, seed=7)
    assert not torch.equal(attn(x), other(x))
    other.load_state_dict(attn.state_dict())
    assert torch.equal(attn(x), other(x))
    torch.manual_seed(3)
    attn.reset_parameters()
    torch.manual_seed(3)
    other.reset_parameters()
    assert torch.equal(attn(x), other(x))


@pytest.mark.parametrize("name", list_variants())
def test_a_layer_can_be_copied_and_pickled(name):
    attn, x = layer(name), rows(1, 5)
    for other in (copy.deepcopy(attn), pickle.loads(pickle.dumps(attn))):
        assert torch.equal(other(x), attn(x))
        assert other.variant is attn.variant
        assert other.o_proj.weight is not attn.o_proj.weight


SOFTMAX = list_variants("softmax")
every_softmax_layer = pytest.mark.parametrize(("name", "block"), [(n, b) for n in SOFTMAX for b in (None, "pro")])


@every_softmax_layer
@given_variant(data=st.data())
def test_what_lies_before_the_window_moves_nothing(name, block, data):
    T, window = data.draw(st.integers(6, 13)), data.draw(st.integers(1, 15))
    attn, x = layer(name, block, window=window), rows(2, T)
    with torch.no_grad():
        y = attn(x)
        cache = attn.new_cache()
        assert_same(torch.cat([attn(x[:, a:b], cache=cache) for a, b in pieces(data.draw, T)], 1), y)
        x[:, 0] += 5
        changed = attn(x)
        reach = window + 2 + attn.config.kv_shift  # w of PaTH and shifted keys look at their neighbours
        if reach < T:
            assert_same(changed[:, reach:], y[:, reach:])
        assert (changed[:, :window] - y[:, :window]).abs().amax(-1).min() > 1e-6


@every_softmax_layer
def test_a_window_as_long_as_the_text_hides_nothing(name, block):
    x = rows(2, 11)
    with torch.no_grad():
        expected = layer(name, block)(x)
        assert_same(layer(name, block, window=11)(x), expected)
        assert (layer(name, block, window=3)(x) - expected).abs().max() > 1e-3


@every_softmax_layer
@given_variant(data=st.data())
def test_sinks_take_their_share_of_the_softmax(name, block, data):
    """In one call, in pieces, padded and packed; a sink of -inf takes nothing."""
    T = data.draw(st.integers(2, 13))
    x, attn, plain = rows(1, T), layer(name, block, sinks=True), layer(name, block)
    plain.load_state_dict({key: value for key, value in attn.state_dict().items() if key != "sinks"})
    with torch.no_grad():
        y = attn(x)
        cache = attn.new_cache()
        assert_same(torch.cat([attn(x[:, a:b], cache=cache) for a, b in pieces(data.draw, T)], 1), y)
        mask = F.pad(torch.ones(1, T, dtype=torch.bool), (3, 0))
        assert_same(attn(F.pad(x, (0, 0, 3, 0)), attention_mask=mask)[:, 3:], y)
        assert_same(attn(torch.cat([x, x], 1), cu_seqlens=torch.tensor([0, T, 2 * T])), torch.cat([y, y], 1))
        attn.sinks.fill_(-torch.inf)
        assert_same(attn(x), plain(x))


def test_sinks_are_learned_in_float32_from_zero():
    attn = build_attention("fox", hidden_size=D, num_heads=H, sinks=True).bfloat16()
    assert attn.sinks.dtype == torch.float32
    assert attn.sinks.eq(0).all()
    x = rows(1, 5).bfloat16()
    y = attn(x)
    y.float().square().sum().backward()
    assert attn.sinks.grad.abs().min() > 0


@pytest.mark.parametrize("option", [{"window": 3}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("name", list_variants("linear"))
def test_the_linear_side_refuses_windows_and_sinks(name, option):
    with pytest.raises(
        ValueError, match=rf"{next(iter(option))}: expected \w+ \('{name}' sums past tokens in one state.*, got "
    ):
        build_attention(name, hidden_size=D, num_heads=H, **option)
