"""The linear side as a layer on a GPU runs it: which kernels, and what is said where there are none."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from peer_kernels import HERE, interpret
from torch._subclasses.fake_tensor import FakeTensorMode

import attnzoo.layer.dispatch
from attnzoo import build_attention, get, list_variants
from attnzoo.forms.backends import fla
from attnzoo.forms.backends.chunks import IN_FLOAT32
from attnzoo.forms.caches.inplace import BatchRows
from attnzoo.forms.protocol import Call, doubts, is_brief
from attnzoo.kernels.common.device import Machine
from attnzoo.layer.inplace import FixedCache

LINEAR = [name for name in list_variants("linear") if "fla" in get(name).forms]
DELTA = [name for name in LINEAR if "w" in get(name).requires]
D, T = 32, 70


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """``auto`` looks for kernels as it does on a GPU, in a process that has said nothing yet."""
    monkeypatch.setattr(attnzoo.layer.dispatch, "on_gpu", lambda x: True)
    monkeypatch.setattr(attnzoo.layer.dispatch, "_said", set())


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)


def layer(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(0)
    return build_attention(name, hidden_size=D, num_heads=2, head_dim=16, **options).to(HERE, dtype)


def situations(attn: Any, dtype: torch.dtype) -> Iterator[str]:
    """Runs the layer in each situation of many tokens and gives its name."""
    x = torch.randn(1, T, D, device=HERE, dtype=dtype)
    attn(x)
    yield "training"
    attn(x, attention_mask=torch.arange(T, device=HERE)[None] > 5)
    yield "padded"
    attn(x, cu_seqlens=torch.tensor([0, 33, T], device=HERE))
    yield "packed"
    with torch.no_grad():
        attn(x, cache=attn.new_cache())
    yield "prefill"


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", LINEAR)
def test_the_reference_on_a_gpu_is_a_warning_with_the_remedy(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fla, "DEVICE", HERE)
    monkeypatch.setattr(fla, "INSTALLED", False)
    attn = layer(name)
    for when in situations(attn, torch.float32):
        assert f"(reference on {HERE})" in repr(attn), when
        said = warnings_of(caplog)
        ours = "" if is_brief(get(name).form_set, "triton") else f"triton: {IN_FLOAT32}; "
        assert said == [  # once
            f"{name}: no kernel runs, and the reference is slower: {ours}fla: flash-linear-attention is not installed "
            "(pip install 'attnzoo[fla]')"
        ]


@pytest.mark.usefixtures("gpu")
def test_chunk_kernels_of_float32_are_there_for_who_asks(caplog: pytest.LogCaptureFixture) -> None:
    attn = layer("mamba2", impl="triton")
    attn(torch.randn(1, T, D, device=HERE))
    assert f"'triton' (triton on {HERE})" in repr(attn)
    assert warnings_of(caplog) == [f"mamba2: triton: {IN_FLOAT32}"]
    for dtype, said in ((torch.float32, IN_FLOAT32), (torch.bfloat16, ""), (torch.float16, "")):
        q = torch.zeros(1, T, 1, 16, dtype=dtype)
        assert doubts(get("mamba2").form_set, "triton", Call(q, q, q, attnzoo.Gate())) == said


@pytest.mark.usefixtures("gpu")
def test_parts_that_no_kernel_takes_together_are_named(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("rope_gla", "rope_path_wall"):
        layer(name)(torch.randn(1, 2, D, device=HERE))
    assert warnings_of(caplog) == [
        "rope_gla: no kernel runs, and the reference is slower: there is none for log_diag, angle together "
        "(there is for gla and for complex_linear)",
        "rope_path_wall: no kernel runs, and the reference is slower: there is none for log_diag, angle, w, beta "
        "together (there is for path_wall and for rope_path)",
    ]


@pytest.mark.usefixtures("gpu")
def test_each_reason_is_said_with_its_remedy(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(fla, "DEVICE", HERE)
    monkeypatch.setattr(fla, "INSTALLED", True)
    x = torch.randn(1, T, D, device=HERE)
    layer("deltanet")(x)
    layer("gla", torch.float64)(x.double())
    single, double = warnings_of(caplog)
    assert "do not take float32 (bfloat16 and float16 they do" in single
    assert "takes float16, bfloat16 or float32, got torch.float64" in double
    wide, narrow = torch.zeros(1, T, 1, 16, device=HERE), torch.zeros(1, T, 1, 8, device=HERE)
    for q, v, found in ((wide, wide, ""), (wide, narrow, "16 and 8"), (narrow, wide, "8 and 16")):
        with torch.no_grad():
            refused = fla.fla_unavailable(Call(q, q, v, attnzoo.Gate()))
        assert refused == (found and f"its kernels take K and V from 16, got {found} (larger heads)")


@pytest.mark.usefixtures("gpu")
def test_a_peer_that_cannot_be_imported_is_a_warning_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "fla.py").write_text("raise ImportError('tokenizers<=0.23.0 is required')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)
    for name, value in {"DEVICE": HERE, "INSTALLED": True, "VERSION": "0.6.0"}.items():
        monkeypatch.setattr(fla, name, value)
    fla._broken.cache_clear()
    try:
        layer("gla")(torch.randn(1, T, D, device=HERE))
    finally:
        fla._broken.cache_clear()
    assert warnings_of(caplog) == [
        "gla: no kernel runs, and the reference is slower: fla: flash-linear-attention cannot be imported: "
        "ImportError('tokenizers<=0.23.0 is required') (pip install -U 'attnzoo[fla]')"
    ]


@pytest.mark.usefixtures("gpu")
@torch.no_grad()
def test_a_step_of_fixed_memory_says_that_no_kernel_runs(caplog: pytest.LogCaptureFixture) -> None:
    attn = layer("gla", torch.float64, impl="reference")
    x, like, rows = torch.randn(1, 1, D, device=HERE, dtype=torch.float64), attn.new_cache(), BatchRows.idle(1, HERE)
    attn(x, cache=like)
    fixed = FixedCache.of(attn, like, rows, 4)
    rows.begin(0, 0)
    attn(x, cache=fixed)
    assert not warnings_of(caplog)  # it was asked for
    attn.impl = "auto"
    attn(x, cache=fixed)
    (said,) = warnings_of(caplog)
    assert said.startswith("gla: no kernel runs, and the reference is slower: triton: expected bfloat16, float16 or")


@pytest.mark.parametrize(
    ("dtype", "K", "V", "triton", "capability", "said"),
    [
        (torch.float16, 16, 16, True, (8, 0), ""),
        (torch.float16, 16, 17, True, (8, 0), "Triton miscompiles its 16-bit kernels of odd K or V, got 16 and 17"),
        (torch.float32, 17, 17, True, (8, 0), ""),
        (torch.float16, 16, 16, False, (8, 0), "runs on triton: the triton package is not installed (pip install"),
        (torch.float16, 16, 16, True, (7, 5), "Triton compiles for compute capability >= 8.0, got (7, 5)"),
    ],
)
def test_what_the_peer_cannot_serve_is_refused(
    dtype: torch.dtype, K: int, V: int, triton: bool, capability: tuple[int, int], said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(fla, "INSTALLED", True)
    monkeypatch.setattr(fla, "HAS_TRITON", triton)
    monkeypatch.setattr(fla, "machine", lambda device: Machine(capability, (3, 7)))
    with FakeTensorMode():
        q, v = (torch.empty(1, T, 1, n, device="cuda", dtype=dtype) for n in (K, V))
    refused = fla.fla_unavailable(Call(q, q, v, attnzoo.Gate()))
    assert said in refused
    assert bool(said) == bool(refused)


@pytest.mark.usefixtures("gpu")
def test_transforms_of_functions_run_on_the_reference(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The peer's autograd functions cannot be transformed."""
    monkeypatch.setattr(fla, "DEVICE", HERE)
    monkeypatch.setattr(fla, "INSTALLED", True)
    attn, x = layer("mamba2"), torch.randn(1, T, D, device=HERE)
    torch.func.grad(lambda x: attn(x).square().sum())(x)
    (said,) = warnings_of(caplog)
    assert said.endswith("cannot see through a kernel: expected plain autograd, or impl='reference'")


