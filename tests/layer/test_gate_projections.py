"""Angles from the input and channel gates: their papers' formulas written plainly, and what they refuse."""

import math

import pytest
import torch
import torch.nn.functional as F
from layers import D, G, H, layer, rows

from attnzoo import build_attention
from attnzoo.layer.gates import GATES, Sizes, gate_options
from attnzoo.layer.gates.angles import Mamba3Decay, SelectiveAngles
from attnzoo.layer.gates.channel import SoftplusDiagonal
from attnzoo.precision import wide

K, T = 8, 13
SIZES = Sizes(D, H, G, K)


def gate_of(name, **options):
    attn = layer(name, **options)
    return attn.gate, attn.project(rows(2, T)).gate


def same(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_options_that_open_a_gate_are_its_own():
    opened = {name: {*cls.opened(64.0, {})} - {*gate_options([cls])} for name, cls in GATES.items()}
    assert not any(opened.values()), opened


@pytest.mark.parametrize("phase_gate", [False, True])
def test_selective_angles_are_convolved_projections_times_the_frequencies_of_rope(phase_gate):
    gate, made = gate_of("rope", gate="selective", phase_gate=phase_gate)
    x = rows(2, T).unflatten(-1, (H, -1))
    x = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).flatten(-2)
    phi = x @ gate.angle_down.weight.T @ gate.angle_up.weight.T
    padded = F.pad(phi, (0, 0, 3, 0))
    phi = sum(gate.angle_conv.weight[:, i] * padded[:, i : i + T] for i in range(4)).unflatten(-1, (H, -1))
    if phase_gate:
        phi = phi * (x @ gate.phase_proj.weight.T + gate.phase_proj.bias).sigmoid()[..., None]
    frequency = 500_000.0 ** (-torch.arange(0, K, 2).double() / K)
    assert not gate.frequency.requires_grad
    same(gate.frequency, frequency.float().double())
    same(made.angle, wide(gate.frequency) * phi)


def test_mamba3_steps_scale_the_decay_the_angle_and_what_is_written():
    attn = layer("mamba3")
    gate, x = attn.gate, rows(2, T)
    made = attn.project(x)
    dt = F.softplus(x @ gate.dt_proj.weight.T + gate.dt_bias)
    a = F.softplus(x @ gate.a_proj.weight.T).clamp(min=1e-4)
    angle = math.pi * dt[..., None] * (x @ gate.angle_proj.weight.T).tanh()[:, :, None]
    same(made.gate.log_decay, -a * dt)
    same(made.gate.angle[..., :2], angle)  # half of the channels turn
    assert not made.gate.angle[..., 2:].any()
    same(made.write, dt)
    with torch.no_grad():
        gate.a_proj.weight.fill_(-9.0)  # a head that would never forget
    x = rows(2, T).abs()
    same(attn.project(x).gate.log_decay, -1e-4 * F.softplus(x @ gate.dt_proj.weight.T + gate.dt_bias))


