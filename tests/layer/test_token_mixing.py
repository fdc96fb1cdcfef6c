"""RWKV's parts of a layer in any variant: mixed tokens, shared values, the bonus and a low-rank output gate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnzoo import build_attention, param_groups
from attnzoo.layer.attention import Attention
from attnzoo.layer.config import AttentionConfig
from attnzoo.models import LanguageModel
from attnzoo.models.config import ModelConfig
from attnzoo.models.hf import AttnzooForCausalLM

PARTS = {
    "token_mix": True, "bonus": True, "output_norm": "group", "output_norm_bias": True, "output_gate": "lora",
    "output_gate_rank": 3,
}  # fmt: skip


def layer(name: str, **options: Any) -> Attention:
    torch.manual_seed(0)
    attn = build_attention(name, hidden_size=12, num_heads=2, **options).double()
    with torch.no_grad():
        for parameter in attn.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return attn


def test_each_projection_reads_its_own_mixture_and_the_bonus_comes_behind_the_norm() -> None:
    attn, x = layer("nope", **PARTS), torch.randn(2, 5, 12).double()
    before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    assert attn.token_mix is not None
    of_q, of_k, of_v, of_gate = (x + m * (before - x) for m in attn.token_mix.weight)
    q, k, v = (p(y).unflatten(-1, (2, 6)) for p, y in ((attn.q_proj, of_q), (attn.k_proj, of_k), (attn.v_proj, of_v)))
    o = attn.variant.forms["parallel"](q, k, v, attn.gate(x, k, None)[0])
    o = (o - o.mean(-1, keepdim=True)) / (o.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()
    o = o * attn.output_norm.weight + attn.output_norm.bias
    o = o + (q * k * attn.bonus).sum(-1, keepdim=True) * v
    down, _, up = attn.output_gate
    expected = attn.o_proj(o.flatten(2) * up(down(of_gate).sigmoid()))
    torch.testing.assert_close(attn(x), expected)


@pytest.mark.parametrize("name", ["fox", "path_fox", "gated_deltanet", "gla", "rwkv7_path"])
def test_padding_and_steps_change_nothing_with_these_parts(name: str) -> None:
    attn, x = layer(name, **PARTS), torch.randn(2, 7, 12).double()
    whole = attn(x)
    cache = attn.new_cache()
    torch.testing.assert_close(torch.cat([attn(part, cache=cache) for part in x.split([4, 1, 2], 1)], 1), whole)
    mask = torch.arange(9)[None].expand(2, 9) >= 2
    padded = attn(torch.cat([torch.ones_like(x[:, :2]), x], 1), attention_mask=mask)
    torch.testing.assert_close(padded[:, 2:], whole)
    packed = attn(x.reshape(1, 14, 12), cu_seqlens=torch.tensor([0, 7, 14]))
    torch.testing.assert_close(packed[0], whole.flatten(0, 1))


def model(**options: Any) -> LanguageModel:
    torch.manual_seed(0)
    layers = ["fox", {"name": "gla", "options": {"value_residual": 3, "head_dim": 8}}]
    sizes = {"attention": layers, "hidden_size": 16, "num_heads": 2, "vocab_size": 30, "num_layers": 2}
    return LanguageModel(ModelConfig(**{**sizes, **options}))


def test_later_layers_mix_their_values_with_the_first_ones_of_any_variant() -> None:
    ours, tokens = model(), torch.randint(30, (1, 6))
    first = ours(tokens).logits
    with torch.no_grad():
        ours.blocks[0].attention.v_proj.weight.add_(0.1)
    assert not torch.equal(ours(tokens).logits, first)
    with pytest.raises(ValueError, match=r"first: expected the first layer's values \[1, 6, 16\] .*, got none"):
        ours.blocks[1].attention(torch.randn(1, 6, 16))


@pytest.mark.parametrize(("options", "width"), [({"value_dim": 4}, 8), ({"num_kv_heads": 1}, 8)])
def test_values_of_another_width_than_the_first_ones_are_refused_where_a_model_is_built(options, width) -> None:
    narrow = {"name": "fox", "options": options}
    wide = {"name": "gla", "options": {"value_residual": 3, "head_dim": 8}}
    said = rf"value_residual of layer 1 \(gla\): expected .* the first layer's, {width} channels, got 16"
    with pytest.raises(ValueError, match=said):
        model(attention=[narrow, wide])
    assert not model(attention=[wide, narrow]).share_values  # the narrow one does not mix


def test_the_first_layer_of_a_model_has_no_values_to_mix_with() -> None:
    ours = model(attention="gla", attention_options={"value_residual": 3, "head_dim": 8})
    assert [block.attention.config.value_residual for block in ours.blocks] == [None, 3]


def test_mixtures_begin_as_published_and_have_no_weight_decay() -> None:
    ours = model(mlp_mix=True)
    decayed = {id(parameter) for parameter in param_groups(ours, 0.1)[0]["params"]}
    for block in ours.blocks:
        with torch.no_grad():
            block.mlp_mix.weight.zero_()
        assert id(block.mlp_mix.weight) not in decayed
    ours.reset_parameters()
    for block in ours.blocks:
        torch.testing.assert_close(block.mlp_mix.weight, 1 - torch.arange(16.0)[None] / 16)


def test_checkpoints_that_would_lose_the_gradient_of_shared_values_are_refused() -> None:
    theirs, tokens = AttnzooForCausalLM.of(model()).train(), torch.randint(30, (1, 6))
    theirs(tokens, labels=tokens).loss.backward()
    expected = theirs.model.blocks[0].attention.v_proj.weight.grad.clone()
    theirs.zero_grad()
    theirs.gradient_checkpointing_enable({"use_reentrant": False})
    theirs(tokens, labels=tokens).loss.backward()
    torch.testing.assert_close(theirs.model.blocks[0].attention.v_proj.weight.grad, expected)
    theirs.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="gradient_checkpointing_kwargs: expected {'use_reentrant': False}"):
        theirs(tokens, labels=tokens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_gate_rank": 3}, "output_gate_rank: expected None without output_gate"),
        ({"output_gate_rank": 3, "output_gate": "swish"}, "output_gate_rank: expected None without output_gate='lora'"),
        (
            {"output_gate": "lora", "output_gate_low_rank": True},
            "output_gate_low_rank: expected False with output_gate='lora'",
        ),
        ({"output_norm_bias": True}, "output_norm_bias: expected False without output_norm, got True"),
        ({"token_mix": True, "kv_rank": 4}, "kv_rank: expected None with token_mix .*, got 4"),
        ({"value_residual": 0}, "value_residual: expected a positive integer, got 0"),
    ],
)
def test_parts_that_do_not_go_together_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionConfig(**options)


@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("name", ["linear_attention", "nope", "mamba2"])
def test_a_first_token_that_is_shifted_almost_whole_is_the_same_in_16_bits(name: str, part: str) -> None:
    """Of its key and value, mixed with the zeros before it, norms make whole ones, however little is left of them. With
    a rounded to 1 nothing was: compiled inference on a GPU, which does not round it, gave other outputs than
    training."""
    torch.manual_seed(0)
    attn = build_attention(name, hidden_size=64, num_heads=2, block="pro").requires_grad_(False)
    x = torch.randn(1, 6, 64).bfloat16()
    shift = attn.get_submodule(f"{part}_shift.proj")
    attn.get_parameter(f"{part}_proj.weight").mul_(40)
    attn.get_parameter(f"{part}_shift.proj.weight").copy_(7 * x[:, 0].float() / x[:, 0].float().square().sum())
    assert (shift(x.float())[0, 0].sigmoid().bfloat16() == 1).all()  # 0.9991
    expected = attn(x.float())
    got = attn.to(torch.bfloat16)(x).float()
    assert (got - expected).abs().amax() < 0.05 * expected.abs().amax()
