"""The language model: initialisation, loss, causality, and that cached, packed and padded calls give the plain one."""

import copy
import functools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from attnzoo.config import ModelConfig, OptimizerConfig
from attnzoo.errors import NotFiniteError
from attnzoo.layer.weight_decay import spared
from attnzoo.models import LanguageModel
from attnzoo.precision import GateAffine, PreciseModule
from attnzoo.training.optimizer import build_optimizer

HYBRID = ["mamba2", "fox"]


def build(attention="fox", **options):
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 40}
    torch.manual_seed(0)
    return LanguageModel(ModelConfig(attention=attention, **{**sizes, **options}))


@pytest.fixture
def tokens():
    return torch.randint(0, 40, (2, 13), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=["fox", HYBRID], ids=["fox", "hybrid"])
def model(request):
    return build(request.param).double().eval()


def test_linear_and_embedding_weights_are_normal_with_the_given_deviation():
    model = build(hidden_size=128, initializer_range=0.05)
    checked = 0
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding) and not isinstance(module, PreciseModule):
            tolerance = 0.05 * 5 / (2 * module.weight.numel()) ** 0.5
            assert abs(module.weight.std().item() - 0.05) < tolerance
            checked += 1
    assert checked >= 2 + 2 * 3  # embedding and head; three of the MLP in each layer, and what the attention has


class Own(GateAffine):
    """A map whose weight, too, starts where it wants to."""

    def __init__(self):
        super().__init__(32, 2)
        self._least["weight"] = torch.float32


class Biased(nn.Module):
    """An attention whose gate starts where it wants to."""

    def __init__(self):
        super().__init__()
        self.plain = nn.Linear(32, 32)
        self.gate = Own()
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.constant_(self.gate.weight, 0.25)
        nn.init.constant_(self.gate.bias, 4.0)

    def forward(self, x, cu_seqlens=None, attention_mask=None, cache=None):
        return self.plain(x) * self.gate(x).mean(-1, keepdim=True)


def test_what_is_kept_precise_has_its_own_initialisation(monkeypatch):
    monkeypatch.setattr("attnzoo.models.block.build_attention", lambda name, **options: Biased())
    for model in (build(), copy.deepcopy(build())):
        model.reset_parameters()
        attention = model.blocks[0].attention
        assert (attention.gate.weight == 0.25).all()
        assert (attention.gate.bias == 4.0).all()
        assert (attention.plain.bias == 0).all()
        assert 0.015 < attention.plain.weight.std() < 0.025


class Kept(PreciseModule):
    """An attention with a matrix that is never rounded, and a number of its own."""

    def __init__(self):
        super().__init__()
        self.plain = nn.Linear(32, 32)
        self.keep("table", torch.zeros(2, 2), trainable=True)
        self.number = nn.Parameter(torch.zeros(3))
        self.gate = nn.Identity()

    def reset_parameters(self):
        pass


def test_weight_decay_spares_norms_biases_and_what_is_kept_precise(monkeypatch):
    monkeypatch.setattr("attnzoo.models.block.build_attention", lambda name, **options: Kept())
    model = build(num_layers=1)
    assert spared(model) == {
        "blocks.0.attention_norm.weight",
        "blocks.0.attention.plain.bias",
        "blocks.0.attention.table",
        "blocks.0.attention.number",
        "blocks.0.mlp_norm.weight",
        "norm.weight",
    }
    groups = build_optimizer(model, OptimizerConfig()).param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(6, 0.1), (6, 0.0)]
    assert groups[0]["betas"] == (0.9, 0.95)


def test_what_weight_decay_spares_outlasts_copies_loading_and_flattening():
    model = build([{"name": "fox", "options": {"block": "pro", "sinks": True}}, "mamba2"])
    expected = spared(model)
    assert {"blocks.0.attention.q_norm.weight", "blocks.0.attention.sinks"} < expected
    assert {"blocks.1.attention.q_conv.weight", "embedding.weight"}.isdisjoint(expected)
    with torch.device("meta"):
        empty = LanguageModel(model.config)
    loaded = LanguageModel(model.config)
    loaded.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)
    flat = copy.deepcopy(model)
    for module in flat.modules():  # as a sharded view of each parameter is
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter.data = parameter.data.flatten()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded, empty.to_empty(device="cpu"), flat):
        assert spared(other) == expected
        groups = build_optimizer(other, OptimizerConfig()).param_groups
        assert sum(p.numel() for p in groups[1]["params"]) == sum(
            p.numel() for name, p in model.named_parameters() if name in expected
        )


def test_a_pattern_gives_each_layer_its_variant_and_options(monkeypatch):
    built = []

    def record(name, **options):
        built.append((name, options))
        return Biased()

    monkeypatch.setattr("attnzoo.models.block.build_attention", record)
    build([{"name": "gla", "repeat": 2}, {"name": "fox", "options": {"acp": True, "num_heads": 4}}], num_layers=3)
    plain = {"hidden_size": 32, "num_heads": 2}
    assert built == [("gla", plain), ("gla", plain), ("fox", {"hidden_size": 32, "num_heads": 4, "acp": True})]


