"""What is measured of a model's layers, against matrices worked out by the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attnzoo import Prune, get, list_variants, oracle
from attnzoo.algebra.pruning import dropped_mass, kept_fraction
from attnzoo.config import ModelConfig
from attnzoo.evaluation import (
    default_epsilons,
    gate_maps,
    heads_kept,
    measure_context,
    measure_losses,
    measure_maps,
    measure_pruning,
    pruning,
    sweep_eps,
    token_losses,
)
from attnzoo.evaluation.layers import each_layer
from attnzoo.evaluation.pruning import _first_certified
from attnzoo.models import LanguageModel


def tiny(attention, layers=1, **options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_layers": layers, "num_heads": 4, "vocab_size": 40}
    return LanguageModel(ModelConfig(attention=attention, attention_options=options, **sizes)).eval()


def ids(T, seed=0):
    return torch.randint(0, 40, (T,), generator=torch.Generator().manual_seed(seed))


def sharpened(model, by=30.0, decay=0.0):
    """The same model with larger queries, so that rows weigh keys unequally, and gates that forget faster."""
    with torch.no_grad():
        for layer in model.attentions():
            layer.q_proj.weight.mul_(by)
            for name, bias in layer.gate.named_parameters():
                if name.endswith("bias"):
                    bias.sub_(decay)
    return model


def weights_of(model, tokens):
    """The oracle's weights of the first layer, [H, T, T]."""
    ((_, found),) = each_layer(model, tokens, lambda layer, core: (layer, core), numbers=[0])
    layer, core = found
    s, d = oracle.scores(core.q, core.k, core.gate, scale=layer.scale)
    return (s + d).softmax(-1)[0].detach().numpy()


@pytest.mark.parametrize(
    ("name", "options"),
    [("fox", {"num_kv_heads": 2}), ("rope", {}), ("path_fox", {}), ("wall", {}), ("nope", {"window": 9})],
)
def test_effective_context_is_the_median_of_rows_counted_one_by_one(name, options):
    model, tokens, eps = sharpened(tiny(name, **options), decay=-3.0), ids(40), 0.1
    weights = weights_of(model, tokens)
    if "window" in options:
        band = np.tril(np.ones((40, 40))) - np.tril(np.ones((40, 40)), -9)
        weights = weights * band
        weights /= weights.sum(-1, keepdims=True)
    expected = []
    for head in weights:
        counts = [
            next(n for n in range(1, 41) if row[max(0, i - n + 1) :].sum() >= 1 - eps) for i, row in enumerate(head)
        ]
        expected.append(sorted(counts)[19])
    found = measure_context(model, tokens, eps)
    assert found.heads == (tuple(expected),)
    assert 1 < max(expected) < 20
    assert (found.bounds[0] is not None) == get(name).prunable
    for n, bound in zip(expected, found.bounds[0] or expected, strict=True):
        assert n <= bound  # what the gate promises, the row holds


def test_effective_context_of_a_head_that_forgets_is_bounded_by_its_gate():
    model = sharpened(tiny("fox"), by=1.0, decay=3.0)
    found = measure_context(model, ids(200), 0.01)
    assert max(found.bounds[0]) < 20
    assert measure_context(sharpened(tiny("fox"), by=1.0, decay=-30.0), ids(200)).bounds == ((100,) * 4,)
    assert measure_context(sharpened(tiny("fox", window=30), by=1.0, decay=-30.0), ids(200)).bounds == ((30,) * 4,)


def test_layers_without_weights_have_no_effective_context():
    assert measure_context(tiny(["gla", "rope"], layers=2), ids(20)).layers == (1,)
    with pytest.raises(ValueError, match="expected a softmax layer"):
        measure_context(tiny("gla"), ids(20))
    with pytest.raises(ValueError, match="eps"):
        measure_context(tiny("rope"), ids(20), 1.5)


