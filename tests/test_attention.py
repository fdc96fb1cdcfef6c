"""The attention layer: padding, packing, caches, presets, the papers' defaults, and bad input."""

import copy
import logging
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from attnzoo import Gate, Pair, Prune, build_attention, get, list_variants, oracle, register
from attnzoo.layer import attention
from attnzoo.layer.gates import GATES, GateProjection
from attnzoo.registry import unregister

D, H, G = 24, 4, 2
BLOCKS = (None, "llama", "pro")
PRUNABLE = [n for n in list_variants() if get(n).prunable]
every_layer = pytest.mark.parametrize(("name", "block"), [(n, b) for n in list_variants() for b in BLOCKS])


def layer(name, block=None, seed=0, **options):
    """A float64 layer whose every parameter matters: nothing is left at zero or one."""
    torch.manual_seed(seed)
    attn = build_attention(name, hidden_size=D, num_heads=H, num_kv_heads=G, head_dim=8, block=block, **options)
    attn = attn.double()
    with torch.no_grad():
        for parameter in attn.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return attn


def rows(B, T, seed=1):
    return torch.randn(B, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def assert_same(got, expected):
    assert got.shape == expected.shape
    error = (got - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
    assert error < 1e-10, f"relative error {error:.1e}"


def pieces(draw, T):
    cuts = sorted(draw(st.sets(st.integers(1, T - 1), max_size=6)))
    return list(zip([0, *cuts], [*cuts, T], strict=True))


@every_layer
@given(data=st.data())
def test_calls_in_pieces_equal_one_call(name, block, data):
    T = data.draw(st.integers(2, 21))
    attn, x = layer(name, block), rows(2, T)
    with torch.no_grad():
        cache = attn.new_cache()
        got = torch.cat([attn(x[:, a:b], cache=cache) for a, b in pieces(data.draw, T)], 1)
        assert_same(got, attn(x))


@every_layer
@given(data=st.data())
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
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any))
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
        if name != "alibi":
            forget = attn.gate if name == "fox" else attn.gate.members[1]
            forget.forget_proj.bias += 1.5  # slow enough that what is dropped is not below rounding
        got = attn(x)
        attn.prune = None
        assert (got - attn(x)).abs().max() < 1e-4
        assert not torch.equal(got, attn(x))  # something was pruned, or the test says nothing


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("options", [{"qk_norm": "rms"}, {"qk_norm": "l2"}, {"qk_norm": "rms", "rotary": 1e4}], ids=str)
@pytest.mark.parametrize("name", PRUNABLE)
def test_qk_norm_bounds_every_logit(name, options, dtype):
    attn, x = layer(name, **options).to(dtype), rows(2, 40).to(dtype)
    with torch.no_grad():
        for norm in (attn.q_norm, attn.k_norm):
            if norm is not None:
                norm.weight *= 3
        projected = attn.project(x)
        bound = attn.logit_bound(dtype)
        scores, _ = oracle.scores(projected.q, projected.k, projected.gate)
    assert bound.shape == (H,)
    largest = scores.abs().amax((0, 2, 3))
    assert (largest <= bound).all()
    assert (largest > 0.05 * bound).all()  # a bound that means something


