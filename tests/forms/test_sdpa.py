"""The form on PyTorch's attention: exact in float64, as near as its page says below, taken by auto in its budget."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from thinning import in_long
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import attnzoo.layer.dispatch
from attnzoo import Gate, build_attention, get
from attnzoo.errors import UnavailableError
from attnzoo.forms.backends import sdpa
from attnzoo.forms.backends.sdpa import BUDGET, doubts, logit_error, ragged_kernel, sdpa_kernel
from attnzoo.forms.caches.state import KVCache
from attnzoo.forms.options import SoftmaxOptions
from attnzoo.forms.protocol import Call
from attnzoo.layer.dispatch import choose
from attnzoo.registry.variant import Variant
from attnzoo.samples import random_inputs
from attnzoo.testing import assert_close, in_float64, relative_error, value_and_gradients

SIDES = ("nope", "alibi", "fox", "rope", "fox_rope")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
PAGE = Path(__file__).parents[2] / "docs/reference/what_runs_where.md"
ROWS = re.findall(
    r"^\| `(\w+)` \| (\d) \| (\d+) \| ([\d.]+) \| (\S+) \| (\S+) \| (\S+) \| (\S+) \|$", PAGE.read_text(), re.M
)


@pytest.mark.parametrize("name", SIDES)
def test_values_and_gradients_are_the_oracles_with_shared_keys_padding_packing_and_caches(name: str) -> None:
    variant, inputs = get(name), random_inputs(name, 2, 21, 4, 2, 8, 6)
    form = variant.forms["sdpa"]
    assert_close(value_and_gradients(form, inputs), value_and_gradients(variant.oracle, inputs), what=name)
    q, k, v, gate = inputs
    valid = torch.ones(2, 21, dtype=torch.bool)
    valid[0, :5] = valid[1, 7:9] = valid[1, 18:] = False
    cases: list[dict[str, Any]] = [{"valid": valid}, {"scale": 0.3, "valid": valid}, {"window": 5}]
    cases += [{"window": 5, "valid": valid}]
    for options in cases:
        runs = (
            value_and_gradients(lambda *x, f=f, o=options: variant.forms[f](*x, **o) * valid[..., None, None], inputs)
            for f in ("sdpa", "parallel")
        )
        assert_close(*runs, what=f"{name} {list(options)}")
    one = (q[:1], k[:1], v[:1], gate.map(lambda x: x if x.ndim == 1 else x[:1]))
    for window in (None, 3):
        packed = {"cu_seqlens": torch.tensor([0, 4, 4, 15, 21]), "window": window}
        assert relative_error(form(*one, **packed), variant.forms["parallel"](*one, **packed)) <= 1e-10
        in_steps_it_goes_on_from_the_reference(variant, inputs, valid, window)


def in_steps_it_goes_on_from_the_reference(
    variant: Variant, inputs: Any, valid: Tensor | None, window: int | None
) -> None:
    (q, k, v, gate), state, rows = inputs, None, []
    for now in (slice(0, 9), slice(9, 10), slice(10, 16), slice(16, 21)):
        how = "reference" if now.start == 9 else "sdpa"  # each goes on from the other's state
        step = (x[:, now] for x in (q, k, v))
        options = {"valid": None if valid is None else valid[:, now], "window": window}
        o, state = variant.extend(*step, gate.slice(now.start, now.stop), state, form=how, **options)
        rows.append(o)
    whole = variant.forms["parallel"](*inputs, valid=valid, window=window)
    there = slice(None) if valid is None else valid
    assert relative_error(torch.cat(rows, 1)[there], whole[there]) <= 1e-10


def ragged(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, T: int, S: int, **options: Any) -> Tensor:
    """``torch.nn.attention.varlen.varlen_attn`` by its documentation, one sequence after another."""
    (left, right), scale, rows = options["window_size"], options["scale"], []
    assert [right, T, S] == [0, int(cu_q.diff().max()), int(cu_k.diff().max())]
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert q.shape[2] % 8 == 0
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    for i in range(len(cu_q) - 1):
        own, keys = slice(int(cu_q[i]), int(cu_q[i + 1])), slice(int(cu_k[i]), int(cu_k[i + 1]))
        n, m = own.stop - own.start, keys.stop - keys.start
        seen = torch.ones(n, m, dtype=torch.bool).tril(m - n)
        seen = seen if left < 0 else seen.triu(m - n - left)
        logits = scale * torch.einsum("thk,jhk->htj", q[own], k[keys])
        rows.append(torch.einsum("htj,jhv->thv", logits.masked_fill(~seen, -torch.inf).softmax(-1), v[keys]))
    return torch.cat(rows)


@pytest.mark.parametrize("name", SIDES)
def test_packing_windows_and_cached_tokens_run_on_a_ragged_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[int]] = []

    def spied(*given: Any, **options: Any) -> Tensor:
        calls.append(given[3].tolist())
        return ragged(*given, **options)

    variant, (q, k, v, gate) = get(name), random_inputs(name, 2, 21, 4, 2, 8, 6)
    one = (q[:1], k[:1], v[:1], gate.map(lambda x: x if x.ndim == 1 else x[:1]))
    monkeypatch.setattr(sdpa, "takes_ragged", lambda v, heads, width: True)
    monkeypatch.setattr(sdpa, "ragged_kernel", lambda: spied)
    for options in ({"cu_seqlens": torch.tensor([0, 4, 4, 15, 21])}, {"window": 5}):
        packed = options | {"window": options.get("window", 3)}
        for case in (options, packed):
            runs = (
                value_and_gradients(lambda *x, f=f, o=case: variant.forms[f](*x, **o), one)
                for f in ("sdpa", "parallel")
            )
            assert_close(*runs, what=f"{name} {case}")
    assert calls == [[0, 4, 4, 15, 21]] * 2 + [[0, 21]] * 2
    in_steps_it_goes_on_from_the_reference(variant, (q, k, v, gate), None, 7)
    assert calls[4:] == [[0, 9, 18], [0, 6, 12], [0, 5, 10]]
    variant.forms["sdpa"](*one)
    assert len(calls) == 7  # no mask is needed: the plain kernel


def test_gradients_of_gates_stay_within_their_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, gate = gated(96, 0.1, torch.bfloat16)
    borders, found = torch.tensor([0, 40, 96]), []
    monkeypatch.setattr(sdpa, "takes_ragged", lambda v, heads, width: True)
    monkeypatch.setattr(sdpa, "ragged_kernel", lambda: ragged)
    for later in (v[:, 40:], 100 * v[:, 40:]):
        g = cast(Tensor, gate.log_decay).clone().requires_grad_()
        o = get("fox").forms["sdpa"](q, k, torch.cat([v[:, :40], later], 1), Gate(log_decay=g), cu_seqlens=borders)
        found.append(torch.autograd.grad(o.float().square().sum(), g)[0][:, :40])
    torch.testing.assert_close(*found, rtol=0, atol=1e-6 * float(found[0].abs().max()))


def test_gradients_too_small_to_be_seen_beside_another_sequences_stay_small() -> None:
    x, borders = torch.zeros(1, 6, 1, dtype=torch.float64, requires_grad=True), torch.tensor([0, 2, 6])
    dy = torch.tensor([1, -1, 1e-25, 1e-25, -1e-25, 5e-26], dtype=torch.bfloat16)[None, :, None]
    parts = sdpa.Channels.apply(x, dy.dtype, 3, borders)  # type: ignore[no-untyped-call]
    (dx,) = torch.autograd.grad(parts, x, dy[..., None].expand(parts.shape))
    assert (dx.abs() <= 2 * dy.abs()).all()


def test_the_ragged_kernel_of_this_pytorch_takes_the_call() -> None:
    """Names and shapes alone, as it runs on CUDA."""
    kernel = ragged_kernel()
    if kernel is None:
        pytest.skip("this PyTorch has no ragged kernel with windows and a scale")
    x = torch.empty(9, 4, 72, dtype=torch.bfloat16, device="meta")
    borders = torch.empty(3, dtype=torch.int32, device="meta")
    assert kernel(x, x[:, :2], x[:, :2], borders, borders, 5, 5, scale=0.3, window_size=(3, 0)).shape == x.shape


def test_flex_attention_takes_the_longer_keys() -> None:
    q, k, v, gate = random_inputs("fox", 2, 21, 4, 2, 8, 6)
    longer = sdpa.lengthened(q, k, sdpa.bias_of(KVCache(k, v, gate.log_decay)), 8**-0.5, 3)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 21, 21, device="cpu")
    rows = (x.transpose(1, 2) for x in (*longer, v))
    o = cast(Tensor, flex_attention(*rows, block_mask=mask, scale=8**-0.5, enable_gqa=True))
    assert relative_error(o.transpose(1, 2), get("fox").oracle(q, k, v, gate)) <= 1e-10


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"window": 30}], ids=["whole", "window"])
def test_on_a_gpu_the_ragged_kernel_is_as_exact_as_rows(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, kernel = [], ragged_kernel()
    if kernel is None:
        pytest.skip("this PyTorch has no ragged kernel with windows and a scale")

    def spied(*given: Any, **options: Any) -> Tensor:
        calls.append(given[5])
        return kernel(*given, **options)

    monkeypatch.setattr(sdpa, "ragged_kernel", lambda: spied)
    q, k, v, gate = (x.cuda() if isinstance(x, Tensor) else x.map(Tensor.cuda) for x in gated(300, 0.1, torch.bfloat16))
    options = options | {"cu_seqlens": torch.tensor([0, 100, 100, 107, 300], device="cuda")}
    exact = value_and_gradients(
        lambda *x: get("fox").forms["parallel"](*x, **options),
        in_float64((q, k, v, gate)),
    )
    form = partial(get("fox").forms["sdpa"], **options)
    got = value_and_gradients(form, (q, k, v, gate))
    assert calls == [193]
    monkeypatch.setattr(sdpa, "takes_ragged", lambda v, heads, width: False)
    rows = value_and_gradients(form, (q, k, v, gate))
    assert len(calls) == 1
    off, usual = ({name: relative_error(x, exact[name]) for name, x in run.items()} for run in (got, rows))
    assert all(off[name] <= 2 * usual[name] for name in off), (off, usual)


def gated(T: int, mean: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Gate]:
    """q, k and v of 64 channels in ``dtype``, with two query heads a key, and gates of this mean in float32."""
    torch.manual_seed(T)
    q, k, v = (torch.randn(1, T, heads, 64).to(dtype) for heads in (2, 1, 1))
    return q, k, v, Gate(log_decay=-2 * mean * torch.rand(1, T, 2))


def dense(q: Tensor, k: Tensor, v: Tensor, gate: Gate) -> Tensor:
    """FoX's definition with one matrix of logits per head."""
    sums = cast(Tensor, gate.log_decay).cumsum(1).mT
    logits = torch.einsum("bthk,bjk->bhtj", q, k[:, :, 0]) * q.shape[3] ** -0.5 + sums[..., None] - sums[:, :, None]
    hidden = torch.ones(logits.shape[2:], dtype=torch.bool).triu(1)
    return torch.einsum("bhtj,bjv->bthv", logits.masked_fill(hidden, -torch.inf).softmax(-1), v[:, :, 0])