@pytest.mark.parametrize("name", list_variants())
def test_map_times_values_is_what_the_layer_makes(name):
    model, tokens = tiny(name), ids(24)
    maps = measure_maps(model, tokens, [str(number) for number in tokens.tolist()])
    ((_, found),) = each_layer(model, tokens, lambda layer, core: (layer, core))
    layer, core = found
    delta_rule = isinstance(core.write, str)
    options = {"scale": layer.scale}
    if layer.variant.side == "linear":
        options |= {"write": None if delta_rule else core.write, "delta_rule": delta_rule}
    expected = layer.variant.forms["recurrent"](core.q, core.k, core.v, core.gate, **options)[0]
    heads = core.v[0].repeat_interleave(core.q.shape[2] // core.v.shape[2], 1).transpose(0, 1)
    made = torch.as_tensor(maps.layers[0].weights).float() @ heads
    torch.testing.assert_close(made.transpose(0, 1), expected, rtol=1e-4, atol=1e-5)
    assert not np.triu(maps.layers[0].weights, 1).any()
    decays = {"log_decay", "log_diag"} & set(get(name).requires)
    assert (maps.layers[0].decay is not None) == bool(decays)


def test_a_token_that_writes_several_times_has_one_row_and_one_column():
    model, tokens = tiny("gated_deltanet", num_householder=2), ids(24)
    (found,) = measure_maps(model, tokens, [""] * 24).layers
    ((_, (layer, core)),) = each_layer(model, tokens, lambda layer, core: (layer, core))
    values = torch.randn(1, 24, 4, 8).repeat_interleave(2, 1)  # what it writes with each factor
    expected = layer.variant.forms["recurrent"](core.q, core.k, values, core.gate, scale=layer.scale, delta_rule=True)
    made = torch.as_tensor(found.weights).float() @ values[0, ::2].transpose(0, 1)
    torch.testing.assert_close(made.transpose(0, 1), expected[0, 1::2], rtol=1e-4, atol=1e-5)
    (gates,) = gate_maps(model, tokens)
    assert gates.length == gates.window == 24
    for decay in (found.decay, gates.decay):
        steps = np.diagonal(decay, -1, axis1=1, axis2=2)  # from each token to the next
        np.testing.assert_allclose(steps, core.gate.log_decay[0, 2::2].exp().T.numpy(), rtol=1e-5)


def test_maps_are_of_the_layers_that_are_wanted():
    model = tiny(["fox", "gla", "rope"], layers=3)
    assert [found.variant for found in measure_maps(model, ids(8), list("abcdefgh"), [2, 0]).layers] == ["fox", "rope"]
    with pytest.raises(ValueError, match="numbers from 0 to 2, got 3"):
        measure_maps(model, ids(8), list("abcdefgh"), [3])
    with pytest.raises(ValueError, match="expected 8, one per token"):
        measure_maps(model, ids(8), ["a"])


def test_pruned_shares_are_those_of_the_heads_that_can_prune():
    model, tokens = sharpened(tiny(["nope", "fox", "path_fox"], layers=3), by=1.0, decay=2.0), ids(500)
    found = measure_pruning(model, tokens, Prune(1e-3), step=7)
    assert (found.step, found.tokens, found.layers, found.eps) == (7, 500, (1, 2), 1e-3)
    cores = dict(each_layer(model, tokens, lambda layer, core: (layer, core)))
    for number, heads in zip(found.layers, found.heads, strict=True):
        layer, core = cores[number]
        np.testing.assert_allclose(1 - np.array(heads), heads_kept(layer, core, Prune(1e-3), None), rtol=1e-5)
        assert len(heads) == 4
    shares = np.array(found.heads)
    assert found.share == pytest.approx(shares.mean())
    assert found.share > 0.3
    assert found.local == (shares > 0.5).mean()
    assert measure_pruning(sharpened(tiny("fox"), decay=-30), tokens).share == 0
    assert all(layer.prune is None for layer in model.attentions())
    with pytest.raises(ValueError, match="expected a layer with a scalar decay, which is what prunes, got gla, rope"):
        measure_pruning(tiny(["gla", "rope"], layers=2), tokens)


def test_blocks_that_a_window_hides_are_not_counted_as_pruned():
    model = sharpened(tiny("fox", window=64), by=1.0, decay=-30)
    assert measure_pruning(model, ids(1000)).share == 0


def test_sweep_measures_the_model_with_each_eps_and_leaves_it_as_it_was():
    model = sharpened(tiny("fox", acp=Prune(1e-5)), by=4.0, decay=0.5)
    with torch.no_grad():
        model.attentions()[0].o_proj.weight.mul_(100)
    windows = torch.stack([ids(701, 1), ids(701, 2)])
    with pruning(model, None):
        plain = token_losses(model, windows)
    found = sweep_eps(model, windows, [1e-6, 0.5], repeats=1)
    assert [row.eps for row in found.rows] == [None, 1e-6, 0.5]
    first, safe, loose = found.rows
    assert first.loss == pytest.approx(plain.mean(), rel=1e-6)
    assert (first.change, first.kept) == (0, 1)
    assert 1 > safe.kept > loose.kept > 0
    assert abs(safe.change) < 1e-5 < abs(loose.change)
    assert all(row.seconds > 0 for row in found.rows)
    with pruning(model, Prune(0.5)):
        assert token_losses(model, windows).mean() == pytest.approx(loose.loss, rel=1e-6)
    assert model.attentions()[0].prune == Prune(1e-5)
    assert (found.tokens, found.windows, found.bound) == (700, 2, "tail")


def test_sweep_reads_windows_in_batches_and_times_the_first_by_window(monkeypatch):
    model, windows = tiny("fox"), torch.stack([ids(300, seed) for seed in range(5)])
    inside = sweep_eps.__globals__
    monkeypatch.setitem(inside, "forward_seconds", lambda model, tokens: float(tokens.shape[0]))
    monkeypatch.setitem(inside, "token_losses", lambda model, windows, size: np.full((5, 1), size))
    for given, batch in ((2, 2), (9, 9), (None, 2**14 // 299)):
        found = sweep_eps(model, windows, [1e-4], repeats=2, batch_size=given)
        assert [(row.loss, row.seconds) for row in found.rows] == [(batch, 1.0)] * 2
    with pytest.raises(ValueError, match="batch_size: expected at least 1, got 3, 5, 0"):
        sweep_eps(model, windows, [1e-4], batch_size=0)


def test_default_epsilons_rise_and_have_the_default_among_them():
    found = default_epsilons(1e-6, 1e-2, 3)
    np.testing.assert_allclose(found, sorted([1e-6, 1e-4, 1e-2, Prune().eps]))
    with pytest.raises(ValueError, match="0 < least < most < 1"):
        default_epsilons(0.1, 0.01)


@pytest.mark.parametrize(("window", "packed"), [(None, False), (100, False), (None, True)])
@pytest.mark.parametrize("name", ["fox", "path_fox"])
def test_certificate_of_any_gate_leaves_what_the_kernels_leave_but_for_their_nearer_keys(name, window, packed):
    model, tokens = sharpened(tiny(name, window=window), by=1.0, decay=0.7), ids(900)
    ((_, found),) = each_layer(model, tokens, lambda layer, core: (layer, core))
    borders = torch.tensor([0, 300, 900]) if packed else None
    for prune in (None, Prune(1e-4)):
        kernels = heads_kept(*found, prune, borders)
        first = _first_certified(*found, prune, borders)
        assert kernels.max() < 1 or not (prune or window or packed)
        any_gate = kept_fraction(first, 900, rows=128, cols=64).float()
        np.testing.assert_allclose(any_gate, kernels, atol=0.03 if prune else 1e-6)


@pytest.mark.parametrize(
    ("name", "options"),
    [("fox_rope", {}), ("gated_wall", {"window": 150, "gate_bias": 0.0}), ("path_fox", {"num_householder": 2})],
)
def test_what_is_pruned_of_any_gate_weighs_at_most_eps(name, options):
    model, tokens, eps = sharpened(tiny(name, **options), by=3.0, decay=-3.0), ids(500), 0.3
    ((_, found),) = each_layer(model, tokens, lambda layer, core: (layer, core))
    first = _first_certified(*found, Prune(eps), None)
    weights = torch.as_tensor(measure_maps(model, tokens, [""] * 500).layers[0].weights)
    dropped = dropped_mass(weights[None], first)
    assert 0.01 * eps < dropped.max() <= eps
    assert 0 < measure_pruning(model, tokens, Prune(eps)).share < 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fox", "path_fox", "gla"])
def test_gpu_measures_what_a_cpu_does(name):
    model, tokens = sharpened(tiny(name, head_dim=16), by=2.0, decay=0.5), ids(700)
    windows = tokens[None]
    here = [measure_losses(model, windows).loss, measure_maps(model, tokens[:40], [""] * 40).layers[0].weights]
    softmax = get(name).side == "softmax"
    heads = (measure_context(model, tokens).heads, measure_pruning(model, tokens).heads) if softmax else ()
    model = model.cuda()
    there = [measure_losses(model, windows).loss, measure_maps(model, tokens[:40], [""] * 40).layers[0].weights]
    for cpu, gpu in zip(here, there, strict=True):
        np.testing.assert_allclose(gpu, cpu, rtol=2e-2, atol=2e-2)
    if softmax:
        np.testing.assert_allclose(measure_context(model, tokens).heads, heads[0], atol=1)
        np.testing.assert_allclose(measure_pruning(model, tokens).heads, heads[1], atol=0.03)
        assert len(sweep_eps(model, windows, [1e-4], repeats=1).rows) == 2