def test_the_logit_bound_is_reached():
    """q and k along the channel with the largest weights have the bound as their logit, up to the rounding margin."""
    attn = layer("fox", qk_norm="rms")
    with torch.no_grad():
        weights = attn.q_norm.weight * attn.k_norm.weight.repeat_interleave(H // G, 0)
        spike = F.one_hot(weights.abs().argmax(-1), 8).double()[None, None] * 1e3  # [1, 1, H, K]
        k = torch.cat([attn.k_norm(spike[:, :, h :: H // G])[:, :, :, None] for h in range(H // G)], 3).flatten(2, 3)
        largest = (attn.q_norm(spike) * k).sum(-1).abs()[0, 0] * 8**-0.5
        bound = attn.logit_bound(torch.float64)
    assert (largest <= bound * (1 + 1e-6)).all()
    assert (largest >= bound * (1 - 1e-5)).all()


@pytest.mark.parametrize("w", ["low_rank", "key"])
@pytest.mark.parametrize("name", ["path", "path_fox"])
def test_directions_are_of_unit_length_in_a_16_bit_layer(name, w):
    """A w rounded to 16 bits may be longer than 1, and a factor with beta = 2 would then expand."""
    attn = layer(name, w=w).bfloat16()
    with torch.no_grad():
        length = attn.project(rows(1, 40).bfloat16()).gate.w.double().norm(dim=-1)
    assert (length - 1).abs().max() < 1e-6


def test_no_logit_bound_without_qk_norm():
    assert layer("fox", "llama").logit_bound() is None


@pytest.mark.parametrize("name", PRUNABLE)
def test_the_layer_prunes_by_its_qk_norm(name, monkeypatch):
    """The pruning is given the bound of the weights as they are now."""
    import attnzoo.forms.softmax

    seen, found = [], attnzoo.forms.softmax.first_kept_keys

    def record(*args, **options):
        seen.append(args[4])
        return found(*args, **options)

    monkeypatch.setattr(attnzoo.forms.softmax, "first_kept_keys", record)
    attn = layer(name, "pro", acp=True)
    with torch.no_grad():
        attn(rows(1, 20))
        attn.q_norm.weight *= 2
        attn(rows(1, 20))
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
@given(data=st.data())
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
@given(data=st.data())
def test_sinks_take_their_share_of_the_softmax(name, block, data):
    """In one call, in pieces, padded and packed; a sink of -inf takes nothing."""
    T = data.draw(st.integers(2, 13))
    x, attn, plain = rows(1, T), layer(name, block, sinks=True), layer(name, block)
    plain.load_state_dict({key: value for key, value in attn.state_dict().items() if key != "sinks"})
    with torch.no_grad():
        y = attn(x)
        cache = attn.new_cache()
        assert_same(torch.cat([attn(x[:, a:b], cache=cache) for a, b in pieces(data.draw, T)], 1), y)
        mask = F.pad(torch.ones(1, T), (3, 0))
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
    with pytest.raises(ValueError, match=f"{next(iter(option))}: '{name}' sums past tokens in one state"):
        build_attention(name, hidden_size=D, num_heads=H, **option)


# The papers' defaults


def gate_of(name, T=6, heads=8, **options):
    attn = build_attention(name, hidden_size=64, num_heads=heads, **options)
    return attn.project(torch.randn(1, T, 64)).gate


def test_retnet_gammas():
    expected = 1 - 2.0 ** (-5 - torch.arange(8.0))
    assert torch.allclose(gate_of("retnet").log_decay.exp(), expected)


def test_alibi_slopes():
    expected = 2.0 ** (-8 * torch.arange(1, 9) / 8)
    assert torch.allclose(-gate_of("alibi").log_decay, expected)
    assert not any(p.requires_grad for p in build_attention("alibi").gate.parameters())
    learnable = build_attention("alibi", learnable_slopes=True)
    assert [name for name, _ in learnable.gate.named_parameters()] == ["log_slope"]


def test_fox_gate_starts_at_one_half():
    attn = build_attention("fox")
    assert attn.gate.forget_proj.bias.abs().max() == 0
    assert torch.allclose(attn.project(torch.zeros(1, 2, 768)).gate.log_decay.exp(), torch.tensor(0.5))


@pytest.mark.parametrize(("gate", "trainable"), [("independent", True), ("fixed", False)])
def test_fox_data_independent_gates_decay_over_t_min_to_t_max(gate, trainable):
    log_decay = gate_of("fox", gate=gate, t_min=8, t_max=512).log_decay
    lengths = torch.linspace(math.log(8), math.log(512), 8).exp()
    assert torch.allclose(-1 / log_decay, lengths, rtol=1e-4)
    attn = build_attention("fox", gate=gate)
    assert bool(list(attn.gate.parameters())) == trainable


def test_mamba2_steps_start_in_their_range_and_scale_what_is_written():
    torch.manual_seed(0)
    attn = build_attention("mamba2", hidden_size=64, num_heads=8)
    x = torch.zeros(1, 3, 64)
    gate, dt = attn.gate(x, x, attn._stream(x, None, None))
    assert 0.001 <= dt.min() <= dt.max() <= 0.1
    a = -gate.log_decay / dt
    assert 1 <= a.min() <= a.max() <= 16


def test_gla_gates_are_tempered_low_rank_logits():
    attn = build_attention("gla", hidden_size=64, num_heads=8)
    assert attn.gate.down.out_features == 16
    x = torch.randn(1, 4, 64)
    logits = attn.gate.up(attn.gate.down(x)).view(1, 4, 8, 8)
    assert torch.allclose(attn.project(x).gate.log_diag, F.logsigmoid(logits) / 16)


@pytest.mark.parametrize(("name", "double"), [("deltanet", False), ("deltanet", True), ("gated_deltanet", True)])
def test_delta_rule_by_hand(name, double):
    """``S += beta (v - S k) k^T`` with unit keys, written as the papers write it."""
    attn = layer(name, allow_neg_eigval=double)
    x = rows(1, 9)
    projected = attn.project(x)
    assert torch.allclose(projected.k.norm(dim=-1), torch.ones(()).double())
    beta = projected.gate.beta
    k = projected.k.repeat_interleave(H // G, 2)
    v = (projected.v / projected.gate.beta[..., None]).repeat_interleave(H // G, 2)
    beta = beta.repeat_interleave(H // G, 2)
    decay = torch.ones(1, 9, H).double() if projected.gate.log_decay is None else projected.gate.log_decay.exp()
    S = torch.zeros(1, H, 8, 8).double()
    for t in range(9):
        S = decay[:, t, :, None, None] * S
        error = v[:, t] - torch.einsum("bhvk,bhk->bhv", S, k[:, t])
        S = S + beta[:, t, :, None, None] * error[..., :, None] * k[:, t, :, None, :]
        o = torch.einsum("bhvk,bhk->bhv", S, projected.q[:, t]) * 8**-0.5
    form = get(name).forms["chunk"](projected.q, projected.k, projected.v, projected.gate)
    assert_same(form[:, -1], o)
    assert projected.gate.beta.max() <= (2 if double else 1)


def test_rope_angles_and_theta():
    angle = gate_of("rope").angle
    assert torch.allclose(angle, 500_000.0 ** (-torch.arange(0, 8, 2) / 8).float())
    assert torch.allclose(gate_of("rope", theta=100.0).angle[1], torch.tensor(100.0**-0.25))


def test_retnet_rotation_is_relative():
    """A sequence later in its stream gives the same output once everything before it is forgotten."""
    attn = layer("retnet")
    phase = attn.project(rows(1, 12))
    s = torch.einsum("bthk,bjhk->bhtj", phase.q, phase.k.repeat_interleave(H // G, 2))
    plain = layer("retnet", rotary=None).project(rows(1, 12))
    expected = torch.einsum("bthk,bjhk->bhtj", plain.q, plain.k.repeat_interleave(H // G, 2))
    assert_same(s.diagonal(dim1=-2, dim2=-1), expected.diagonal(dim1=-2, dim2=-1))
    assert (s - expected).abs().max() > 1e-3


@pytest.mark.parametrize("w", ["low_rank", "key"])
def test_path_transitions_are_unit_and_beta_reaches_two(w):
    attn = layer("path", w=w)
    gate = attn.project(rows(2, 64)).gate
    assert torch.allclose(gate.w.norm(dim=-1), torch.ones(()).double())
    assert 1 < gate.beta.max() <= 2
    assert (attn.gate.w_up is None) == (w == "key")


def test_a_vanishing_w_erases_nothing():
    attn = layer("path")
    gate = attn.project(torch.zeros(1, 4, D).double()).gate
    assert gate.beta.eq(0).all()
    assert attn(torch.zeros(1, 4, D).double()).isfinite().all()


def test_the_same_gate_serves_both_sides():
    """The dual of FoX with FoX's own gate: one projection, both readouts."""
    fox, mamba = build_attention("fox"), build_attention("mamba2", gate="forget", block="llama")
    mamba.load_state_dict(fox.state_dict())
    x = torch.randn(1, 5, 768)
    assert torch.equal(fox.project(x).gate.log_decay, mamba.project(x).gate.log_decay)


@pytest.mark.parametrize("name", list_variants())
def test_presets_choose_the_parts(name):
    bare, pro = build_attention(name, block="llama"), build_attention(name, block="pro")
    assert bare.output_norm is None
    assert bare.output_gate is None
    assert bare.q_conv is None
    assert pro.output_norm.kind == "rms"
    assert pro.config.output_gate == "sigmoid"
    assert pro.k_shift is not None
    unit = "l2" if name in ("deltanet", "gated_deltanet") else None
    assert pro.config.qk_norm == (unit or "rms")
    assert bare.config.qk_norm == (unit or "none")


# Choice of implementation


def test_auto_says_once_what_it_picked(caplog, monkeypatch):
    monkeypatch.setattr(attention, "_said", set())
    attn = build_attention("fox", hidden_size=D, num_heads=H)
    with caplog.at_level(logging.INFO, "attnzoo"):
        attn(torch.randn(1, 3, D))
        build_attention("fox", hidden_size=D, num_heads=H)(torch.randn(1, 3, D))
    assert [record.getMessage() for record in caplog.records] == ["fox: impl='auto' runs reference on cpu"]
    assert "impl='auto' (reference on cpu)" in repr(attn)


@pytest.mark.parametrize(("name", "impl"), [("wall", "triton"), ("fox", "fla"), ("mamba2", "fla"), ("gla", "triton")])
def test_explicit_impl_never_falls_back(name, impl):
    attn = build_attention(name, hidden_size=D, num_heads=H, impl=impl)
    with pytest.raises(RuntimeError, match=f"impl='{impl}'"):
        attn(torch.randn(1, 3, D))


TRITON = [name for name in list_variants("softmax") if "triton" in get(name).forms]


def on_both(name, acp=False):
    """The same layer on the reference and on the (interpreted) kernel."""
    torch.manual_seed(0)
    sizes = {"hidden_size": D, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16 if "path" in name else 8}
    reference, kernel = (build_attention(name, **sizes, acp=acp, impl=impl) for impl in ("reference", "triton"))
    kernel.load_state_dict(reference.state_dict())
    return reference, kernel


@pytest.mark.parametrize("acp", [False, True])
@pytest.mark.parametrize("name", TRITON)
def test_the_kernel_serves_a_layer_like_the_reference(name, acp):
    """Whole calls, padding, packing, a prefill and steps, and the gradient of every parameter (interpreted)."""
    if acp and not get(name).prunable:
        return
    reference, kernel = on_both(name, acp)
    x = rows(2, 37).float()
    mask = torch.ones(2, 37, dtype=torch.bool)
    mask[0, :5] = mask[1, 30:] = False

    def run(attn):
        cache = attn.new_cache()
        with torch.no_grad():
            steps = [attn(part, cache=cache) for part in (x[:, :30], x[:, 30:31], x[:, 31:])]
            packed = attn(x[:1], cu_seqlens=torch.tensor([0, 11, 11, 37]))
        whole = attn(x)
        gradients = torch.autograd.grad(whole.square().sum(), list(attn.parameters()), allow_unused=True)
        return [whole, attn(x, attention_mask=mask), packed, torch.cat(steps, 1), *gradients]

    for got, expected in zip(run(kernel), run(reference), strict=True):
        assert (got - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.parametrize("name", TRITON)
@torch.no_grad()
def test_cached_steps_of_the_kernel_take_padding(name):
    """A padded prefill, a padded chunk and steps without a mask; rows reordered; the cache handed to the reference."""
    reference, kernel = on_both(name)
    x = rows(2, 24).float()
    mask = torch.ones(2, 24, dtype=torch.bool)
    mask[0, :5] = mask[1, 14:17] = False

    def run(attn, then):
        cache = attn.new_cache()
        steps = [attn(x[:, a:b], attention_mask=mask[:, :b], cache=cache) for a, b in ((0, 12), (12, 18))]
        steps += [attn(x[:, 18:19], cache=cache), attn(x[:, 19:20], cache=cache)]
        cache.reorder(torch.tensor([1, 1]))
        steps.append(attn(x[:, 20:21], cache=cache))
        return torch.cat([*steps, then(x[:, 21:], cache=cache)], 1)

    expected = run(reference, reference)
    for got in (run(kernel, kernel), run(kernel, reference), run(reference, kernel)):
        assert (got - expected).norm() <= 1e-4 * expected.norm()


def test_a_cached_step_of_the_kernel_refuses_to_record_gradients():
    attn = build_attention("path", hidden_size=D, num_heads=H, head_dim=16, impl="triton")
    cache = attn.new_cache()
    attn(rows(1, 3).float(), cache=cache)
    with pytest.raises(RuntimeError, match="a cached step of the triton form has no gradient"):
        attn(rows(1, 1).float(), cache=cache)


def test_head_dims_without_a_kernel_are_named():
    attn = build_attention("path_fox", hidden_size=D, num_heads=H, head_dim=8, impl="triton")
    with pytest.raises(RuntimeError, match="impl='triton': expected K a multiple of 16 up to 128, got 8"):
        attn(rows(1, 3).float())


def test_a_step_without_decay_cannot_be_pruned():
    projected = build_attention("path", hidden_size=D, num_heads=H, head_dim=16).project(rows(1, 3).float())
    with pytest.raises(ValueError, match="prune: expected None"):
        get("path").extend(projected.q, projected.k, projected.v, projected.gate, form="triton", prune=Prune())


# Bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "foks"}, r"unknown variant 'foks'.*did you mean 'fox'"),
        ({"name": "fox", "output_nrom": "rms"}, r"'output_nrom'.*did you mean 'output_norm'"),
        ({"name": "gla", "temprature": 2}, r"'temprature'.*did you mean 'temperature'"),
        ({"name": "fox", "block": "prod"}, r"unknown block 'prod'.*did you mean 'pro'"),
        ({"name": "fox", "impl": "trition"}, r"unknown impl 'trition'.*did you mean 'triton'"),
        ({"name": "fox", "output_gate": "sigmoyd"}, r"unknown output_gate.*did you mean 'sigmoid'"),
        ({"name": "fox", "gate": "forgot"}, r"unknown gate 'forgot'.*did you mean 'forget'"),
        ({"name": "fox", "gate": "delta"}, r"'fox' needs the parts.*log_decay.*'delta' provides"),
        ({"name": "rope", "acp": True}, r"acp: 'rope' has no scalar decay.*alibi, fox, path_fox"),
        ({"name": "mamba2", "acp": True}, r"acp: 'mamba2' has no keys to prune.*dual is 'fox'.*alibi, fox, path_fox"),
        ({"name": "deltanet", "qk_norm": "rms"}, r"qk_norm: expected 'l2'"),
        ({"name": "fox", "hidden_size": 100}, r"hidden_size: expected a multiple of num_heads = 12"),
        ({"name": "fox", "num_kv_heads": 5}, r"num_kv_heads: expected a divisor of num_heads = 12, got 5"),
        ({"name": "fox", "num_heads": 0}, r"num_heads: expected a positive integer, got 0"),
        ({"name": "fox", "conv_size": -1}, r"conv_size: expected"),
        ({"name": "rope", "head_dim": 7}, r"head_dim: expected an even number"),
        ({"name": "rope", "theta": 0}, r"theta: expected a positive number"),
        ({"name": "fox", "gate": "fixed", "t_min": 9, "t_max": 3}, r"t_min, t_max: expected"),
        ({"name": "mamba2", "dt_min": 0}, r"dt_min, dt_max: expected"),
        ({"name": "gla", "gate_rank": 0}, r"gate_rank: expected at least 1"),
        ({"name": "path", "w": "keys"}, r"unknown w 'keys'.*did you mean 'key'"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        build_attention(**options)


def test_bad_types_are_named():
    with pytest.raises(TypeError, match="acp: expected True, False or attnzoo.Prune, got 'yes'"):
        build_attention("fox", acp="yes")
    with pytest.raises(TypeError, match="gate: expected a name or a GateProjection class"):
        build_attention("fox", gate=[3])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda a, x: a(x[0]), ValueError, r"x: expected \[B, T, D = 24\], got \(6, 24\)"),
        (lambda a, x: a(x[..., :5]), ValueError, r"x: expected \[B, T, D = 24\]"),
        (lambda a, x: a(x[:, :0]), ValueError, "x: expected at least one token"),
        (lambda a, x: a(x, attention_mask=torch.ones(2, 5)), ValueError, r"attention_mask: expected .*\(2, 6\)"),
        (lambda a, x: a(x, attention_mask=torch.ones(2, 9)), ValueError, "attention_mask: expected"),
        (lambda a, x: a(x, attention_mask=[1]), TypeError, "attention_mask: expected a tensor"),
        (lambda a, x: a(x, cu_seqlens=torch.tensor([0, 6])), ValueError, "x: expected one row"),
        (lambda a, x: a(x[:1], cu_seqlens=torch.tensor([0, 5])), ValueError, "cu_seqlens: expected borders"),
        (lambda a, x: a(x[:1], cu_seqlens=torch.tensor([0, 4, 3, 6])), ValueError, "cu_seqlens: expected borders"),
        (lambda a, x: a(x[:1], cu_seqlens=torch.tensor([0.0, 6.0])), TypeError, "cu_seqlens: expected an int32"),
        (lambda a, x: a(x[:1], cu_seqlens=torch.tensor(6)), ValueError, "cu_seqlens: expected one axis"),
        (
            lambda a, x: a(x[:1], cu_seqlens=torch.tensor([0, 6]), attention_mask=torch.ones(1, 6)),
            ValueError,
            "attention_mask: expected None with cu_seqlens",
        ),
        (lambda a, x: a(x, cache={}), TypeError, "cache: expected what new_cache"),
    ],
)
def test_bad_calls_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call(build_attention("fox", hidden_size=D, num_heads=H), torch.randn(2, 6, D))


def test_a_cache_of_another_batch_is_refused():
    attn = build_attention("gla", hidden_size=D, num_heads=H)
    cache = attn.new_cache()
    attn(torch.randn(2, 3, D), cache=cache)
    with pytest.raises(ValueError, match="cache: expected 2 rows as in the calls before, got 3"):
        attn(torch.randn(3, 1, D), cache=cache)


# A gate and a pair from outside the package


class HalfLife(GateProjection):
    """Every token halves what came before."""

    provides = ("log_decay",)

    def forward(self, x, k, stream):
        return Gate(log_decay=torch.full((*x.shape[:2], self.sizes.num_heads), -math.log(2.0))), None


def test_a_gate_from_outside_serves_both_sides():
    x = torch.randn(1, 5, D)
    for name in ("fox", "mamba2"):
        attn = build_attention(name, hidden_size=D, num_heads=H, gate=HalfLife)
        assert attn(x).shape == x.shape
        assert torch.allclose(attn.project(x).gate.log_decay.exp(), torch.tensor(0.5))
    assert HalfLife not in GATES.values()


def test_a_registered_pair_builds_a_layer():
    pair = Pair(
        "fast_retnet", "fast_alibi", ("log_decay",), "-log 2", "I",
        linear_module="attnzoo.recurrences.retnet", softmax_module="attnzoo.encodings.alibi",
    )  # fmt: skip
    register(pair)
    try:
        attn = build_attention("fast_alibi", hidden_size=D, num_heads=H, gate=HalfLife, acp=True)
        assert attn(torch.randn(1, 5, D)).shape == (1, 5, D)
    finally:
        unregister(pair)