def errors(dtype: torch.dtype, channels: int, T: int, mean: float) -> list[float]:
    """Relative errors of the output, the largest of q, k and v, and that of the gate, against float64."""
    q, k, v, gate = gated(T, mean, dtype)
    kernel = sdpa_kernel(get("fox").form_set, channels)
    got = value_and_gradients(lambda *x: kernel.run(*x, SoftmaxOptions()), (q, k, v, gate))
    exact = value_and_gradients(dense, in_float64((q, k, v, gate)))
    off = {name: relative_error(x, exact[name]) for name, x in got.items()}
    return [off["o"], max(off[x] for x in "qkv"), off["log_decay"]]


def test_errors_are_what_the_page_says() -> None:
    """The bound of a logit, and the measured errors, of every dtype, number of channels, length and mean gate."""
    assert {row[0] for row in ROWS} == set(DTYPES)
    for name, channels, T, mean, bound, *listed in ROWS:
        case = (DTYPES[name], int(channels), int(T), float(mean))
        assert float(bound) == float(f"{logit_error(case[2] * case[3], case[0], case[1]):.1e}"), case
        if case[2] > in_long(1024, 4096):
            continue
        found = errors(*case)
        assert all(got <= float(most) for got, most in zip(found, listed, strict=True)), (case, found)


