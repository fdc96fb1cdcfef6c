"""Which implementation a layer runs, and that the kernels serve it like the reference."""

import logging
import re
from dataclasses import replace

import pytest
import torch
from layers import D, H, rows

from attnzoo import Prune, build_attention, get, list_variants
from attnzoo.layer import dispatch
from attnzoo.samples import random_inputs


def test_auto_says_once_what_it_picked(caplog, monkeypatch):
    monkeypatch.setattr(dispatch, "_said", set())
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
    sizes = {
        "hidden_size": D,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 16 if {"w", "log_diag"} & {*get(name).requires} else 8,
    }
    reference, kernel = (build_attention(name, **sizes, acp=acp, impl=impl) for impl in ("reference", "triton"))
    kernel.load_state_dict(reference.state_dict())
    return reference, kernel


@pytest.mark.covering
@pytest.mark.parametrize("way", ["whole", "padded", "packed", "in pieces"])
@pytest.mark.parametrize(
    ("name", "acp"), [(name, acp) for name in TRITON for acp in (False, True)[: 1 + get(name).prunable]]
)
def test_the_kernel_serves_a_layer_like_the_reference(name, acp, way):
    """Whole calls with the gradient of every parameter, padding, packing, a prefill and steps (interpreted)."""
    reference, kernel = on_both(name, acp)
    x = rows(2, 37).float()
    mask = torch.ones(2, 37, dtype=torch.bool)
    mask[0, :5] = mask[1, 30:] = False

    def run(attn):
        if way == "whole":
            y = attn(x)
            return [y, *torch.autograd.grad(y.square().sum(), list(attn.parameters()), allow_unused=True)]
        if way == "padded":
            return [attn(x, attention_mask=mask)]
        with torch.no_grad():
            if way == "packed":
                return [attn(x[:1], cu_seqlens=torch.tensor([0, 11, 11, 37]))]
            cache = attn.new_cache()
            return [attn(part, cache=cache) for part in (x[:, :30], x[:, 30:31], x[:, 31:])]

    for got, expected in zip(run(kernel), run(reference), strict=True):
        assert (got - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.parametrize("name", TRITON)
@torch.no_grad()
def test_cached_steps_of_the_kernel_take_padding(name):
    """A padded prefill, a padded chunk and steps without a mask; rows reordered; the last ones by the reference."""
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
        attn.impl, before = then, attn.impl
        steps.append(attn(x[:, 21:], cache=cache))
        attn.impl = before
        return torch.cat(steps, 1)

    expected = run(reference, "reference")
    for got in (run(kernel, "triton"), run(kernel, "reference"), run(reference, "triton")):
        assert (got - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.covering
@pytest.mark.parametrize("begun_by", [None, "triton", "reference"])
@pytest.mark.parametrize(
    ("name", "constant"),
    [
        (name, constant)
        for name in TRITON
        if get(name).requires
        for constant in (False, True)[: 1 + ("log_decay" in get(name).requires)]
    ],
)
def test_gates_of_float64_are_read_as_the_reference_reads_them(name, constant, begun_by):
    """Beside q of float32: whole calls, padding, the gates' gradients, and a cache that the reference began."""
    variant, T = get(name), 20
    q, k, v, gate = random_inputs(name, B=2, T=T, H=2, G=1, K=16, V=16)
    q, k, v = q.float(), k.float(), v.float()
    if constant:
        gate = replace(gate, log_decay=gate.log_decay[0, 0].clone())
    valid = torch.ones(2, T, dtype=torch.bool)
    valid[1, :3] = False

    def run(form):
        given = gate.map(lambda part: part.clone().requires_grad_())
        whole, padded = (variant.forms[form](q, k, v, given, **more) for more in ({}, {"valid": valid}))
        gradients = torch.autograd.grad((whole + padded).square().sum(), [getattr(given, n) for n in given.parts])
        assert all(g.dtype == torch.float64 for g in gradients)
        return [whole, padded, *gradients]

    @torch.no_grad()
    def in_pieces(begins, then):
        state, rows = None, []
        for a, b, by in ((0, 12, begins), (12, 13, then), (13, T, then)):
            o, state = variant.extend(q[:, a:b], k[:, a:b], v[:, a:b], gate.slice(a, b), state, form=by)
            rows.append(o)
        return torch.cat(rows, 1)

    if begun_by is None:
        found = [*zip(run("triton"), run("parallel"), strict=True)]
    else:
        found = [(in_pieces(begun_by, "triton"), in_pieces("reference", "reference"))]
    for got, want in found:
        assert (got - want).norm() <= 1e-4 * want.norm()


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


@pytest.mark.parametrize("sizes", [{"conv_size": 5}, {"w_conv_size": 6}])
def test_windows_beyond_the_convolutions_kernel_are_refused_of_an_explicit_impl_and_said_by_auto(
    sizes, caplog, monkeypatch
):
    monkeypatch.setattr(dispatch, "_said", set())
    attn = build_attention("path", hidden_size=D, num_heads=H, head_dim=16, impl="triton", **sizes)
    (size,) = sizes.values()
    why = f"short convolutions: expected windows of up to 4 tokens, got {size}"
    with pytest.raises(RuntimeError, match=f"impl='triton': {why}"):
        attn(rows(1, 3).float())
    attn.impl = "auto"
    attn(rows(1, 3).float())
    assert "convolutions" not in caplog.text  # on a CPU, auto looks for no kernel
    monkeypatch.setattr("attnzoo.layer.modules.on_kernels", lambda impl, *given: True)  # as on a GPU
    monkeypatch.setattr("attnzoo.kernels.norms.triton_unavailable", lambda *given: "elsewhere")
    attn(rows(1, 3).float())
    (said,) = [line for line in caplog.messages if "convolutions" in line]
    assert re.match(why.replace(": ", ": no kernel runs, and PyTorch is slower: ", 1), said)


def test_a_step_without_decay_cannot_be_pruned():
    projected = build_attention("path", hidden_size=D, num_heads=H, head_dim=16).project(rows(1, 3).float())
    with pytest.raises(ValueError, match="prune: expected None"):
        get("path").extend(projected.q, projected.k, projected.v, projected.gate, form="triton", prune=Prune())