def test_nothing_is_said_on_a_cpu(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attnzoo.layer.dispatch, "on_gpu", lambda x: False)
    monkeypatch.setattr(attnzoo.layer.dispatch, "_said", set())
    layer("mamba2")(torch.randn(1, T, D, device=HERE))
    assert not warnings_of(caplog)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", LINEAR)
@torch.no_grad()
def test_cached_steps_run_on_the_fused_kernel(name: str) -> None:
    """Also with padding, and after a prefill of many tokens on the reference, whose state they take."""
    attn, plain = layer(name), layer(name, impl="reference")
    x, mask = torch.randn(2, T + 4, D, device=HERE), torch.ones(2, T + 4, dtype=torch.int64, device=HERE)
    mask[0, :7] = mask[1, T + 1] = 0
    cache, other = attn.new_cache(), plain.new_cache()
    for start, stop in ((0, T), (T, T + 1), (T + 1, T + 3), (T + 3, T + 4)):
        now = slice(start, stop)
        y, expected = (a(x[:, now], attention_mask=mask[:, now], cache=c) for a, c in ((attn, cache), (plain, other)))
        assert torch.allclose(y, expected, atol=1e-5)
        if start:
            assert f"(triton on {HERE})" in repr(attn)


@pytest.mark.fla
@pytest.mark.usefixtures("gpu", "peer")
@pytest.mark.parametrize("name", LINEAR)
def test_a_layer_runs_on_kernels_in_every_situation(name: str, caplog: pytest.LogCaptureFixture) -> None:
    dtype = torch.bfloat16 if HERE == "cuda" else torch.float16 if name in DELTA else torch.float32
    attn, brief = layer(name, dtype), is_brief(get(name).form_set, "triton")
    for when in situations(attn, dtype):
        assert f"({'fla' if brief or dtype == torch.float32 else 'triton'} on {HERE})" in repr(attn), when
    assert not [said for said in warnings_of(caplog) if "measures tiles" not in said and "miscompiles" not in said]


@pytest.mark.fla
@pytest.mark.usefixtures("gpu", "peer")
@pytest.mark.parametrize("name", [name for name in LINEAR if name not in DELTA])
def test_a_layer_on_kernels_equals_the_reference(name: str) -> None:
    """Padded, packed and in pieces, with the gradients of all weights."""
    if HERE == "cuda":
        pytest.skip("there float32 products are rounded to TF32")
    attn, plain = layer(name), layer(name, impl="reference")
    x = torch.randn(2, T, D)
    mask = torch.ones(2, T, dtype=torch.bool)
    mask[0, :9] = mask[1, 60:] = False

    def run(attn: Any) -> list[torch.Tensor]:
        cache, y = attn.new_cache(), attn(x[:1], cu_seqlens=torch.tensor([0, 33, 34, T]))
        pieces = [attn(x[:, now], attention_mask=mask[:, now], cache=cache) for now in (slice(0, 30), slice(30, T))]
        loss = y.square().sum() + torch.cat(pieces, 1).square().sum()
        grads = torch.autograd.grad(loss, list(attn.parameters()))
        return [x.detach() for x in (y, *pieces, *grads)]

    for got, expected in zip(run(attn), run(plain), strict=True):
        assert float((got - expected).norm() / expected.norm().clamp(min=1e-3)) <= 1e-4
