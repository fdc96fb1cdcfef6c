"""Layers and their gates start as their papers say."""

import math

import pytest
import torch
import torch.nn.functional as F
from layers import D, G, H, assert_same, layer, rows

from attnzoo import build_attention, get, list_variants
from attnzoo.layer.gates import gate_classes
from attnzoo.layer.modules import l2_normalize
from attnzoo.layer.rows import rows_of_call
from attnzoo.models.config import ModelConfig
from attnzoo.models.decoder import LanguageModel


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
    gate, dt = attn.gate(x, x, rows_of_call(attn, x, None, None, None)[0])
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


def test_a_forget_gate_starts_as_open_as_asked_for():
    biases = [gate.forget_proj.bias for gate in (build_attention("fox", gate_bias=b).gate for b in (0.0, 5.0))]
    assert [set(bias.tolist()) for bias in biases] == [{0.0}, {5.0}]
    model = LanguageModel(ModelConfig("path_fox", {"gate_bias": 5.0}, 16, 1, 2))
    assert set(model.blocks[0].attention.gate.members[1].forget_proj.bias.tolist()) == {5.0}


def test_rope_angles_and_theta():
    angle = gate_of("rope").angle
    assert torch.allclose(angle, 500_000.0 ** (-torch.arange(0, 8, 2) / 8).float())
    assert torch.allclose(gate_of("rope", theta=100.0).angle[1], torch.tensor(100.0**-0.25))


def test_rope_turns_the_first_channels_alone_where_some_are_asked_for():
    angle = gate_of("rope", theta=100.0, rotated=2).angle
    assert angle.tolist() == [1.0, *[0.0] * (len(angle) - 1)]
    for rotated in (0, 3, 100):
        with pytest.raises(ValueError, match=f"rotated: expected an even number of channels .*, got {rotated}"):
            gate_of("rope", rotated=rotated)


def test_retnet_rotation_is_relative():
    """A sequence later in its stream gives the same output once everything before it is forgotten."""
    attn = layer("retnet")
    phase = attn.project(rows(1, 12))
    s = torch.einsum("bthk,bjhk->bhtj", phase.q, phase.k.repeat_interleave(H // G, 2))
    plain = layer("retnet", rotary=None).project(rows(1, 12))
    expected = torch.einsum("bthk,bjhk->bhtj", plain.q, plain.k.repeat_interleave(H // G, 2))
    assert_same(s.diagonal(dim1=-2, dim2=-1), expected.diagonal(dim1=-2, dim2=-1))
    assert (s - expected).abs().max() > 1e-3


def test_the_l2_norm_is_that_of_its_peers():
    """x rsqrt(|x|^2 + 1e-6), as flash-linear-attention's and Qwen3-Next's: short vectors become shorter, none jumps."""
    x = torch.randn(5, 8).double() * torch.tensor([0.0, 1e-9, 1e-3, 1.0, 1e6]).double()[:, None]
    x.requires_grad_()
    length = x.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(l2_normalize(x), x / (length**2 + 1e-6).sqrt(), rtol=1e-12, atol=0)
    assert torch.autograd.grad(l2_normalize(x).sum(), x)[0].isfinite().all()
    for name in ("deltanet", "gated_deltanet"):
        attn = layer(name)
        with torch.no_grad():
            for conv in (attn.q_conv, attn.k_conv):
                conv.weight.mul_(1e-4)  # so short that the eps is felt
        projected = attn.project(rows(1, 9))
        assert projected.k.norm(dim=-1).max() < 0.9
        assert projected.q.norm(dim=-1).max() < 0.9


@pytest.mark.parametrize("w", ["low_rank", "key"])
def test_path_transitions_are_unit_and_beta_reaches_two(w):
    attn = layer("path", w=w)
    gate = attn.project(rows(2, 64)).gate
    length = gate.w.norm(dim=-1)
    assert 0.9 < length.min() < length.max() <= 1
    assert 1 < gate.beta.max() <= 2
    assert (attn.gate.w_up is None) == (w == "key")


def test_a_vanishing_w_erases_nothing():
    attn = layer("path")
    gate = attn.project(torch.zeros(1, 4, D).double()).gate
    assert gate.w.eq(0).all()
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
    unit = "l2" if any(cls.unit_keys for cls in gate_classes(get(name).module.LAYER.get("gate", "none"))) else None
    assert pro.config.qk_norm == (unit or "rms")
    assert bare.config.qk_norm == (unit or "none")
