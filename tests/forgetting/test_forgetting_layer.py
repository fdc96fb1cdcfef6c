"""Layers that learn what to forget: causal, packed, precise, and trained by terms of their own."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from unittest import mock

import pytest
import torch
from layers import D, assert_same, layer, rows

import attnzoo.forgetting.panels as panels
import attnzoo.forgetting.student as forms
import attnzoo.forgetting.target as forgetting_goal
import attnzoo.layer.dispatch
from attnzoo import build_attention
from attnzoo.forgetting import rules as dense
from attnzoo.forgetting.network import ForgetNetwork
from attnzoo.forgetting.rules import Forgetting
from attnzoo.models import LanguageModel
from attnzoo.models.config import ModelConfig


@pytest.mark.parametrize("network", dense.NETWORKS)
def test_layer_is_causal_while_its_teacher_looks_ahead(network):
    attn = layer("rope", forgetting=Forgetting(network=network, window=2, temperature=3.0))
    x = rows(2, 17)
    later = torch.cat([x[:, :9], rows(2, 8, seed=5)], 1)
    with mock.patch.object(panels, "COLUMNS", 4):
        assert_same(attn(x)[:, :9], attn(later)[:, :9])
        seen = []
        for given in (x, later):
            projected = attn.project(given)
            q, k, v, gate = projected.q, projected.k, projected.v, projected.gate
            o, lse = attn.variant.forms["parallel"](q, k, v, gate, return_lse=True)
            logits, lse = panels.Logits(attn.variant.form_set, q, k, gate), lse.transpose(1, 2)
            goal = forgetting_goal.Goal.of(logits, v.transpose(1, 2), lse, o, attn.forget.options, 3.0)
            there = logits.exists(0, 4)
            seen.append(goal.panel(logits.panel(0, 4, there), there, 0, 4)[:, :, :9])
    assert (seen[0] - seen[1]).abs().max() > 1e-3


@pytest.mark.parametrize("network", dense.NETWORKS)
@pytest.mark.parametrize("name", ["rope", "path_fox"])
def test_packed_sequences_and_padding_are_separate_sequences(name, network):
    attn = layer(name, forgetting=Forgetting(network=network, window=2, temperature=3.0, blend=0.7))
    x = rows(2, 9)
    with mock.patch.object(panels, "COLUMNS", 4):
        alone = [attn(x[:1, :6]), attn(x[1:])]
        terms = [attn.forget.terms.distillation for _ in (attn(x[:1, :6]),)]
        packed = attn(torch.cat([x[:1, :6], x[1:]], 1), cu_seqlens=torch.tensor([0, 6, 15]))
        assert_same(packed, torch.cat(alone, 1))
        mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9])
        left = attn(torch.cat([torch.cat([rows(1, 3, seed=8), x[:1, :6]], 1), x[1:]]), attention_mask=mask)
        assert_same(left[:1, 3:], alone[0])
        right = attn(torch.cat([x[:1, :6], rows(1, 3, seed=8)], 1), attention_mask=mask[:1].flip(1))
        assert_same(right[:, :6], alone[0])
        assert torch.isclose(attn.forget.terms.distillation, terms[0])


@pytest.mark.covering
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("network", dense.NETWORKS)
@pytest.mark.parametrize("name", ["nope", "fox", "path"])
def test_padding_between_tokens_leaves_no_trace(name, network, training):
    attn = layer(name, forgetting=Forgetting(network=network, window=2, width=8, discount=0.9, temperature=3.0))
    attn.train(training)
    x, pad = rows(1, 14), rows(1, 14, seed=8)
    there = torch.tensor([1, 0, 1, 1, 0, 0, 0, 1, 1, 1, 1, 0, 1, 1]).bool()
    x = torch.where(there[:, None], x, pad)
    with mock.patch.object(panels, "COLUMNS", 4):
        alone = attn(x[:, there])
        terms = attn.forget.terms
        between = attn(x, attention_mask=there[None])
        assert_same(between[:, there], alone)
        if training:
            for term in ("distillation", "budget", "kept"):
                assert_same(getattr(attn.forget.terms, term), getattr(terms, term))
        else:
            cache = attn.new_cache()
            with torch.no_grad():
                first = attn(x[:, :9], attention_mask=there[None, :9], cache=cache)
                after = attn(x[:, 9:], attention_mask=there[None, 9:], cache=cache)
            assert_same(torch.cat([first, after], 1)[:, there], alone)


@pytest.mark.parametrize("network", dense.NETWORKS)
def test_the_losses_of_a_network_train_it_alone(network):
    attn = layer("fox", forgetting=Forgetting(network=network, window=2, temperature=3.0, learned_budget=True))
    y = attn(rows(1, 9))
    terms = attn.forget.terms
    (terms.distillation + terms.budget).backward(retain_graph=True)
    trained = {name for name, parameter in attn.named_parameters() if parameter.grad is not None}
    assert trained == {f"forget.{name}" for name, _ in attn.forget.named_parameters()}
    y.sum().backward()  # the loss of the task trains all
    assert all(parameter.grad is not None for parameter in attn.parameters())


@pytest.mark.parametrize("network", ["key", "decay"])
def test_retention_of_keys_falls_with_their_age(network):
    """Whatever the weights are: a network of keys alone needs no running minimum."""
    attn = layer("nope", forgetting=Forgetting(network=network))
    projected = attn.project(5 * rows(1, 30))
    forget = attn.forget
    retention = forget.join(forget.of_keys(projected.k, projected.v), forget.of_rows(projected.q))
    age = (torch.arange(30)[:, None] - torch.arange(30))[None, None]
    x = retention(forms.Panel(0, 30, age))
    assert (x.diff(dim=-2).masked_fill(age[..., 1:, :] <= 1, -1.0) < 0).all()
    if network == "decay":
        log_r = x.sigmoid()[0, 0, 6:, 5].log()
        assert torch.allclose(log_r / log_r[0], torch.arange(1.0, 25.0).double())
    else:
        lost = x[0, 0, 5, 5] - x[0, 0, 6:, 5]
        assert torch.allclose(lost / lost[0], torch.arange(2.0, 26.0).double().log2())


def saved_bytes(attn, T):
    """What a call in training keeps for its backward pass."""
    found = {}

    def note(x):
        found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        attn(torch.randn(1, T, D, dtype=torch.float64))
    return sum(found.values())


@pytest.mark.parametrize("network", ["key", "pair"])
@pytest.mark.parametrize("name", ["fox", "path"])
def test_memory_grows_with_the_tokens_not_with_their_square(name, network):
    attn = layer(name, forgetting=Forgetting(network=network, width=4))
    few, many = saved_bytes(attn, 256), saved_bytes(attn, 512)
    assert many < 2.2 * few


def test_layers_that_cannot_forget_say_why():
    forgetting = Forgetting()
    with pytest.raises(ValueError, match="'gla' is the linear side.*its dual 'wall' can forget"):
        build_attention("gla", hidden_size=D, num_heads=4, forgetting=forgetting)
    with pytest.raises(ValueError, match="impl: expected 'auto' or 'reference' with forgetting"):
        build_attention("fox", hidden_size=D, num_heads=4, forgetting=forgetting, impl="triton")
    with pytest.raises(TypeError, match=r"forgetting: expected attnzoo.Forgetting\(...\) or None, got True"):
        build_attention("fox", hidden_size=D, num_heads=4, forgetting=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"network": "keys"}, "did you mean 'key'"), ({"pool": "mean"}, "expected one of power, softmax, max"),
        ({"threshold": 1.0}, r"threshold: expected a number in \(0, 1\)"), ({"window": 0}, "at least 1"),
        ({"limit": 99.0}, r"limit: expected a number in \(0, 60\]"), ({"discount": 0.0}, "discount: expected"),
        ({"budget": 0.0}, "budget: expected"), ({"width": 2.5}, "width: expected a whole number"),
        ({"temperature": -1.0}, "temperature: expected a number above 0"), ({"memory": 1.0}, "memory: expected"),
        ({"memory": 0.5}, "memory: expected 0.9 with network='key'"),
        ({"blend": 1.5}, "blend: expected"), ({"divergence": "kl"}, "bernoulli"), ({"normalize": "sum"}, "mean"),
    ],
)  # fmt: skip
def test_options_out_of_range_are_named(options, said):
    with pytest.raises(ValueError, match=said):
        Forgetting(**options)


def test_a_hybrid_model_forgets_where_its_config_says():
    config = ModelConfig(
        attention=["mamba2", {"name": "fox", "options": {"forgetting": {"window": 4, "learned_budget": True}}}],
        hidden_size=32, num_layers=2, num_heads=2,
    )  # fmt: skip
    model = LanguageModel(config)
    assert [layer.forget is not None for layer in model.attentions()] == [False, True]
    bad = replace(config, attention={"name": "fox", "options": {"forgetting": {"windw": 4}}})
    with pytest.raises(ValueError, match="unknown option 'windw' of forgetting.*did you mean 'window'"):
        LanguageModel(bad)


def test_the_network_is_precise_and_initialised_anew():
    attn = build_attention("fox", hidden_size=D, num_heads=4, forgetting=Forgetting(network="pair"))
    assert isinstance(attn.forget, ForgetNetwork)
    half = attn.to(torch.bfloat16)
    assert {x.dtype for x in half.forget.parameters()} == {torch.float32}
    before = {name: x.clone() for name, x in half.forget.named_parameters()}
    half.reset_parameters()
    assert not torch.equal(before["key"], half.forget.key)
    assert torch.equal(before["bias"], half.forget.bias)
    assert half(torch.randn(1, 9, D, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_layer_can_be_copied_after_a_call_in_training():
    """As those do who average weights; the losses of the call stay with the layer that it was of."""
    attn = layer("fox", forgetting=Forgetting(window=2))
    y = attn(rows(1, 9))
    other = deepcopy(attn)
    assert other.forget.terms is None
    assert_same(other(rows(1, 9)), y)
    (attn.forget.terms.distillation + attn.forget.terms.budget).backward()
    assert attn.forget.key.grad is not None
    assert other.forget.key.grad is None


def test_the_teacher_is_a_form_that_gives_log_sum_exps(monkeypatch):
    """PyTorch's attention, which ``auto`` otherwise takes on a GPU in float64, gives none."""
    monkeypatch.setattr(attnzoo.layer.dispatch, "on_gpu", lambda x: True)
    x, plain, forgetful = rows(2, 9), layer("rope"), layer("rope", forgetting=Forgetting(window=2))
    assert plain(x).shape == forgetful(x).shape
    assert (plain.picked, forgetful.picked) == ("sdpa on cpu", "reference on cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("network", dense.NETWORKS)
@pytest.mark.parametrize("name", ["rope", "fox", "path_fox"])
def test_a_gpu_forgets_as_a_cpu(name, network):
    """In float64: training with its terms, evaluation, and steps through caches within a budget; in several panels,
    which are wider on a GPU."""
    options = {"forgetting": Forgetting(network=network, window=3, width=8, temperature=8.0)}
    attn, other = layer(name, **options), layer(name, **options).cuda()
    x = rows(2, 300)
    found = []
    for one, inputs in ((attn, x), (other, x.cuda())):
        with mock.patch.object(panels, "WIDE", (128, 128)):
            y, forget = one(inputs), one.forget
            (y.sin().sum() + forget.terms.distillation + forget.terms.budget).backward()
            grads = torch.cat([p.grad.flatten() for p in one.parameters()]).cpu()
            with torch.no_grad():
                whole, steps = one.eval()(inputs), []
                for budget in (40, "8 KiB"):
                    cache = one.new_cache(budget=budget)
                    steps += [one(inputs[:, :100], cache=cache), one(inputs[:, 100:103], cache=cache)]
        found.append([part.detach().cpu() for part in (y, grads, whole, *steps)])
    for got, expected in zip(found[1], found[0], strict=True):
        assert_same(got, expected)
