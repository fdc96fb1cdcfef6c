"""Layers and models without numbers (meta and fake tensors), exported for every length, and under ``torch.func``."""

import pytest
import torch
from layers import D, H, layer, rows
from packaging.version import Version
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, vmap

from attnzoo import Prune, build_attention, list_variants
from attnzoo.config import ModelConfig
from attnzoo.models import LanguageModel

exports = pytest.mark.skipif(Version(torch.__version__) < Version("2.8"), reason="torch 2.7 cannot trace a layer")
every_variant = pytest.mark.parametrize("name", list_variants())


def zoo(names):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "vocab_size": 20}
    return LanguageModel(ModelConfig(attention=names, num_layers=len(names), **sizes))


def calls(attn, x):
    """Every kind of call: gradients, padding, packing, a prefill and a step."""
    attn(x).sum().backward()
    mask = torch.ones(2, 6, dtype=torch.bool, device=x.device)
    with torch.no_grad():
        cache = attn.new_cache()
        borders = torch.arange(0, 13, 6, device=x.device)
        packed = attn(x.reshape(1, 12, D), cu_seqlens=borders)
        return [attn(x, attention_mask=mask), packed.view_as(x), attn(x, cache=cache), attn(x[:, :1], cache=cache)]


@every_variant
def test_a_layer_on_the_meta_device_gives_shapes(name):
    with torch.device("meta"):
        attn = build_attention(name, hidden_size=D, num_heads=H)
        outputs = calls(attn, torch.empty(2, 6, D))
    assert all(y.is_meta for y in outputs)
    assert [tuple(y.shape) for y in outputs] == [(2, 6, D)] * 3 + [(2, 1, D)]
    assert all(p.grad is not None and p.grad.is_meta for p in attn.parameters())


@pytest.mark.parametrize("name", ["mamba2", "retnet", "path_fox"])
def test_a_layer_of_fake_tensors_gives_shapes(name):
    with FakeTensorMode():
        attn = build_attention(name, hidden_size=D, num_heads=H)
        assert [y.shape[1] for y in calls(attn, torch.empty(2, 6, D))] == [6, 6, 6, 1]


def test_weights_that_are_made_empty_are_filled_by_a_checkpoint():
    accelerate = pytest.importorskip("accelerate")
    model = zoo(list_variants())
    with accelerate.init_empty_weights():
        empty = LanguageModel(model.config)
    assert all(p.is_meta for p in empty.parameters())
    empty.load_state_dict(model.state_dict(), assign=True)
    tokens = torch.randint(20, (1, 7))
    assert torch.equal(empty(tokens).logits, model(tokens).logits)


@exports
def test_a_model_is_exported_for_every_length():
    """One program for all T and B, with every part of a gate, equal to the model to the last bit."""
    model = zoo(["retnet", "gla", "rope", "path_fox"]).eval()
    shapes = {0: torch.export.Dim("B", min=1), 1: torch.export.Dim("T", min=2)}
    program = torch.export.export(model, (torch.randint(20, (2, 9)),), dynamic_shapes=(shapes,))
    for B, T in ((2, 9), (3, 2), (1, 150)):
        tokens = torch.randint(20, (B, T))
        with torch.no_grad():
            assert torch.equal(program.module()(tokens).logits, model(tokens).logits)


@exports
@pytest.mark.parametrize("name", ["fox", "gated_deltanet"])
def test_options_of_a_layer_are_exported(name):
    options = {"block": "pro", "conv_size": 3}
    if name == "fox":
        options |= {"acp": Prune(1e-3), "window": 70, "sinks": True}
    attn = layer(name, **options)
    x, mask = rows(2, 9), torch.ones(2, 9, dtype=torch.bool)
    T = torch.export.Dim("T", min=2)
    program = torch.export.export(attn, (x, None, mask), dynamic_shapes=({1: T}, None, {1: T}))
    x, mask = rows(2, 140), torch.ones(2, 140, dtype=torch.bool)
    mask[0, :5] = mask[1, 100:] = False
    with torch.no_grad():
        assert torch.equal(program.module()(x, None, mask), attn(x, attention_mask=mask))


@every_variant
def test_gradients_of_single_rows_by_vmap_are_those_of_single_calls(name):
    attn, x = layer(name, "pro"), rows(3, 9)
    weights = {key: p.detach() for key, p in attn.named_parameters()}

    def loss(weights, row):
        return functional_call(attn, weights, (row[None],)).square().sum()

    every = vmap(grad(loss), (None, 0))(weights, x)
    for b in range(3):
        attn.zero_grad()
        attn(x[b : b + 1]).square().sum().backward()
        for key, p in attn.named_parameters():
            torch.testing.assert_close(every[key][b], p.grad, msg=key)
    torch.testing.assert_close(vmap(lambda row: attn(row[None])[0])(x), attn(x))