@pytest.mark.parametrize("option", ["sink", "softcap", "return_lse"])
def test_what_it_cannot_do_is_refused_by_name(option: str) -> None:
    value: Any = {"sink": torch.zeros(4), "softcap": 1.0, "return_lse": True}[option]
    call = Call(*random_inputs("fox"), options={option: value})
    with pytest.raises(UnavailableError, match=f"the sdpa form has no option {option} here"):
        choose(get("fox"), "sdpa", call)


def test_auto_takes_it_where_no_kernel_serves_and_its_budget_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, gate = gated(128, 1.0, torch.bfloat16)
    calls = {
        "sdpa": Call(q, k, v, gate),
        "reference": Call(q, k, v, replace(gate, log_decay=cast(Tensor, gate.log_decay) - 200)),
    }
    assert all(choose(get("fox"), "auto", call) == "reference" for call in calls.values())  # on a CPU
    monkeypatch.setattr(attnzoo.layer.dispatch, "on_gpu", lambda x: True)
    monkeypatch.setattr(attnzoo.forms.backends.fox_path, "refused", lambda call: "not here")
    for form, call in calls.items():
        assert choose(get("fox"), "auto", call) == form
        assert choose(get("fox"), "sdpa", call) == "sdpa"
        assert (f"off by at most {BUDGET:g}" in doubts(call)) == (form == "reference")
    slopes = Gate(log_decay=torch.tensor([-10.0, -0.1]))
    assert doubts(Call(q, k, v, slopes)) == ""
    assert "which is not read here" in doubts(Call(q.to("meta"), k, v, slopes.map(lambda x: x.to("meta"))))
    assert "these span more" in doubts(Call(q.float(), k.float(), v.float(), slopes))


def test_a_layer_trains_and_goes_on_from_a_cache_like_the_reference() -> None:
    torch.manual_seed(0)
    plain = build_attention("fox", hidden_size=32, num_heads=4, num_kv_heads=2)
    layer = build_attention("fox", hidden_size=32, num_heads=4, num_kv_heads=2, impl="sdpa")
    layer.load_state_dict(plain.state_dict())
    x = torch.randn(2, 12, 32)
    (expected, got) = (module(x) for module in (plain, layer))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
    got.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    with torch.no_grad():
        cache = layer.new_cache()
        parts = [layer(part, cache=cache) for part in x.split([7, 1, 4], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-6)