def test_layers_of_a_hybrid_differ():
    first, second = build(HYBRID).blocks
    assert {n for n, _ in first.named_parameters()} != {n for n, _ in second.named_parameters()}


def test_an_unknown_variant_or_option_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'fox'"):
        build("foxx")
    with pytest.raises(ValueError, match="did you mean 'acp'"):
        build({"name": "fox", "options": {"apc": True}})


def test_loss_is_the_cross_entropy_of_the_targets_that_count(model, tokens):
    targets = tokens.roll(-1, dims=1)
    targets[0, 3:9] = -100
    output = model(tokens, targets=targets)
    counted = targets != -100
    expected = F.cross_entropy(output.logits[counted], targets[counted])  # as exact as the model
    assert output.logits.shape == (2, 13, 40)
    torch.testing.assert_close(output.loss, expected)
    torch.testing.assert_close(model(tokens, targets=targets, with_logits=False).loss, expected)
    assert model(tokens).loss is None
    torch.testing.assert_close(model(tokens).logits, output.logits)


def test_an_untrained_model_is_about_as_good_as_a_guess(tokens):
    targets = torch.randint(0, 40, tokens.shape)
    assert abs(build()(tokens, targets=targets).loss.item() - torch.tensor(40.0).log().item()) < 0.1


def test_later_tokens_change_no_earlier_logits(model, tokens):
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 40
    before, after = model(tokens).logits, model(changed).logits
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-12)
    assert (before[:, 7:] - after[:, 7:]).abs().amax(-1).min() > 1e-6


@pytest.mark.parametrize("pieces", [[13], [1] * 13, [5, 1, 1, 6], [1, 12]])
def test_a_sequence_in_pieces_gives_what_the_whole_gives(model, tokens, pieces):
    cache = model.new_cache()
    logits = torch.cat([model(piece, cache=cache).logits for piece in tokens.split(pieces, dim=1)], dim=1)
    torch.testing.assert_close(logits, model(tokens).logits, rtol=1e-9, atol=1e-10)


def test_packed_sequences_do_not_see_each_other(model, tokens):
    packed = torch.cat([tokens[0, :5], tokens[1]])[None]
    bounds = torch.tensor([0, 5, 18], dtype=torch.int32)
    logits = model(packed, cu_seqlens=bounds).logits[0]
    torch.testing.assert_close(logits[:5], model(tokens[:1, :5]).logits[0], rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(logits[5:], model(tokens[1:]).logits[0], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(model, tokens, side):
    width = (4, 0) if side == "left" else (0, 4)
    padded, mask = F.pad(tokens, width, value=7), F.pad(torch.ones_like(tokens), width)
    logits = model(padded, attention_mask=mask).logits
    logits = logits[:, 4:] if side == "left" else logits[:, :-4]
    torch.testing.assert_close(logits, model(tokens).logits, rtol=1e-9, atol=1e-10)


def test_greedy_generation_takes_the_likeliest_token_of_the_uncached_model(model, tokens):
    generated = model.generate(tokens[:, :4], 6, temperature=0)
    expected = tokens[:, :4]
    for _ in range(6):
        expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], dim=1)
    assert generated.tolist() == expected.tolist()


def test_sampling_repeats_with_its_generator_and_keeps_to_the_top_k(tokens):
    model = build().train()
    frozen = next(part for part in model.modules() if isinstance(part, torch.nn.Linear)).eval()
    first, second = (
        model.generate(tokens, 8, temperature=2.0, generator=torch.Generator().manual_seed(3)) for _ in range(2)
    )
    assert first.tolist() == second.tolist()
    assert all(part.training == (part is not frozen) for part in model.modules())
    greedy = model.generate(tokens, 8, temperature=0)
    assert model.generate(tokens, 8, top_k=1).tolist() == greedy.tolist()
    assert model.generate(tokens, 8, top_k=40).tolist() != greedy.tolist()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_prompts_after_which_no_logit_is_finite_are_named(value, tokens):
    model, tokens = build(), tokens.clone()
    tokens[:, 0], tokens[1, 0] = 5, 6
    tokens[:, 1:] = tokens[:, 1:].where(tokens[:, 1:] != 6, 5)
    with torch.no_grad():
        model.embedding.weight[6] = value
    for settings in ({"temperature": 0}, {}, {"top_k": 3}):
        with pytest.raises(NotFiniteError, match="^logits: expected finite numbers after the prompt, .* sequence 1: "):
            model.generate(tokens, 3, **settings)
    assert model.generate(tokens, 0).shape == tokens.shape


def test_tied_embeddings_are_one_parameter():
    tied, untied = build(tie_embeddings=True), build()
    assert tied.head.weight is tied.embedding.weight
    assert sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters()) == 40 * 32
    assert 0.015 < tied.head.weight.std() < 0.025


@pytest.mark.parametrize("attention", ["fox", HYBRID], ids=str)
def test_every_parameter_learns(attention, tokens):
    model = build(attention)
    model(tokens, targets=tokens.roll(-1, dims=1)).loss.backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert without == []


