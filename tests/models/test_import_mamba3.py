"""Mamba-3's mapping against the layer of flash-linear-attention 0.6 written out (layers/mamba3.py; its operation as
mamba_ssm's tests/ops/triton/test_mamba3_siso.py defines it, token by token), which needs a GPU and mamba_ssm to run."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from attnzoo.models.peers import Weights, build_peer, peer_of

D, H, V, K, VOCAB = 12, 4, 6, 8, 30
FIELDS = {
    "model_type": "mamba3", "hidden_size": D, "num_hidden_layers": 2, "vocab_size": VOCAB, "state_size": K,
    "head_dim": V, "expand": 2, "num_heads": H, "n_groups": 2, "norm_eps": 1e-5, "rope_fraction": 0.5,
    "A_floor": 1e-4, "is_outproj_norm": False, "is_mimo": False, "mimo_rank": 4, "use_bias": False,
    "hidden_act": "silu", "residual_in_fp32": True, "dt_min": 0.001, "dt_max": 0.1, "chunk_size": 64,
}  # fmt: skip


def random_weights(fields):
    G, pairs = fields["n_groups"], int(K * fields["rope_fraction"]) // 2
    shapes = {"backbone.embeddings.weight": (VOCAB, D), "backbone.norm_f.weight": (D,), "lm_head.weight": (VOCAB, D)}
    for i in range(2):
        mixer = {
            "in_proj.weight": (2 * H * V + 2 * G * K + 3 * H + pairs, D), "out_proj.weight": (D, H * V),
            "dt_bias": (H,), "D": (H,), "B_bias": (H, 1, K), "C_bias": (H, 1, K), "B_norm.weight": (K,),
            "C_norm.weight": (K,),
        }  # fmt: skip
        mixer |= {"norm.weight": (H * V,)} if fields["is_outproj_norm"] else {}
        shapes |= {f"backbone.layers.{i}.mixer.{name}": shape for name, shape in mixer.items()}
        shapes[f"backbone.layers.{i}.norm.weight"] = (D,)
    draws = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=draws, dtype=torch.float64) * 0.7 for name, shape in shapes.items()}


def turned(x, phase):
    """The first channels of x ``[..., K]`` in pairs of neighbours, by the phases ``[..., pairs]``."""
    phase = F.pad(phase, (0, K // 2 - phase.shape[-1]))
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * phase.cos() - b * phase.sin(), a * phase.sin() + b * phase.cos()], -1).flatten(-2)


def mixed(x, weights, fields):
    """A layer's output of x ``[T, D]``."""
    G, eps = fields["n_groups"], fields["norm_eps"]
    sizes = [H * V, H * V, G * K, G * K, H, H, H]
    z, v, B, C, dt, a, trap, angles = (x @ weights["in_proj.weight"].T).tensor_split(torch.tensor(sizes).cumsum(0), 1)
    dt = F.softplus(dt + weights["dt_bias"])
    decay = (-F.softplus(a).clamp(min=fields["A_floor"]) * dt).exp()
    own = trap.sigmoid()
    k, q = (
        F.rms_norm(one.unflatten(1, (G, K)), (K,), weights[f"{name}_norm.weight"], eps).repeat_interleave(H // G, 1)
        + weights[f"{name}_bias"][:, 0]
        for name, one in (("B", B), ("C", C))
    )
    phase = (math.pi * angles.tanh()[:, None] * dt[..., None]).cumsum(0)
    q, k, v = turned(q, phase), turned(k, phase), v.unflatten(1, (H, V))
    S, k_before, v_before, out = 0.0, torch.zeros(H, K).double(), torch.zeros(H, V).double(), []
    for t in range(len(x)):
        S = decay[t, :, None, None] * (S + ((1 - own) * dt)[t, :, None, None] * v_before[..., None] * k_before[:, None])
        S = S + (own * dt)[t, :, None, None] * v[t, ..., None] * k[t, :, None]
        out.append((S @ q[t, ..., None])[..., 0] + weights["D"][:, None] * v[t])
        k_before, v_before = k[t], v[t]
    o = torch.stack(out)
    if fields["is_outproj_norm"]:
        o = F.rms_norm(o, (V,), eps=eps) * weights["norm.weight"].view(H, V)
    return (o.flatten(1) * F.silu(z)) @ weights["out_proj.weight"].T


def logits(tokens, state, fields):
    x = state["backbone.embeddings.weight"][tokens]
    for i in range(2):
        prefix = f"backbone.layers.{i}."
        mine = {name.removeprefix(prefix + "mixer."): w for name, w in state.items() if name.startswith(prefix)}
        normed = F.rms_norm(x, (D,), state[f"{prefix}norm.weight"], fields["norm_eps"])
        x = x + mixed(normed, mine, fields)
    return F.rms_norm(x, (D,), state["backbone.norm_f.weight"], fields["norm_eps"]) @ state["lm_head.weight"].T


@pytest.mark.parametrize("more", [{}, {"is_outproj_norm": True, "rope_fraction": 1.0, "n_groups": 1}])
def test_logits_and_continuations_are_the_layers_written_out(more):
    fields = FIELDS | more
    state, tokens = random_weights(fields), torch.arange(2, 19) * 7 % VOCAB
    peer = peer_of(fields)
    ours = build_peer(peer, Weights.of_state(state))
    expected = logits(tokens, state, fields)
    torch.testing.assert_close(
        ours(tokens[None]).logits[0], expected, rtol=1e-6, atol=1e-6 * expected.abs().max().item()
    )
    for _ in range(6):
        tokens = torch.cat([tokens, logits(tokens, state, fields)[-1].argmax()[None]])
    assert torch.equal(ours.generate(tokens[None, :-6], 6, temperature=0)[0], tokens)
    assert [note[:8] for note in peer.notes] == ["Mamba-3:"]


def test_packed_padded_and_cut_texts_give_the_same():
    model = build_peer(peer_of(FIELDS), Weights.of_state(random_weights(FIELDS)))
    tokens = torch.arange(1, 25).view(2, 12)
    whole = model(tokens).logits
    packed = model(tokens.view(1, 24), cu_seqlens=torch.tensor([0, 12, 24])).logits
    torch.testing.assert_close(packed[0], whole.flatten(0, 1))
    mask = F.pad(torch.ones_like(tokens), (3, 1))
    torch.testing.assert_close(model(F.pad(tokens, (3, 1)), attention_mask=mask).logits[:, 3:-1], whole)
    cache = model.new_cache()
    parts = [model(part, cache=cache).logits for part in tokens.split([5, 1, 6], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_several_inputs_per_step_are_refused():
    with pytest.raises(ValueError, match="is_mimo: expected False .*'mamba3' loads"):
        peer_of({**FIELDS, "is_mimo": True})