def test_the_write_strengths_of_two_projections_are_multiplied_with_fewer_key_heads_too():
    attn = layer("gated_deltanet", gate=("mamba2", "delta"))
    steps, delta = attn.gate.members
    x = rows(2, T)
    dt = F.softplus(x @ steps.dt_proj.weight.T + steps.dt_bias)
    beta = (x @ delta.beta_proj.weight.T).sigmoid()
    assert (dt.shape[2], beta.shape[2]) == (H, G)
    assert G < H
    same(attn.project(x).write, dt * beta.repeat_interleave(H // G, 2))
    assert attn(x).shape == x.shape


def test_full_rank_channel_gates_are_wall_s():
    gate, made = gate_of("wall", gate="full_rank")
    proj = gate.channel_proj
    same(made.log_diag.flatten(-2), F.logsigmoid(rows(2, T) @ proj.weight.T + proj.bias))
    gate.reset_parameters()
    assert bool((proj.bias == 8).all())


def test_softplus_channel_gates_are_those_of_kimi_delta_attention():
    gate, made = gate_of("gla", gate="channel_softplus")
    step = F.softplus(rows(2, T) @ gate.channel_down.weight.T @ gate.channel_up.weight.T + gate.channel_bias)
    same(made.log_diag, -gate.log_a.exp()[:, None] * step.unflatten(-1, (H, K)))
    gate.reset_parameters()
    assert gate.channel_down.weight.shape == (K, D)
    assert bool(((gate.log_a >= 0) & (gate.log_a <= math.log(16))).all())
    first = F.softplus(gate.channel_bias)
    assert bool(((first >= 0.001 * (1 - 1e-4)) & (first <= 0.1 * (1 + 1e-4))).all())
    many = SoftplusDiagonal(Sizes(D, 64, 64, 8))
    assert many.log_a.exp().min() < 4 < 13 < many.log_a.exp().max()
    assert F.softplus(many.channel_bias).min() < 0.002 < 0.05 < F.softplus(many.channel_bias).max()


def test_phases_of_angles_from_the_input_are_as_exact_late_as_early():
    """Angles are float32, and their sums float64: against the same angles in a float64 layer."""
    torch.manual_seed(0)
    attn = build_attention("fox_rope", hidden_size=D, num_heads=2, theta=1.0)
    made = attn.project(torch.randn(1, 4096, D)).gate
    exact = made.angle.detach().double()
    assert float(exact.abs().sum(1).max()) > 100  # many turns
    q, k, v = (torch.randn(1, 4096, 2, 12) for _ in range(3))
    run = attn.variant.forms["parallel"]
    with torch.no_grad():
        got = run(q, k, v, made)
        expected = run(q.double(), k.double(), v.double(), made.map(torch.Tensor.double))
    errors = (got - expected).abs().amax((0, 2, 3))
    assert float(errors[-512:].max()) < 4 * float(errors[:512].max()) < 1e-4


@pytest.mark.parametrize(
    ("projection", "options", "sizes", "message"),
    [
        (SelectiveAngles, {"theta": 0.5}, SIZES, "theta: expected a base of at least 1"),
        (SelectiveAngles, {"angle_rank": 0}, SIZES, "angle_rank: expected at least 1, got 0"),
        (SelectiveAngles, {"angle_conv_size": -1}, SIZES, "angle_conv_size: expected a number of tokens >= 0, got -1"),
        (SelectiveAngles, {}, Sizes(30, 4, 4, 8), "hidden_size: expected a multiple of num_heads = 4 .*, got 30"),
        (SelectiveAngles, {}, Sizes(32, 4, 4, 7), r"head_dim .*: expected an even number"),
        (Mamba3Decay, {"a_min": 0.0}, SIZES, "a_min: expected a positive number, got 0.0"),
        (Mamba3Decay, {"dt_min": 1.0}, SIZES, "dt_min, dt_max: expected 0 < dt_min <= dt_max, got 1.0 and 0.1"),
        (Mamba3Decay, {"rotated_share": 0.1}, SIZES, "rotated_share: expected two or more of .* head_dim = 8, got 0.1"),
        (Mamba3Decay, {"rotated_share": 1.5}, SIZES, "rotated_share: expected two or more of .* head_dim = 8, got 1.5"),
        (SoftplusDiagonal, {"channel_rank": 0}, SIZES, "channel_rank: expected at least 1, got 0"),
    ],
)
def test_bad_options_are_refused(projection, options, sizes, message):
    with pytest.raises(ValueError, match=message):
        projection(sizes, **options)


def test_an_option_that_two_projections_take_is_refused():
    with pytest.raises(ValueError, match="gate_bias: expected an option of one gate .*LowRankDiagonal and ForgetGate"):
        build_attention("gated_wall", hidden_size=D, num_heads=H, gate=("low_rank", "forget"), gate_bias=1.0)


def test_fixed_angles_are_an_option_of_fox_with_rope():
    attn = build_attention("fox_rope", hidden_size=D, num_heads=H, gate=("rotary", "forget"))
    assert attn.project(torch.randn(1, 3, D)).gate.angle.ndim == 1


@pytest.mark.parametrize("value", [0.1, torch.nan])
def test_constant_decays_that_would_grow_are_refused_where_they_are_loaded(value):
    attn = build_attention("retnet", hidden_size=16, num_heads=2)
    state = {**attn.state_dict(), "gate.log_gamma": torch.tensor([-0.1, value])}
    with pytest.raises(ValueError, match=r"^gate\.log_gamma: expected log decays of 0 or below, got \[-0\.1"):
        attn.load_state_dict(state)