def test_activation_checkpointing_changes_nothing(model, tokens):
    wanted, results = list(model.parameters()), []
    for _ in range(2):
        loss = model(tokens, targets=tokens).loss
        results.append([loss, *torch.autograd.grad(loss, wanted)])
        for block in model.blocks:  # the second time
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("attention", ["fox", "linear_attention"])
def test_blocks_that_are_computed_again_have_the_same_gradients_beside_a_cache(attention, tokens):
    model = build(attention)
    wanted, results = list(model.parameters()), []
    for model.recompute in (False, True):
        cache = model.new_cache()
        with torch.no_grad():
            model(tokens[:, :6], cache=cache)
        loss = model(tokens[:, 6:], targets=tokens[:, 6:], cache=cache).loss
        results.append(torch.autograd.grad(loss, wanted))
        assert {layer.tokens for layer in cache} == {13}
    for kept, again in zip(*results, strict=True):
        torch.testing.assert_close(again, kept)


def test_options_of_every_layer_reach_it(tokens):
    model = build(attention_options={"window": 4, "sinks": True, "softcap": 50.0})
    assert all(block.attention.core_options["softcap"] == 50 for block in model.blocks)
    assert [block.attention.config.window for block in model.blocks] == [4, 4]
    assert all(block.attention.sinks is not None for block in model.blocks)
    assert (model(tokens).logits - build()(tokens).logits).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m, x: m(x[0]), ValueError, r"input_ids: expected shape \[B, T\] .*, got \[13\]"),
        (lambda m, x: m(x.float()), ValueError, "input_ids: expected int64 or int32 tokens, got torch.float32"),
        (lambda m, x: m(x.tolist()), TypeError, r"input_ids: expected integers \[B, T\], got list"),
        (lambda m, x: m(x + 40), ValueError, "input_ids: expected tokens from 0 to 39, got"),
        (lambda m, x: m(x - 100), ValueError, "input_ids: expected tokens from 0 to 39, got -"),
        (lambda m, x: m(x[:, :0]), ValueError, "input_ids: expected .* at least one token"),
        (lambda m, x: m(x, targets=x[:, 1:]), ValueError, r"targets: expected shape \[2, 13\], got \[2, 12\]"),
        (lambda m, x: m(x, targets=x.tolist()), TypeError, "targets: expected integers"),
        (lambda m, x: m(x, targets=x + 40), ValueError, "targets: expected tokens from 0 to 39"),
        (lambda m, x: m(x, targets=0 * x - 100), ValueError, "targets: expected at least one that counts"),
        (lambda m, x: m(x[:0], targets=x[:0]), ValueError, "targets: expected at least one that counts"),
        (lambda m, x: m(x, cache=m.new_cache()[:1]), ValueError, "cache: expected 2 layers.*got 1"),
        (lambda m, x: m(x, attention_mask=[1]), TypeError, "attention_mask: expected a tensor"),
        (lambda m, x: m.generate(x[:, :0], 3), ValueError, "input_ids: expected .* at least one token"),
        (lambda m, x: m.generate(x + 40, 0), ValueError, "input_ids: expected tokens from 0 to 39"),
        (lambda m, x: m.generate(x, 3.0), ValueError, "max_new_tokens: expected a whole number .*, got 3.0"),
        (lambda m, x: m.generate(x, -1), ValueError, "max_new_tokens: expected at least 0, got -1"),
        (lambda m, x: m.generate(x, 3, temperature=-1), ValueError, "temperature: expected at least 0, got -1"),
        (lambda m, x: m.generate(x, 3, temperature=1e-45), ValueError, "temperature: expected a number that float32"),
        (lambda m, x: m.generate(x, 3, temperature=float("nan")), ValueError, "temperature: expected a number"),
        (lambda m, x: m.generate(x, 3, temperature=None), ValueError, "temperature: expected a number"),
        (lambda m, x: m.generate(x, 3, top_k=0), ValueError, "top_k: expected 1 to vocab_size = 40, got 0"),
        (lambda m, x: m.generate(x, 3, top_k=41), ValueError, "top_k: expected 1 to vocab_size = 40, got 41"),
        (lambda m, x: m.generate(x, 3, top_k=1.5), ValueError, "top_k: expected a whole number .*, got 1.5"),
        (lambda m, x: m.generate(x, 3, generator=7), TypeError, "generator: expected torch.Generator or None, got int"),
        (lambda m, x: m.generate(x, 3, top_p=0.5), TypeError, "unexpected keyword argument 'top_p'"),
    ],
)
def test_wrong_calls_are_refused(tokens, call, error, message):
    with pytest.raises(error, match=message):
        call(build(), tokens)


def test_a_tiny_temperature_takes_the_likeliest_token(tokens):
    model = build()
    greedy = model.generate(tokens, 8, temperature=0)
    assert torch.equal(model.generate(tokens, 8, temperature=2e-38), greedy)


def test_tokens_are_not_read_where_checks_are_off(tokens, monkeypatch):
    monkeypatch.setenv("ATTNZOO_VALIDATE", "0")
    with pytest.raises(IndexError):
        build()(tokens + 40)
