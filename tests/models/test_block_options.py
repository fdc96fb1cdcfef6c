"""Options of a decoder's blocks: norms before and behind, LayerNorm, other MLPs, learned positions, scales and caps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from attnzoo.config import ModelConfig, load_config
from attnzoo.models import LanguageModel
from attnzoo.models.generation.engine import Generator
from attnzoo.models.hf import AttnzooForCausalLM

SIZES = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 40, "initializer_range": 0.2}
ALL = {
    "attention": [{"name": "nope", "norm": "both"}, {"name": "fox", "norm": "after"}], "norm_kind": "layer",
    "mlp_activation": "gelu_tanh", "mlp_bias": True, "embedding_scale": 4.0, "learned_positions": 24,
    "logit_softcap": 2.0, "mlp_mix": True, "embedding_norm": True,
}  # fmt: skip


def build(**options):
    torch.manual_seed(0)
    return LanguageModel(ModelConfig(**{**SIZES, **options})).double().eval()


@pytest.fixture(scope="module")
def model():
    return build(**ALL)


@pytest.fixture
def tokens():
    return torch.randint(0, 40, (2, 11), generator=torch.Generator().manual_seed(1))


def test_a_block_is_what_its_options_say():
    model = build(attention={"name": "nope", "norm": "both"}, norm_kind="layer", mlp_gated=False, mlp_activation="gelu")
    block, x = model.blocks[0], torch.randn(1, 5, 16).double()
    y = x + block.attention_after(block.attention(block.attention_norm(x)))
    mlp = block.mlp.down(F.gelu(block.mlp.up(block.mlp_norm(y))))
    assert torch.equal(block(x), y + block.mlp_after(mlp))
    assert isinstance(block.mlp_after, nn.LayerNorm)
    assert block.mlp.gate is block.mlp.up.bias is None


def test_logits_are_those_of_the_scaled_and_placed_embeddings_capped(model, tokens):
    x = model.embedding_norm(4 * model.embedding(tokens) + model.positions.weight[:11])
    for block in model.blocks:
        x = block(x)
    logits = 2 * (model.head(model.norm(x)) / 2).tanh()
    assert torch.equal(model(tokens).logits, logits)
    assert torch.equal(model.hidden(embedded=model.embedding(tokens)), model.norm(x))
    targets = tokens.roll(-1, 1)
    alone = model(tokens, targets=targets, with_logits=False).loss
    assert torch.allclose(alone, F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    torch.testing.assert_close(model(tokens, targets=targets).loss, alone)


def test_positions_are_those_of_each_sequence(model, tokens):
    whole = model(tokens).logits
    borders = torch.tensor([0, 11, 22])
    assert torch.allclose(model(tokens.reshape(1, 22), cu_seqlens=borders).logits[0], whole.flatten(0, 1))
    padded, mask = F.pad(tokens, (3, 2)), F.pad(torch.ones_like(tokens), (3, 2))
    assert torch.allclose(model(padded, attention_mask=mask).logits[:, 3:-2], whole)
    cache = model.new_cache()
    steps = [model(part, cache=cache).logits for part in tokens.split([4, 1, 6], 1)]
    assert torch.allclose(torch.cat(steps, 1), whole)
    packed = model.new_cache()
    model(tokens[:, :5].reshape(1, 10), cu_seqlens=torch.tensor([0, 5, 10]), cache=packed)
    assert torch.allclose(model(tokens[:, 5:], cache=packed).logits, whole[:, 5:])


def test_the_engine_and_transformers_go_on_as_the_model_does(model, tokens):
    expected = model.generate(tokens, 8, temperature=0)
    generator = Generator(model, 2, 19, check_every=3)
    numbers = [generator.add(row, 8, temperature=0) for row in tokens]
    found = generator.run()
    assert [found[number] for number in numbers] == expected[:, 11:].tolist()
    theirs = AttnzooForCausalLM.of(model)
    padded, mask = F.pad(tokens, (2, 0)), F.pad(torch.ones_like(tokens), (2, 0))
    given = theirs.generate(
        padded, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0, engine=False
    )
    assert torch.equal(given[:, 2:], expected)
    with pytest.raises(ValueError, match="position_ids: expected positions from 0, which are learned, got"):
        theirs(tokens, position_ids=torch.arange(2, 13)[None])


def test_a_text_longer_than_the_learned_positions_is_refused(model, tokens):
    with pytest.raises(ValueError, match=r"input_ids: expected at most 24 tokens \(learned_positions\), got 33"):
        model(tokens.repeat(1, 3))
    with pytest.raises(ValueError, match=r"max_tokens: expected at most 24 \(learned_positions\), got 25"):
        Generator(model, 1, 25)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm_kind": "batch"}, "unknown norm_kind 'batch'"),
        ({"mlp_activation": "gelu_new"}, "unknown mlp_activation 'gelu_new'"),
        ({"embedding_scale": 0.0}, "embedding_scale: expected"),
        ({"logit_softcap": -1.0}, "logit_softcap: expected"),
        ({"learned_positions": 0}, "learned_positions: expected at least 1, got 0"),
        ({"attention": {"name": "nope", "norm": "around"}}, "unknown norm 'around' of nope"),
        ({"norm": "aftr"}, "did you mean 'after'"),
        ({"norm": ["before", "aftr"]}, "did you mean 'after'"),
        ({"norm": ["before"] * 3}, "norm: a pattern of 3 does not fill num_layers"),
        ({"norm": []}, r"norm: expected one of before, after, both, or a list of them, got \[\]"),
    ],
)
def test_options_that_say_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**SIZES, **options)


def test_another_variant_keeps_where_the_model_has_its_norms():
    config = ModelConfig(["rope", {"name": "nope", "norm": "before"}], norm="after")
    assert [layer.norm for layer in config.layers()] == ["after", "before"] * 2
    assert {layer.norm for layer in replace(config, attention="fox").layers()} == {"after"}
    mixed = ModelConfig(["rope", "nope"], norm=["before", "after"])
    for swapped in (mixed, replace(mixed, attention="fox"), replace(mixed, attention=["gla", "fox", "gla", "fox"])):
        assert [layer.norm for layer in swapped.layers()] == ["before", "after"] * 2
    assert load_config(None, ["model.norm=[before,after]", "model.attention=fox"]).model.layers()[1].norm == "after"
